// libhccl.so of the simulator: collectives between the processes of one machine.
//
// A communicator is a directory in shared memory. In each collective every rank writes one file (what the call was,
// and its data) and reads everybody's: ranks that call different things find out, and a rank that never comes is
// named after ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT seconds (default 120). Sums are made in rank order, so that all
// ranks get the same bits. Everything is synchronous; a send is buffered.
//
// Every rank holds the directory (directories.h): what crashed processes left is removed by the next HcclGetRootInfo.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <third_party/hccl/inc/hccl/hccl.h>

#include "directories.h"
#include "reduction.h"

namespace {

using reduction::Bytes;

constexpr char kRoot[] = "/dev/shm";
constexpr char kPrefix[] = "anytron-hccl-";

enum Operation : uint32_t {
  kInit = 1, kAllReduce, kReduce, kReduceScatter, kAllGather, kBroadcast, kScatter, kBarrier, kAllToAllV, kAllToAll, kSend,
};

// What a rank says of its call; all ranks of a collective must say the same.
struct Header {
  uint32_t operation, dtype, reduction, root;
  uint64_t count;
  bool operator==(const Header& other) const {
    return operation == other.operation && dtype == other.dtype && reduction == other.reduction && root == other.root &&
           count == other.count;
  }
};

struct Communicator {
  std::string directory;
  int lock = -1;  // on the directory, held until the communicator is destroyed or the process ends
  uint32_t size = 0;
  uint32_t rank = 0;
  uint64_t sequence = 0;                      // collectives so far
  std::map<uint32_t, uint64_t> sent, received;  // messages so far, by peer
};

const char* name_of(uint32_t operation) {
  static const char* names[] = {"?", "init", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "scatter",
                                "barrier", "all_to_all_v", "all_to_all", "send"};
  return operation <= kSend ? names[operation] : names[0];
}

size_t size_of(uint32_t dtype) {
  // HcclDataType: int8, int16, int32, fp16, fp32, int64, uint64, uint8, uint16, uint32, fp64, bfp16, int128.
  static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
  return dtype <= 12 ? sizes[dtype] : 1;
}

HcclResult refuse(HcclResult code, const std::string& text) {
  std::fprintf(stderr, "simulated HCCL: %s\n", text.c_str());
  return code;
}

std::chrono::seconds timeout() {
  static const char* value = std::getenv("ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT");
  return std::chrono::seconds(value != nullptr && *value != '\0' ? std::atol(value) : 120);
}

std::string describe(uint32_t rank, const Header& header) {
  return "rank " + std::to_string(rank) + " called " + name_of(header.operation) + " of " + std::to_string(header.count) +
         " elements (dtype " + std::to_string(header.dtype) + ", reduction " + std::to_string(header.reduction) + ", root " +
         std::to_string(header.root) + ")";
}

// Write header and data under a name that appears only when the file is complete.
bool publish(const std::string& path, const Header& header, const void* data, size_t size) {
  const std::string part = path + ".part";
  const int file = open(part.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file < 0) return false;
  bool complete = write(file, &header, sizeof header) == static_cast<ssize_t>(sizeof header);
  const char* bytes = static_cast<const char*>(data);
  for (size_t done = 0; complete && done < size;) {
    const ssize_t count = write(file, bytes + done, size - done);
    complete = count > 0;
    done += complete ? count : 0;
  }
  close(file);
  return complete && rename(part.c_str(), path.c_str()) == 0;
}

// Wait for a file and read it; false after the timeout.
bool collect(const std::string& path, Header* header, Bytes* data) {
  const auto deadline = std::chrono::steady_clock::now() + timeout();
  auto pause = std::chrono::microseconds(20);
  int file;
  while ((file = open(path.c_str(), O_RDONLY)) < 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::microseconds(1000)) pause += pause / 4;
  }
  struct stat status;
  fstat(file, &status);
  data->resize(status.st_size - sizeof *header);
  bool complete = read(file, header, sizeof *header) == static_cast<ssize_t>(sizeof *header);
  for (size_t done = 0; complete && done < data->size();) {
    const ssize_t count = read(file, data->data() + done, data->size() - done);
    complete = count > 0;
    done += complete ? count : 0;
  }
  close(file);
  return complete;
}

