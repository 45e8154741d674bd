// The generator of an invented device: a seed and a count of draws, as a Philox generator has.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace invented {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index)
      : GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, draws_ = 0; }
  void set_offset(uint64_t draws) override { draws_ = draws; }
  uint64_t get_offset() const override { return draws_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == 16, "invented: a generator's state is 16 bytes on the host");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], draws_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // The seed of the next operation's numbers.
  uint64_t next() { return (seed_ ^ 0x9e3779b97f4a7c15ULL) * 0xbf58476d1ce4e5b9ULL + ++draws_ * 0x94d049bb133111ebULL; }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_, made->draws_ = draws_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, draws_ = 0;
};

const at::Generator& default_generator(int device);

}  // namespace invented
