// libascendcl.so of the simulator: the CANN runtime on host memory.
//
// Device memory is host memory that remembers which device it belongs to. Every pointer that reaches a copy is checked,
// and each device has a memory limit. Streams and events are in streams.cpp.
//
// Settings, read once: ANYTRON_ASCEND_SIMULATOR_DEVICES (default 8), ANYTRON_ASCEND_SIMULATOR_MEMORY_MIB (each
// device, default 65536), ANYTRON_ASCEND_SIMULATOR_SOC (default Ascend910B2), ANYTRON_ASCEND_SIMULATOR_CANN.

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "runtime.h"
#include "streams.h"

namespace {

thread_local int current = -1;

}  // namespace

int runtime::device() { return current < 0 ? 0 : current; }

namespace {

// Values of acl/error_codes/rt_error_codes.h and acl/acl_base_rt.h, which are macros of several types.
constexpr aclError kSuccess = 0;
constexpr aclError kInvalidParam = 107000;
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kNoDeviceSet = 107002;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kNoKernel = 161002;

constexpr int kMaxDevices = 64;
constexpr size_t kAlignment = 512;
// torch_npu rounds copies up to 32 bytes, so that many bytes after a block belong to it.
constexpr size_t kSlack = 32;

const char* setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

int device_count() {
  // The real driver hides devices by this variable; torch_npu leaves that to it.
  static const int count = [] {
    const int present = std::atoi(setting("ANYTRON_ASCEND_SIMULATOR_DEVICES", "8"));
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (visible == nullptr) return std::min(present, kMaxDevices);
    int seen = 0, last = -1;
    std::stringstream list(visible);
    for (std::string item; std::getline(list, item, ',');) {
      char* end = nullptr;
      const long id = std::strtol(item.c_str(), &end, 10);
      // What the driver does: it stops at the first entry that is no ascending, existing id.
      if (end == item.c_str() || *end != '\0' || id <= last || id >= present) break;
      last = static_cast<int>(id);
      ++seen;
    }
    return seen;
  }();
  return count;
}

size_t device_memory() {
  static const size_t bytes = static_cast<size_t>(std::atoll(setting("ANYTRON_ASCEND_SIMULATOR_MEMORY_MIB", "65536"))) << 20;
  return bytes;
}

struct Block {
  size_t size;
  int device;
  bool host;
};

struct Context {
  int device;
};

std::mutex blocks_mutex;
std::map<uintptr_t, Block> blocks;  // by address
std::array<size_t, kMaxDevices> used{};
std::array<std::atomic<bool>, kMaxDevices> active{};
std::array<Context, kMaxDevices> contexts{};
thread_local std::string message;

using runtime::device;

aclError fail(aclError code, const std::string& text) {
  message = "simulated CANN: " + text;
  return code;
}

aclError allocate(void** pointer, size_t size, bool host) {
  const int owner = device();
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (!host && used[owner] + size > device_memory()) {
    return fail(kOutOfMemory, "device " + std::to_string(owner) + " has " + std::to_string(device_memory() - used[owner]) +
                                  " bytes left of " + std::to_string(device_memory()) + ", and " + std::to_string(size) +
                                  " were asked for");
  }
  if (posix_memalign(pointer, kAlignment, size + kSlack) != 0) return fail(kOutOfMemory, "the host is out of memory");
  // Who reads before anything is written must not find the numbers of an earlier owner, which may be right.
  if (!host && anytron_simulator_asynchronous()) std::memset(*pointer, 0xff, size + kSlack);
  blocks[reinterpret_cast<uintptr_t>(*pointer)] = {size, owner, host};
  if (!host) used[owner] += size;
  return kSuccess;
}

aclError release(void* pointer, bool host) {
  anytron_simulator_finish_all();  // what is queued may use the memory
  std::lock_guard<std::mutex> lock(blocks_mutex);
  const auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.end()) return fail(kInvalidParam, "free of a pointer that was not allocated here, or freed twice");
  if (found->second.host != host) return fail(kInvalidParam, "host memory freed as device memory, or the other way round");
  if (!host) used[found->second.device] -= found->second.size;
  blocks.erase(found);
  std::free(pointer);
  return kSuccess;
}

