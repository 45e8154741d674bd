// One call of an operator, computed by the processor's kernel on the device's memory, now or later.
#pragma once

#include "device.h"
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>

namespace invented {

using torch::jit::Stack;

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A tensor of the processor over the same bytes. It owns nothing: memory that is freed too early shows.
inline at::Tensor kernel_view(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU);
  if (tensor.storage().nbytes() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* bytes = readable(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack), schema_(op.schema()) {
    const size_t count = schema_.arguments().size();
    for (size_t place = 0; place < count; ++place) given_.push_back((*stack)[stack->size() - count + place]);
    find_device();
    refuse();
  }

  void run() {
    const c10::DeviceGuard guard(device_at(device_));
    Stack host = on_host();
    torch::jit::drop(*stack_, given_.size());
    if (may_be_queued()) {
      auto kept = std::make_shared<Stack>(std::move(host));
      enqueue(current_stream(device_), [op = op_, kept] { compute(op, kept.get()); });
      for (size_t place = 0; place < schema_.returns().size(); ++place) stack_->push_back(*written(place));
      return;
    }
    const Lock lock(mutex());  // nothing else is queued or freed until the results are stored
    finish(current_stream(device_));
    const Stack arguments = host;
    compute(op_, &host);
    store_resized(arguments);
    for (size_t place = 0; place < schema_.returns().size(); ++place) {
      const c10::IValue* argument = written(place);
      stack_->push_back(argument != nullptr ? *argument : on_device(host[place], arguments));
    }
  }

 private:
  static void compute(const c10::OperatorHandle& op, Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const std::string& name = op.schema().name();
    if (has_fault("products-of-few-bits") && name.find("mm") != std::string::npos) {
      for (c10::IValue& value : *stack) {
        if (value.isTensor() && value.toTensor().scalar_type() == at::kFloat && &value != &stack->back()) {
          value = value.toTensor().to(at::kBFloat16).to(at::kFloat);
        }
      }
    }
    const at::Tensor written = stack->back().isTensor() ? stack->back().toTensor() : at::Tensor();
    op.callBoxed(stack);
    if (has_fault("softmax-forgets-keys") && name == "aten::_softmax" && written.size(-1) > 4) {
      written.slice(-1, 0, 1).zero_();
    }
    if (has_fault("cumsum-starts-late") && name == "aten::cumsum") written.sub_(1);
  }

  template <class Visit>
  static void each_tensor(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& one : value.toTensorVector()) visit(one);
    } else if (value.isList()) {
      for (const c10::IValue& one : value.toListRef()) each_tensor(one, visit);
    }
  }

  void find_device() {
    for (const auto& value : given_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) return;
        const int found = tensor.device().index();
        TORCH_CHECK(device_ < 0 || device_ == found, op_.operator_name(), ": tensors on invented:", device_, " and invented:",
                    found);
        device_ = found;
      });
    }
    for (const auto& value : given_) {
      if (device_ < 0 && value.isDevice()) device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    }
    if (device_ < 0) device_ = current_device();
  }

  void refuse() const {
    const std::string& name = schema_.name();
    const bool indexing = name.find("index") != std::string::npos;
    for (size_t place = 0; place < given_.size(); ++place) {
      each_tensor(given_[place], [&](const at::Tensor& tensor) {
        TORCH_CHECK(is_ours(tensor) || tensor.dim() == 0 || (indexing && place > 0), name, ": expected all tensors on invented:",
                    device_, ", but found a tensor on ", tensor.device());
      });
    }
    if (has_fault("no-masked-assignment") && name.find("index_put") != std::string::npos) {
      each_tensor(given_[1], [&](const at::Tensor& index) {
        TORCH_CHECK_NOT_IMPLEMENTED(index.scalar_type() != at::kBool, "invented: ", name, " by a mask has no kernel");
      });
    }
  }

  bool may_be_queued() const {
    for (size_t place = 0; place < schema_.returns().size(); ++place) {
      if (written(place) == nullptr) return false;
    }
    bool queued = true, writes = false;
    for (size_t place = 0; place < given_.size(); ++place) {
      const auto* alias = schema_.arguments()[place].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      writes = true;
      each_tensor(given_[place], [&](const at::Tensor& tensor) { queued = queued && is_ours(tensor) && tensor.numel() > 0; });
    }
    return queued && writes;
  }

  // The argument that is the operator's return value; nullptr for a new value.
  const c10::IValue* written(size_t returned) const {
    const auto* alias = schema_.returns()[returned].alias_info();
    if (alias == nullptr || !alias->isWrite()) return nullptr;
    for (size_t place = 0; place < given_.size(); ++place) {
      const auto* mine = schema_.arguments()[place].alias_info();
      if (mine != nullptr && mine->isWrite() && mine->beforeSets() == alias->beforeSets()) return &given_[place];
    }
    return nullptr;
  }

  c10::IValue value_on_host(const c10::IValue& value, bool written) const {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined()) return value;
      if (!is_ours(tensor)) return tensor.dim() == 0 && tensor.unsafeGetTensorImpl()->is_wrapped_number() ? value : tensor.clone();
      // A kernel may resize an empty output.
      return written && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : kernel_view(tensor);
    }
    if (value.isTensorList()) {
      std::vector<at::Tensor> made;
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(value_on_host(one, written).toTensor());
      return made;
    }
    if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
      c10::List<c10::IValue> source = value.toList();
      auto made = c10::impl::GenericList(source.elementType());
      for (const c10::IValue& one : value.toListRef()) made.push_back(value_on_host(one, written));
      return made;
    }
    return value.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : value;
  }

  Stack on_host() const {
    Stack host;
    for (size_t place = 0; place < given_.size(); ++place) {
      const auto& argument = schema_.arguments()[place];
      const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      if (argument.name() == "generator") {
        host.emplace_back(generator(given_[place]));
      } else {
        host.push_back(value_on_host(given_[place], written));
      }
    }
    return host;
  }

  // A generator of the processor for this operation alone: the device's generator advances when the operation is queued.
  c10::IValue generator(const c10::IValue& given) const {
    if (has_fault("host-generator")) return c10::IValue();
    at::Generator mine = given.isNone() ? default_generator(device_) : given.toGenerator();
    TORCH_CHECK(mine.device().is_privateuseone(), "invented: expected a generator of this device, not of ", mine.device());
    return at::detail::createCPUGenerator(static_cast<Generator*>(mine.unsafeGetGeneratorImpl())->next());
  }

  // Outputs that a kernel has resized.
  void store_resized(const Stack& arguments) const {
    for (size_t place = 0; place < given_.size(); ++place) {
      const auto* alias = schema_.arguments()[place].alias_info();
      if (alias == nullptr || !alias->isWrite() || !given_[place].isTensor()) continue;
      const at::Tensor& mine = given_[place].toTensor();
      if (!is_ours(mine) || mine.numel() > 0) continue;
      const at::Tensor& host = arguments[place].toTensor();
      if (host.sizes() != mine.sizes()) at::Tensor(mine).resize_(host.sizes());
      finish(current_stream(device_));  // resize_ has queued a copy of the old bytes
      if (host.numel() > 0) kernel_view(mine).copy_(host);
    }
  }

  c10::IValue on_device(const c10::IValue& value, const Stack& arguments) const {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(tensor_on_device(value.toTensor())) : value;
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> made;
    for (const at::Tensor& one : value.toTensorVector()) made.push_back(tensor_on_device(one));
    return made;
  }

  at::Tensor tensor_on_device(const at::Tensor& host) const {
    if (has_fault("results-on-the-host") && schema_.name() == "aten::index_select") return host.clone();
    if (host.numel() > 0 && address_of(host.data_ptr()) != nullptr) return view_of_argument(host);
    const auto options = host.options().device(device_at(device_));
    at::Tensor made = at::empty_strided(host.sizes(), host.strides(), options);
    if (host.numel() > 0) kernel_view(made).copy_(host);
    return made;
  }

  // The operator returned a view of one of its arguments.
  at::Tensor view_of_argument(const at::Tensor& host) const {
    const char* address = address_of(host.data_ptr());
    std::optional<at::Tensor> found;
    for (const auto& value : given_) {
      each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor) || tensor.storage().nbytes() == 0) return;
        const char* begin = static_cast<const char*>(tensor.storage().data());
        if (address >= begin && address < begin + tensor.storage().nbytes()) {
          found = tensor.as_strided(host.sizes(), host.strides(), (address - begin) / tensor.itemsize());
        }
      });
    }
    TORCH_INTERNAL_ASSERT(found.has_value(), "invented: a kernel returned memory that is no argument's");
    return *found;
  }

  c10::OperatorHandle op_;
  Stack* stack_;
  const c10::FunctionSchema& schema_;
  Stack given_;
  int device_ = -1;
};

}  // namespace invented