std::string collective_file(const Communicator& communicator, uint64_t sequence, uint32_t rank) {
  return communicator.directory + "/collective-" + std::to_string(sequence) + "." + std::to_string(rank);
}

// Every rank gives `data` and gets everybody's, in rank order.
HcclResult exchange(Communicator& communicator, const Header& header, const void* data, size_t size,
                    std::vector<Bytes>* parts) {
  if (!publish(collective_file(communicator, communicator.sequence, communicator.rank), header, data, size)) {
    return refuse(HCCL_E_INTERNAL, "cannot write to " + communicator.directory + ": " + std::strerror(errno));
  }
  parts->resize(communicator.size);
  for (uint32_t peer = 0; peer < communicator.size; ++peer) {
    Header theirs;
    if (!collect(collective_file(communicator, communicator.sequence, peer), &theirs, &(*parts)[peer])) {
      return refuse(HCCL_E_TIMEOUT, describe(communicator.rank, header) + "; rank " + std::to_string(peer) + " did not come in " +
                                        std::to_string(timeout().count()) + " s");
    }
    if (!(theirs == header)) {
      return refuse(HCCL_E_PARA, "mismatch: " + describe(communicator.rank, header) + ", " + describe(peer, theirs));
    }
  }
  // Everybody has read the collective before this one: a rank reads all of n - 1 before it writes n.
  if (communicator.sequence > 0) unlink(collective_file(communicator, communicator.sequence - 1, communicator.rank).c_str());
  ++communicator.sequence;
  return HCCL_SUCCESS;
}

// Reduce elements [offset, offset + count) of all parts.
HcclResult reduce(void* output, const std::vector<Bytes>& parts, size_t offset, size_t count, uint32_t dtype,
                  HcclReduceOp operation) {
  if (reduction::reduce(output, parts, offset, count, dtype, operation)) return HCCL_SUCCESS;
  return refuse(HCCL_E_NOT_SUPPORT, "HCCL does not reduce dtype " + std::to_string(dtype));
}

Communicator& open_communicator(HcclComm handle) { return *static_cast<Communicator*>(handle); }

// Directories that this process has made and no communicator of it uses yet, with the locks on them.
std::map<std::string, int>& made_here() {
  static std::map<std::string, int> directories;
  return directories;
}

#define EXCHANGE(header, data, size)                                                           \
  Communicator& communicator = open_communicator(handle);                                      \
  std::vector<Bytes> parts;                                                                    \
  if (const HcclResult status = exchange(communicator, header, data, size, &parts)) return status

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  directories::remove_leftovers(kRoot, kPrefix);
  std::string path;
  const int lock = directories::make(kRoot, kPrefix, &path);
  if (lock < 0) return refuse(HCCL_E_INTERNAL, std::string("cannot make a directory in ") + kRoot + ": " + std::strerror(errno));
  made_here()[path] = lock;
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->internal, sizeof info->internal, "%s", path.c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* made) {
  auto* created = new Communicator;
  created->directory = info->internal;
  created->size = size;
  created->rank = rank;
  const auto own = made_here().find(created->directory);
  created->lock = own != made_here().end() ? own->second : directories::hold(created->directory);
  if (own != made_here().end()) made_here().erase(own);
  if (created->lock < 0) return refuse(HCCL_E_INTERNAL, "cannot open " + created->directory + ": " + std::strerror(errno));
  HcclComm handle = *made = created;
  EXCHANGE((Header{kInit, 0, 0, 0, size}), nullptr, 0);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* made) {
  return HcclCommInitRootInfo(size, info, rank, made);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  Communicator* communicator = &open_communicator(handle);
  if (communicator->sequence > 0) {
    unlink(collective_file(*communicator, communicator->sequence - 1, communicator->rank).c_str());
  }
  rmdir(communicator->directory.c_str());  // the last rank's succeeds
  close(communicator->lock);
  delete communicator;
  return HCCL_SUCCESS;
}

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) { return *error = HCCL_SUCCESS, HCCL_SUCCESS; }

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::snprintf(name, 128, "%s", open_communicator(handle).directory.c_str() + sizeof kRoot);
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult) { return "see the line of 'simulated HCCL' above"; }