// The block that holds [pointer, pointer + size), or nullptr. The caller holds blocks_mutex.
const Block* block_of(const void* pointer, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return nullptr;
  --after;
  return address + size <= after->first + after->second.size + kSlack ? &after->second : nullptr;
}

bool is_registered(const void* pointer) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  return block_of(pointer, 0) != nullptr;
}

bool in_device_memory(const void* pointer, size_t size) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  const Block* block = block_of(pointer, size);
  return block != nullptr && !block->host;
}

// Whether a copy's operands are what its kind says.
aclError check_copy(const void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind kind) {
  if (size > room) return fail(kInvalidParam, "copy of " + std::to_string(size) + " bytes into " + std::to_string(room));
  const bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  const bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || kind == ACL_MEMCPY_DEVICE_TO_DEVICE;
  if (size > 0 && to_device && !in_device_memory(target, size)) {
    return fail(kInvalidParam, "the target of a copy is not device memory");
  }
  if (size > 0 && from_device && !in_device_memory(source, size)) {
    return fail(kInvalidParam, "the source of a copy is not device memory");
  }
  return kSuccess;
}

aclError copy(void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind kind) {
  const aclError status = check_copy(target, room, source, size, kind);
  if (status == kSuccess && size > 0) std::memmove(target, source, size);
  return status;
}

// Memory of aclrtMallocHost is read and written when the stream gets there. Other memory of the host is read at once, and
// a copy into it waits for the stream.
aclError queue_copy(void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
  const aclError status = check_copy(target, room, source, size, kind);
  if (status != kSuccess || size == 0) return status;
  const bool reads_pageable = kind == ACL_MEMCPY_HOST_TO_DEVICE && !is_registered(source);
  const bool writes_pageable = kind == ACL_MEMCPY_DEVICE_TO_HOST && !is_registered(target);
  if (reads_pageable && anytron_simulator_asynchronous()) {
    const auto* bytes = static_cast<const char*>(source);
    return streams::enqueue(stream, [target, read = std::vector<char>(bytes, bytes + size)] {
      std::memcpy(target, read.data(), read.size());
      return 0;
    });
  }
  const int queued = streams::enqueue(stream, [target, source, size] {
    std::memmove(target, source, size);
    return 0;
  });
  return writes_pageable ? anytron_simulator_finish(stream) : queued;
}

aclError check_fill(const void* target, size_t room, size_t size) {
  if (size > room) return fail(kInvalidParam, "memset of " + std::to_string(size) + " bytes into " + std::to_string(room));
  if (size > 0 && !in_device_memory(target, size)) return fail(kInvalidParam, "the target of a memset is not device memory");
  return kSuccess;
}

const char* cann_version() { return setting("ANYTRON_ASCEND_SIMULATOR_CANN", "8.5.0"); }

}  // namespace

extern "C" {

// ---- the simulator's own

// Whether all of [pointer, pointer + size) is simulated device memory.
int anytron_simulator_owns(const void* pointer, size_t size) { return in_device_memory(pointer, size); }

// Blocks that are allocated on all devices, for tests that look for leaks.
size_t anytron_simulator_blocks() {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  return blocks.size();
}

// What aclGetRecentErrMsg says next: kernels written in Python explain their refusals here.
void anytron_simulator_set_message(const char* text) { message = std::string("simulated CANN: ") + text; }

// ---- process and versions

aclError aclInit(const char*) { return kSuccess; }
aclError aclFinalize() { return kSuccess; }
const char* aclGetRecentErrMsg() { return message.c_str(); }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}
const char* aclrtGetSocName() { return setting("ANYTRON_ASCEND_SIMULATOR_SOC", "Ascend910B2"); }

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::snprintf(version->version, sizeof version->version, "%s", cann_version());
  return kSuccess;
}

aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, cann_version());
  return kSuccess;
}

aclError aclGetCannAttribute(aclCannAttr, int32_t* value) { return *value = 1, kSuccess; }

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo kind, int64_t* value) {
  *value = kind == ACL_DEVICE_INFO_AI_CORE_NUM ? 24 : 48;  // an Ascend 910B2's
  return kSuccess;
}

