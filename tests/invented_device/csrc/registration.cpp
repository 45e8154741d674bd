// What torch asks of an accelerator: a guard, hooks, generators, and the functions of the module torch.invented.

#include "device.h"
#include "generator.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <cstring>

namespace invented {

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  at::Tensor state = at::empty({16}, at::kByte);
  auto* words = static_cast<uint64_t*>(state.data_ptr());
  words[0] = seed_, words[1] = draws_;
  return state.getIntrusivePtr();
}

const at::Generator& default_generator(int index) {
  static const auto* generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (int one = 0; one < kDevices; ++one) (*made)[one] = at::make_generator<Generator>(one);
    return made;
  }();
  return generators->at(index < 0 ? current_device() : index);
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device to) const override { set_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { set_current_device(to.index()); }
  c10::Stream getStream(c10::Device one) const override { return current_stream(one.index()); }
  c10::Stream getDefaultStream(c10::Device one) const override { return stream_of(one.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device one, bool) const override { return new_stream(one.index()); }
  c10::Stream getNewStream(c10::Device one, int) const override {
    return new_stream(one.has_index() ? one.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = current_stream(to.device_index());
    set_current_stream(to);
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    *event = invented::record(static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream, *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || progress(*static_cast<Event*>(event)); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return progress(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { finish(stream); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) finish(*static_cast<Event*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    if (!has_fault("synchronize-does-not-wait")) finish_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { use_on(data, stream); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return static_cast<Event*>(second)->recorded_ms - static_cast<Event*>(first)->recorded_ms;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current_device();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void* address) const override { return device_at(owner(address)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device() : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const int before = exchangeDevice(storage.device().index());
    c10::DataPtr made = device_allocator()->allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      char *to = readable(made.get()), *from = readable(storage.data());
      enqueue(current_stream(current_device()), [to, from, kept] { std::memcpy(to, from, kept); });
    }
    use_on(storage.data_ptr(), current_stream(current_device()));  // the copy may still be queued
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(size);
    set_current_device(before);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator());
  return true;
}();

TORCH_LIBRARY(invented, library) {
  library.def("device_count() -> int", [] { return static_cast<int64_t>(kDevices); });
  library.def("set_fault(str name) -> ()", [](const std::string& name) { set_fault(name); });
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    if (has_fault("seed-ignored")) return;
    at::Generator generator = default_generator(-1);
    generator.set_current_seed(seed);
  });
  library.def("get_rng_state() -> Tensor", [] { return default_generator(-1).get_state(); });
  library.def("set_rng_state(Tensor state) -> ()", [](const at::Tensor& state) {
    if (has_fault("state-ignored")) return;
    at::Generator generator = default_generator(-1);
    generator.set_state(state);
  });
}

}  // namespace

}  // namespace invented