HcclResult HcclAllReduce(void* input, void* output, uint64_t count, HcclDataType dtype, HcclReduceOp reduction, HcclComm handle,
                         aclrtStream) {
  EXCHANGE((Header{kAllReduce, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), 0, count}), input,
           count * size_of(dtype));
  return reduce(output, parts, 0, count, dtype, reduction);
}

HcclResult HcclReduce(void* input, void* output, uint64_t count, HcclDataType dtype, HcclReduceOp reduction, uint32_t root,
                      HcclComm handle, aclrtStream) {
  EXCHANGE((Header{kReduce, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), root, count}), input,
           count * size_of(dtype));
  return communicator.rank == root ? reduce(output, parts, 0, count, dtype, reduction) : HCCL_SUCCESS;
}

HcclResult HcclReduceScatter(void* input, void* output, uint64_t count, HcclDataType dtype, HcclReduceOp reduction,
                             HcclComm handle, aclrtStream) {
  const uint32_t ranks = open_communicator(handle).size;
  EXCHANGE((Header{kReduceScatter, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), 0, count}), input,
           count * ranks * size_of(dtype));
  return reduce(output, parts, count * communicator.rank, count, dtype, reduction);
}

HcclResult HcclAllGather(void* input, void* output, uint64_t count, HcclDataType dtype, HcclComm handle, aclrtStream) {
  const size_t size = count * size_of(dtype);
  EXCHANGE((Header{kAllGather, static_cast<uint32_t>(dtype), 0, 0, count}), input, size);
  for (uint32_t rank = 0; rank < communicator.size; ++rank) {
    std::memcpy(static_cast<char*>(output) + rank * size, parts[rank].data(), size);
  }
  return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle, aclrtStream) {
  const size_t size = count * size_of(dtype);
  const bool gives = open_communicator(handle).rank == root;
  EXCHANGE((Header{kBroadcast, static_cast<uint32_t>(dtype), 0, root, count}), buffer, gives ? size : 0);
  std::memcpy(buffer, parts[root].data(), size);
  return HCCL_SUCCESS;
}