// ---- devices

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t* value) { return *value = 24, kSuccess; }
aclError aclrtGetDeviceCount(uint32_t* count) { return *count = device_count(), kSuccess; }

aclError aclrtSetDevice(int32_t id) {
  if (id < 0 || id >= device_count()) {
    return fail(kInvalidDevice, "there is no device " + std::to_string(id) + ", only " + std::to_string(device_count()));
  }
  current = id;
  active[id] = true;
  contexts[id].device = id;
  return kSuccess;
}

aclError aclrtResetDevice(int32_t) { return kSuccess; }
aclError aclrtGetDevice(int32_t* id) { return current < 0 ? kNoDeviceSet : (*id = current, kSuccess); }
aclError aclrtGetCurrentContext(aclrtContext* context) { return *context = &contexts[device()], kSuccess; }

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context != nullptr) current = static_cast<Context*>(context)->device;
  return kSuccess;
}

aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t* flags, int32_t* is_active) {
  if (flags != nullptr) *flags = 0;
  if (is_active != nullptr) *is_active = active[id];
  return kSuccess;
}

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) { return *can = 1, kSuccess; }
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return kSuccess; }
aclError aclrtDeviceGetBareTgid(int32_t* id) { return *id = 1, kSuccess; }
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return kSuccess; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kSuccess; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return kSuccess; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return kSuccess; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return kSuccess; }

// ---- memory

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  *total = device_memory();
  *free_bytes = *total - used[device()];
  return kSuccess;
}

aclError aclrtMalloc(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size, false); }
aclError aclrtMallocAlign32(void** pointer, size_t size, aclrtMemMallocPolicy) { return allocate(pointer, size, false); }
aclError aclrtFree(void* pointer) { return release(pointer, false); }
aclError aclrtMallocHost(void** pointer, size_t size) { return allocate(pointer, size, true); }
aclError aclrtFreeHost(void* pointer) { return release(pointer, true); }

aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> lock(blocks_mutex);
  const Block* block = block_of(pointer, 0);
  attributes->location.type = block == nullptr ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                              : block->host    ? ACL_MEM_LOCATION_TYPE_HOST
                                               : ACL_MEM_LOCATION_TYPE_DEVICE;
  attributes->location.id = block == nullptr ? 0 : block->device;
  return kSuccess;
}

aclError aclrtMemcpy(void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind kind) {
  return copy(target, room, source, size, kind);
}
aclError aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t size, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  return queue_copy(target, room, source, size, kind, stream);
}
aclError aclrtMemset(void* target, size_t room, int32_t value, size_t size) {
  const aclError status = check_fill(target, room, size);
  if (status == kSuccess) std::memset(target, value, size);
  return status;
}
aclError aclrtMemsetAsync(void* target, size_t room, int32_t value, size_t size, aclrtStream stream) {
  const aclError status = check_fill(target, room, size);
  if (status != kSuccess) return status;
  return streams::enqueue(stream, [target, value, size] {
    std::memset(target, value, size);
    return 0;
  });
}
aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus* status, aclmdlRI* model) {
  if (status != nullptr) *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model != nullptr) *model = nullptr;
  return kSuccess;
}

// ---- options that torch_npu sets and reads back

static std::array<int64_t, 64> system_options{}, context_options{};
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return *value = system_options[option & 63], kSuccess; }
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return system_options[option & 63] = value, kSuccess; }
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t* value) { return *value = context_options[option & 63], kSuccess; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return context_options[option & 63] = value, kSuccess; }
aclError aclSetCompileopt(aclCompileOpt, const char*) { return kSuccess; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t size) {
  if (size > 0) value[0] = '\0';
  return kSuccess;
}
aclError aclopSetCompileFlag(aclOpCompileFlag) { return kSuccess; }
aclopAttr* aclopCreateAttr() { return static_cast<aclopAttr*>(std::malloc(8)); }
void aclopDestroyAttr(const aclopAttr* attribute) { std::free(const_cast<aclopAttr*>(attribute)); }

// Operators that torch_npu compiles for the device (it has no aclnn kernel for them, or none was found).
aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream) {
  return fail(kNoKernel, std::string("there is no kernel for operator ") + type);
}

}  // extern "C"
