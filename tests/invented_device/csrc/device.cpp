// Memory, streams, events and generators of the invented accelerator; device.h says what is unusual about them.

#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "generator.h"

namespace invented {

namespace {

constexpr size_t kAlignment = 512;
constexpr size_t kFullQueue = 1 << 16;

struct Queue {
  std::deque<Work> work;
  uint64_t done = 0;
  uint64_t end() const { return done + work.size(); }
};

struct Block {
  size_t size;
  c10::StreamId stream;
  std::set<c10::StreamId> users;  // other streams that record_stream named
};

struct Parked {  // a freed block that other streams may still use
  size_t offset;
  Block block;
  std::map<c10::StreamId, uint64_t> until;
};

struct Device {
  char* addresses = nullptr;  // without access
  char* bytes = nullptr;      // the same memory, readable
  size_t top = 0;             // everything above was never allocated
  size_t used = 0, peak = 0;
  std::map<size_t, Block> live;
  std::map<c10::StreamId, std::multimap<size_t, size_t>> free;  // by size, for each stream
  std::deque<Parked> parked;
  std::deque<Queue> streams{1};
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
thread_local int current = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::map<const char*, size_t> pinned;  // by address

size_t arena_size() {
  static const size_t size = [] {
    const char* mib = std::getenv("INVENTED_MEMORY_MIB");
    return static_cast<size_t>(mib != nullptr ? std::atoll(mib) : 4096) << 20;
  }();
  return size;
}

Device& device(int index) {
  static std::array<Device, kDevices>* devices = [] {
    auto* made = new std::array<Device, kDevices>;
    for (Device& one : *made) {
      const int file = memfd_create("invented", 0);
      TORCH_CHECK(file >= 0 && ftruncate(file, arena_size()) == 0, "invented: no memory for a device");
      const auto map = [&](int access) {
        return static_cast<char*>(mmap(nullptr, arena_size(), access, MAP_SHARED | MAP_NORESERVE, file, 0));
      };
      one.addresses = map(PROT_NONE);
      one.bytes = map(PROT_READ | PROT_WRITE);
      TORCH_CHECK(one.addresses != MAP_FAILED && one.bytes != MAP_FAILED, "invented: no addresses for a device");
      close(file);
    }
    return made;
  }();
  TORCH_CHECK(index >= 0 && index < kDevices, "invented: there is no device ", index);
  return (*devices)[index];
}

Queue& queue(c10::Stream stream) { return device(stream.device_index()).streams.at(stream.id()); }

c10::Stream stream_of(int device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device_at(device), id); }

void run_one(Queue& queue) {
  Work work = std::move(queue.work.front());
  queue.work.pop_front();
  ++queue.done;
  work();
}

void finish_until(c10::Stream stream, uint64_t position) {
  const Lock lock(mutex);
  Queue& mine = queue(stream);
  while (mine.done < position) run_one(mine);
}

}  // namespace

bool has_fault(const char* name) {
  static const std::string fault = [] {
    const char* set = std::getenv("INVENTED_FAULT");
    return std::string(set != nullptr ? set : "");
  }();
  return fault == name;
}

c10::Device device_at(int index) { return c10::Device(c10::DeviceType::PrivateUse1, index); }

int current_device() { return current; }

void set_current_device(int index) {
  device(index);
  current = index;
}

c10::Stream current_stream(int index) { return stream_of(index, current_streams.at(index)); }

void set_current_stream(c10::Stream stream) { current_streams.at(stream.device_index()) = stream.id(); }

c10::Stream new_stream(int index) {
  const Lock lock(mutex);
  auto& streams = device(index).streams;
  streams.emplace_back();
  return stream_of(index, streams.size() - 1);
}

void enqueue(c10::Stream stream, Work work) {
  const Lock lock(mutex);
  Queue& mine = queue(stream);
  mine.work.push_back(std::move(work));
  if (mine.work.size() >= kFullQueue) run_one(mine);
}

void finish(c10::Stream stream) {
  const Lock lock(mutex);
  finish_until(stream, queue(stream).end());
}

void finish_device(int index) {
  const Lock lock(mutex);
  for (size_t id = 0; id < device(index).streams.size(); ++id) finish(stream_of(index, id));
}

Event* record(Event* event, c10::Stream stream) {
  const Lock lock(mutex);
  using namespace std::chrono;
  const double now = duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  delete event;
  return new Event{stream, queue(stream).end(), now};
}

void finish(const Event& event) { finish_until(event.stream, event.position); }

void wait(c10::Stream stream, const Event& event) {
  if (has_fault("waits-ignored")) return;
  const c10::Stream other = event.stream;
  const uint64_t position = event.position;
  enqueue(stream, [other, position] { finish_until(other, position); });
}

bool progress(c10::Stream stream) {
  const Lock lock(mutex);
  Queue& mine = queue(stream);
  if (!mine.work.empty()) run_one(mine);
  return mine.work.empty();
}

bool progress(const Event& event) {
  const Lock lock(mutex);
  if (queue(event.stream).done < event.position) progress(event.stream);
  return queue(event.stream).done >= event.position;
}

char* readable(const void* address) {
  const char* found = static_cast<const char*>(address);
  for (int index = 0; index < kDevices; ++index) {
    const Device& one = device(index);
    if (found >= one.addresses && found < one.addresses + arena_size()) return one.bytes + (found - one.addresses);
  }
  return nullptr;
}

char* address_of(const void* readable_address) {
  const char* found = static_cast<const char*>(readable_address);
  for (int index = 0; index < kDevices; ++index) {
    const Device& one = device(index);
    if (found >= one.bytes && found < one.bytes + arena_size()) return one.addresses + (found - one.bytes);
  }
  return nullptr;
}

namespace {

int owner(const void* address) {
  for (int index = 0; index < kDevices; ++index) {
    const Device& one = device(index);
    const char* found = static_cast<const char*>(address);
    if (found >= one.addresses && found < one.addresses + arena_size()) return index;
  }
  TORCH_CHECK(false, "invented: not an address of this accelerator");
}

void release(void* address) {
  const Lock lock(mutex);
  const int index = owner(address);
  Device& one = device(index);
  const size_t offset = static_cast<char*>(address) - one.addresses;
  const Block block = one.live.at(offset);
  one.live.erase(offset);
  one.used -= block.size;
  if (block.users.empty()) {
    one.free[block.stream].emplace(block.size, offset);
    return;
  }
  Parked parked{offset, block, {}};
  for (const c10::StreamId user : block.users) parked.until[user] = one.streams.at(user).end();
  one.parked.push_back(std::move(parked));
}

// Blocks that record_stream kept, whose other streams have passed.
void unpark(Device& one) {
  for (auto parked = one.parked.begin(); parked != one.parked.end();) {
    bool over = true;
    for (const auto& [user, position] : parked->until) over = over && one.streams.at(user).done >= position;
    if (over) one.free[parked->block.stream].emplace(parked->block.size, parked->offset);
    parked = over ? one.parked.erase(parked) : parked + 1;
  }
}

// Compute everything, and join what is free: the next blocks are cut from the spaces between live ones.
void collect(int index) {
  finish_device(index);
  Device& one = device(index);
  unpark(one);
  one.free.clear();
  one.top = one.live.empty() ? 0 : one.live.rbegin()->first + one.live.rbegin()->second.size;
  size_t begin = 0;
  for (const auto& [offset, block] : one.live) {
    if (offset > begin) one.free[0].emplace(offset - begin, begin);
    begin = offset + block.size;
  }
}

// An offset of at least `size` bytes, or the arena's size if there is none. Reuse is in the order of one stream.
size_t take(Device& one, size_t size, c10::StreamId stream, size_t* taken) {
  unpark(one);
  auto& mine = one.free[stream];
  const auto found = mine.lower_bound(size);
  if (found != mine.end() && found->first <= 2 * size + (1 << 20)) {
    const size_t offset = found->second;
    *taken = found->first;
    mine.erase(found);
    return offset;
  }
  if (one.top + size > arena_size()) return arena_size();
  one.top += size;
  *taken = size;
  return one.top - size;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const Lock lock(mutex);
    const int index = current;
    Device& one = device(index);
    if (size == 0) return {nullptr, nullptr, &release, device_at(index)};
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    const c10::StreamId stream = current_streams.at(index);
    size_t taken = 0, offset = take(one, rounded, stream, &taken);
    if (offset == arena_size()) {
      collect(index);
      offset = take(one, rounded, stream, &taken);
    }
    const std::string full = "invented: out of memory: " + std::to_string(size) + " bytes do not fit";
    TORCH_CHECK(offset != arena_size() || !has_fault("plain-out-of-memory"), full);
    TORCH_CHECK_WITH(OutOfMemoryError, offset != arena_size(), full);
    one.live[offset] = {taken, stream, {}};
    one.used += taken;
    one.peak = std::max(one.peak, one.used);
    void* address = one.addresses + offset;
    return {address, address, &release, device_at(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    finish(current_stream(owner(from)));
    std::memcpy(readable(to), readable(from), size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override { collect(current); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Device& one = device(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = one.used;
    stats.allocated_bytes[0].peak = one.peak;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = one.top;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex index) override { device(index).peak = device(index).used; }
};

void release_pinned(void* address) {
  const Lock lock(mutex);
  for (int index = 0; index < kDevices; ++index) finish_device(index);  // a copy may still be queued
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const Lock lock(mutex);
    void* address = std::malloc(size + 1);
    pinned[static_cast<char*>(address)] = size + 1;
    return {address, address, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* address) {
  const Lock lock(mutex);
  const char* found = static_cast<const char*>(address);
  auto after = pinned.upper_bound(found);
  if (after == pinned.begin()) return false;
  --after;
  return found < after->first + after->second;
}

void use_on(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr || has_fault("record-stream-ignored")) return;
  const Lock lock(mutex);
  Device& one = device(owner(data.get()));
  Block& block = one.live.at(static_cast<char*>(data.get()) - one.addresses);
  if (block.stream != stream.id()) block.users.insert(stream.id());
}

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
  return generators->at(index < 0 ? current : index);
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current); }
  void setDevice(c10::Device to) const override { set_current_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device one) const override { return current_stream(one.index()); }
  c10::Stream getDefaultStream(c10::Device one) const override { return stream_of(one.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device one, bool) const override { return new_stream(one.index()); }
  c10::Stream getNewStream(c10::Device one, int) const override {
    return new_stream(one.has_index() ? one.index() : current);
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
  void synchronizeDevice(c10::DeviceIndex index) const override { finish_device(index); }
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
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Device getDeviceFromPtr(void* address) const override { return device_at(owner(address)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const int before = exchangeDevice(storage.device().index());
    c10::DataPtr made = device_allocator()->allocate(size);
    const size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) {
      char *to = readable(made.get()), *from = readable(storage.data());
      enqueue(current_stream(current), [to, from, kept] { std::memcpy(to, from, kept); });
    }
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
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) {
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