HcclResult HcclScatter(void* input, void* output, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                       aclrtStream) {
  const size_t size = count * size_of(dtype);
  const Communicator& me = open_communicator(handle);
  EXCHANGE((Header{kScatter, static_cast<uint32_t>(dtype), 0, root, count}), input, me.rank == root ? size * me.size : 0);
  std::memcpy(output, parts[root].data() + communicator.rank * size, size);
  return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream) {
  EXCHANGE((Header{kBarrier, 0, 0, 0, 0}), nullptr, 0);
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAllV(const void* input, const void* send_counts, const void* send_offsets, HcclDataType send_dtype,
                         const void* output, const void* receive_counts, const void* receive_offsets, HcclDataType,
                         HcclComm handle, aclrtStream) {
  const uint32_t ranks = open_communicator(handle).size;
  const size_t element = size_of(send_dtype);
  const auto* counts = static_cast<const uint64_t*>(send_counts);
  const auto* offsets = static_cast<const uint64_t*>(send_offsets);
  // A rank's file: how much it sends to each rank, then the data in rank order.
  const auto* table = reinterpret_cast<const char*>(counts);
  Bytes message(table, table + ranks * sizeof *counts);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const char* begin = static_cast<const char*>(input) + offsets[rank] * element;
    message.insert(message.end(), begin, begin + counts[rank] * element);
  }
  EXCHANGE((Header{kAllToAllV, static_cast<uint32_t>(send_dtype), 0, 0, 0}), message.data(), message.size());
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    const auto* theirs = reinterpret_cast<const uint64_t*>(parts[peer].data());
    const uint64_t expected = static_cast<const uint64_t*>(receive_counts)[peer];
    if (theirs[communicator.rank] != expected) {
      return refuse(HCCL_E_PARA, "all_to_all_v: rank " + std::to_string(communicator.rank) + " expects " +
                                     std::to_string(expected) + " elements of rank " + std::to_string(peer) + ", which sends " +
                                     std::to_string(theirs[communicator.rank]));
    }
    size_t begin = ranks * sizeof *theirs;
    for (uint32_t rank = 0; rank < communicator.rank; ++rank) begin += theirs[rank] * element;
    char* target = static_cast<char*>(const_cast<void*>(output));
    std::memcpy(target + static_cast<const uint64_t*>(receive_offsets)[peer] * element, parts[peer].data() + begin,
                expected * element);
  }
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void* input, uint64_t count, HcclDataType dtype, const void* output, uint64_t, HcclDataType,
                        HcclComm handle, aclrtStream) {
  const size_t size = count * size_of(dtype);
  EXCHANGE((Header{kAllToAll, static_cast<uint32_t>(dtype), 0, 0, count}), input, size * open_communicator(handle).size);
  for (uint32_t peer = 0; peer < communicator.size; ++peer) {
    std::memcpy(static_cast<char*>(const_cast<void*>(output)) + peer * size, parts[peer].data() + communicator.rank * size, size);
  }
  return HCCL_SUCCESS;
}

static std::string message_file(const Communicator& communicator, uint32_t from, uint32_t to, uint64_t number) {
  return communicator.directory + "/message-" + std::to_string(from) + "-" + std::to_string(to) + "." + std::to_string(number);
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t target, HcclComm handle, aclrtStream) {
  Communicator& communicator = open_communicator(handle);
  const Header header{kSend, static_cast<uint32_t>(dtype), 0, 0, count};
  const std::string path = message_file(communicator, communicator.rank, target, communicator.sent[target]++);
  if (publish(path, header, buffer, count * size_of(dtype))) return HCCL_SUCCESS;
  return refuse(HCCL_E_INTERNAL, "cannot write " + path + ": " + std::strerror(errno));
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t source, HcclComm handle, aclrtStream) {
  Communicator& communicator = open_communicator(handle);
  const Header expected{kSend, static_cast<uint32_t>(dtype), 0, 0, count};
  const std::string path = message_file(communicator, source, communicator.rank, communicator.received[source]++);
  Header header;
  Bytes data;
  if (!collect(path, &header, &data)) {
    return refuse(HCCL_E_TIMEOUT, "rank " + std::to_string(communicator.rank) + " waits for a message of rank " +
                                      std::to_string(source) + ", which did not come in " + std::to_string(timeout().count()) + " s");
  }
  unlink(path.c_str());
  if (!(header == expected)) {
    return refuse(HCCL_E_PARA, "mismatch: " + describe(source, header) + ", rank " + std::to_string(communicator.rank) +
                                   " receives " + std::to_string(count) + " elements (dtype " + std::to_string(dtype) + ")");
  }
  std::memcpy(buffer, data.data(), data.size());
  return HCCL_SUCCESS;
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  // Sends first: they are buffered, so that ranks that send to each other do not wait for each other.
  for (const bool sends : {true, false}) {
    for (uint32_t i = 0; i < count; ++i) {
      const HcclSendRecvItem& item = items[i];
      if ((item.sendRecvType == HCCL_SEND) != sends) continue;
      const HcclResult status = sends ? HcclSend(item.buf, item.count, item.dataType, item.remoteRank, handle, stream)
                                      : HcclRecv(item.buf, item.count, item.dataType, item.remoteRank, handle, stream);
      if (status != HCCL_SUCCESS) return status;
    }
  }
  return HCCL_SUCCESS;
}

}  // extern "C"
