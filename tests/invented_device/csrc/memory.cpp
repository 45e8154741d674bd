// The memory of the invented accelerator: one arena for each device, and pinned memory of the host.

#include "device.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

namespace invented {

namespace {

constexpr size_t kAlignment = 512;
constexpr c10::StreamId kAnyStream = -1;  // of spaces that all streams have left

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

struct Arena {
  int index = 0;
  char* addresses = nullptr;  // without access
  char* bytes = nullptr;      // the same memory, readable
  size_t top = 0;             // everything above was never allocated
  size_t used = 0, peak = 0, forgotten = 0;
  std::map<size_t, Block> live;
  std::map<c10::StreamId, std::multimap<size_t, size_t>> free;  // by size, for each stream
  std::deque<Parked> parked;
};

std::map<const char*, size_t> pinned;  // by address

size_t arena_size() {
  static const size_t size = [] {
    const char* mib = std::getenv("INVENTED_MEMORY_MIB");
    return static_cast<size_t>(mib != nullptr ? std::atoll(mib) : 4096) << 20;
  }();
  return size;
}

Arena& arena(int index) {
  static std::array<Arena, kDevices>* devices = [] {
    auto* made = new std::array<Arena, kDevices>;
    for (int place = 0; place < kDevices; ++place) {
      Arena& one = (*made)[place];
      one.index = place;
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

// The device in one of whose two mappings an address is; nullptr for a foreign address.
const Arena* arena_of(const void* address, char* Arena::* mapping) {
  const char* found = static_cast<const char*>(address);
  for (int index = 0; index < kDevices; ++index) {
    const Arena& one = arena(index);
    if (found >= one.*mapping && found < one.*mapping + arena_size()) return &one;
  }
  return nullptr;
}

// An address of one mapping, in the other.
char* translated(const void* address, char* Arena::* from, char* Arena::* to) {
  const Arena* one = arena_of(address, from);
  return one == nullptr ? nullptr : one->*to + (static_cast<const char*>(address) - one->*from);
}

}  // namespace

char* readable(const void* address) { return translated(address, &Arena::addresses, &Arena::bytes); }

char* address_of(const void* readable_address) { return translated(readable_address, &Arena::bytes, &Arena::addresses); }

int owner(const void* address) {
  const Arena* one = arena_of(address, &Arena::addresses);
  TORCH_CHECK(one != nullptr, "invented: not an address of this accelerator");
  return one->index;
}

namespace {

void release(void* address) {
  const Lock lock(mutex());
  const int index = owner(address);
  Arena& one = arena(index);
  const size_t offset = static_cast<char*>(address) - one.addresses;
  const Block block = one.live.at(offset);
  one.live.erase(offset);
  one.used -= block.size;
  if (has_fault("freed-memory-counts")) one.forgotten += block.size;
  if (block.users.empty()) {
    one.free[block.stream].emplace(block.size, offset);
    return;
  }
  Parked parked{offset, block, {}};
  for (const c10::StreamId user : block.users) parked.until[user] = queued(stream_of(index, user));
  one.parked.push_back(std::move(parked));
}

// Blocks that record_stream kept, whose other streams have passed.
void unpark(Arena& one) {
  for (auto parked = one.parked.begin(); parked != one.parked.end();) {
    bool over = true;
    for (const auto& [user, position] : parked->until) over = over && passed(stream_of(one.index, user), position);
    if (over) one.free[parked->block.stream].emplace(parked->block.size, parked->offset);
    parked = over ? one.parked.erase(parked) : parked + 1;
  }
}

// Compute everything, and join what is free: the next blocks are cut from the spaces between live ones.
void collect(int index) {
  finish_device(index);
  Arena& one = arena(index);
  unpark(one);
  one.free.clear();
  one.top = one.live.empty() ? 0 : one.live.rbegin()->first + one.live.rbegin()->second.size;
  size_t begin = 0;
  for (const auto& [offset, block] : one.live) {
    if (offset > begin) one.free[kAnyStream].emplace(offset - begin, begin);
    begin = offset + block.size;
  }
}

// An offset of at least `size` bytes, or the arena's size if there is none. Reuse is in the order of one stream.
size_t take(Arena& one, size_t size, c10::StreamId stream, size_t* taken) {
  unpark(one);
  for (const c10::StreamId pool : {stream, kAnyStream}) {
    auto& mine = one.free[pool];
    const auto found = mine.lower_bound(size);
    if (found == mine.end() || (pool == stream && found->first > 2 * size)) continue;
    const auto [space, offset] = *found;
    mine.erase(found);
    if (pool == kAnyStream && space > size) mine.emplace(space - size, offset + size);
    *taken = pool == stream ? space : size;
    return offset;
  }
  if (one.top + size > arena_size()) return arena_size();
  one.top += size;
  *taken = size;
  return one.top - size;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const Lock lock(mutex());
    const int index = current_device();
    Arena& one = arena(index);
    if (size == 0) return {nullptr, nullptr, &release, device_at(index)};
    const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    const c10::StreamId stream = current_stream(index).id();
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
  void emptyCache(c10::MempoolId_t /*pool*/) override { collect(current_device()); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { use_on(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Arena& one = arena(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const size_t forgotten = has_fault("freed-memory-counts") ? one.forgotten : 0;
    stats.allocated_bytes[0].current = one.used + forgotten;
    stats.allocated_bytes[0].peak = one.peak;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = one.top;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*index*/) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    if (!has_fault("peak-stays")) arena(index).peak = arena(index).used;
  }
};

void release_pinned(void* address) {
  const Lock lock(mutex());
  for (int index = 0; index < kDevices; ++index) finish_device(index);  // a copy may still be queued
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const Lock lock(mutex());
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
  const Lock lock(mutex());
  const char* found = static_cast<const char*>(address);
  auto after = pinned.upper_bound(found);
  if (after == pinned.begin()) return false;
  --after;
  return found < after->first + after->second;
}

void use_on(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() == nullptr || has_fault("record-stream-ignored")) return;
  const Lock lock(mutex());
  Arena& one = arena(owner(data.get()));
  Block& block = one.live.at(static_cast<char*>(data.get()) - one.addresses);
  if (block.stream != stream.id()) block.users.insert(stream.id());
}

}  // namespace invented
