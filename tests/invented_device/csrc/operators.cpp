// The operators of the invented accelerator. The kernels are the processor's, on the device's memory.
//
// An operator that only writes into its arguments is queued. An operator that returns new tensors waits for its own stream
// (not for others) and is computed at once.

#include "call.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/as_strided_native.h>

namespace invented {

namespace {

c10::Stream stream_of(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype != at::kDouble && dtype != at::kComplexDouble, "invented: the device has no float64");
}

at::Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "invented: only host memory is pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  check_dtype(c10::dtype_or_default(dtype));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "invented: only host memory is pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> place;
  if (offset) place = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), place);
}

at::Tensor view(const at::Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void resize_storage(const at::Tensor& self, size_t bytes) {
  if (bytes > self.storage().nbytes()) {
    at::globalContext().getAcceleratorHooksInterface(at::kPrivateUse1);
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
}

const at::Tensor& resize(const at::Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  resize_storage(self, (self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, at::SymIntArrayRef size,
                        at::SymIntArrayRef stride) {
  at::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  strides.empty() && !sizes.empty() ? impl->set_sizes_contiguous(sizes) : impl->set_sizes_and_strides(sizes, strides);
  resize_storage(self, self.numel() == 0 ? 0 : at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                                                self.storage_offset()));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(c10::SymInt(size)), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (self.numel() == 0) return to;
  if (is_ours(self) && is_ours(to)) {
    if (self.device() != to.device()) finish(stream_of(self)), finish(stream_of(to));
    enqueue(stream_of(to), [from = kernel_view(self), into = kernel_view(to)]() mutable { into.copy_(from); });
    if (self.device() != to.device()) finish(stream_of(to));
  } else if (is_ours(to)) {
    const bool later = non_blocking && is_pinned(self.storage().data());
    // Pageable memory is staged. A view without an owner for pinned memory: the host may write into it too early.
    const at::Tensor from = later ? at::from_blob(self.data_ptr(), self.sizes(), self.strides(), self.options())
                                  : self.detach().clone();
    enqueue(stream_of(to), [from, into = kernel_view(to)]() mutable { into.copy_(from); });
  } else if (non_blocking && is_pinned(to.storage().data())) {
    const at::Tensor into = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options());
    enqueue(stream_of(self), [from = kernel_view(self), into]() mutable { into.copy_(from); });
  } else {
    if (!has_fault("copies-do-not-wait")) finish(stream_of(self));
    at::Tensor(to).copy_(kernel_view(self));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.numel() == 0) at::Tensor(to).resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  finish(stream_of(self));
  return at::_local_scalar_dense(kernel_view(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) { use_on(self.storage().data_ptr(), stream); }

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::empty_like(input, at::kBool).fill_(true)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Operators that torch sends to a device under names that the processor does not have.
at::Tensor to_device(const at::Tensor& host, const at::Tensor& like) {
  return host.defined() ? host.to(like.options()) : host;
}

at::Tensor host_copy(const at::Tensor& tensor) { return tensor.defined() ? tensor.detach().cpu() : tensor; }

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation, bool transposed,
                       at::SymIntArrayRef output_padding, c10::SymInt groups) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto host_bias = bias ? std::optional<at::Tensor>(host_copy(*bias)) : bias;
  return to_device(at::convolution_symint(host_copy(input), host_copy(weight), host_bias, stride, padding, dilation, transposed,
                                          output_padding, groups),
                   input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::SymIntArrayRef stride,
    at::SymIntArrayRef padding, at::SymIntArrayRef dilation, bool transposed, at::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::SymInt channels = gradient.sym_size(1);
  const auto [to_input, to_weight, to_bias] =
      at::convolution_backward_symint(host_copy(gradient), host_copy(input), host_copy(weight), c10::SymIntArrayRef(channels),
                                      stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {to_device(to_input, input), to_device(to_weight, input), to_device(to_bias, input)};
}

void any_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// The device has a kernel for each operator for which the processor has one, except those that torch itself composes of
// others. With the fault "operators-on-the-host" it lacks three, which go to the fallback below.
bool has_kernel(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (has_fault("operators-on-the-host") && (name == "aten::_softmax" || name == "aten::mm" ||
      (name == "aten::add" && op.schema().overload_name() == "out"))) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !has_kernel(*op)) continue;
    const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  }
}

}  // namespace

}  // namespace invented
