// libhccl.so of the simulator: collectives between the processes of one machine.
//
// A communicator is a directory in shared memory. In each collective every rank writes one file (what the call was,
// and its data) and reads everybody's: ranks that call different things find out, and a rank that never comes is
// named after ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT seconds (default 120). Sums are made in rank order, so that all
// ranks get the same bits. A send is buffered.
//
// Ranks meet when a collective is called, after what its stream has queued; the result is written when the stream gets
// there. So two ranks that wait for their collectives in different orders do not wait for each other.
//
// Every rank holds the directory (directories.h): what crashed processes left is removed by the next HcclGetRootInfo.

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <third_party/hccl/inc/hccl/hccl.h>

#include "directories.h"
#include "exchange.h"
#include "reduction.h"
#include "streams.h"

namespace {

using namespace exchange;

constexpr char kRoot[] = "/dev/shm";
constexpr char kPrefix[] = "anytron-hccl-";

// Write a collective's result to `output` when the stream gets there. `sent` was read from `input` before; if the caller
// has written to it since, without waiting, the result is spoilt: the device would have read some of those bytes.
HcclResult deliver(aclrtStream stream, void* output, Bytes result, const void* input, Bytes sent) {
  streams::enqueue(stream, [output, result = std::move(result), input, sent = std::move(sent)] {
    if (sent.empty() || std::memcmp(input, sent.data(), sent.size()) == 0) {
      std::memcpy(output, result.data(), result.size());
    } else {
      std::memset(output, 0xff, result.size());
    }
    return 0;
  });
  return HCCL_SUCCESS;
}

// Reduce elements [offset, offset + count) of all parts into `result`.
HcclResult reduce(Bytes* result, const std::vector<Bytes>& parts, size_t offset, size_t count, uint32_t dtype,
                  HcclReduceOp operation) {
  result->resize(count * size_of(dtype));
  if (reduction::reduce(result->data(), parts, offset, count, dtype, operation)) return HCCL_SUCCESS;
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
  if (const HcclResult status = meet(communicator, header, data, size, &parts)) return status

// Do what comes before a collective on its stream.
#define FINISH(stream) \
  if (anytron_simulator_finish(stream) != 0) return refuse(HCCL_E_INTERNAL, "work before a collective failed")

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

// A rank may still read the others' last files: whoever lets go of the directory last removes it.
HcclResult HcclCommDestroy(HcclComm handle) {
  Communicator* communicator = &open_communicator(handle);
  close(communicator->lock);
  directories::remove_leftovers(kRoot, communicator->directory.substr(sizeof kRoot));
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
                         aclrtStream stream) {
  FINISH(stream);
  EXCHANGE((Header{kAllReduce, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), 0, count}), input,
           count * size_of(dtype));
  Bytes result;
  if (const HcclResult status = reduce(&result, parts, 0, count, dtype, reduction)) return status;
  return deliver(stream, output, std::move(result), input, std::move(parts[communicator.rank]));
}

HcclResult HcclReduce(void* input, void* output, uint64_t count, HcclDataType dtype, HcclReduceOp reduction, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  EXCHANGE((Header{kReduce, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), root, count}), input,
           count * size_of(dtype));
  if (communicator.rank != root) return HCCL_SUCCESS;
  Bytes result;
  if (const HcclResult status = reduce(&result, parts, 0, count, dtype, reduction)) return status;
  return deliver(stream, output, std::move(result), input, std::move(parts[root]));
}

HcclResult HcclReduceScatter(void* input, void* output, uint64_t count, HcclDataType dtype, HcclReduceOp reduction,
                             HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  const uint32_t ranks = open_communicator(handle).size;
  EXCHANGE((Header{kReduceScatter, static_cast<uint32_t>(dtype), static_cast<uint32_t>(reduction), 0, count}), input,
           count * ranks * size_of(dtype));
  const uint32_t me = communicator.rank;
  Bytes result;
  if (const HcclResult status = reduce(&result, parts, count * me, count, dtype, reduction)) return status;
  return deliver(stream, output, std::move(result), input, std::move(parts[me]));
}

HcclResult HcclAllGather(void* input, void* output, uint64_t count, HcclDataType dtype, HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  EXCHANGE((Header{kAllGather, static_cast<uint32_t>(dtype), 0, 0, count}), input, count * size_of(dtype));
  Bytes result;
  for (const Bytes& part : parts) result.insert(result.end(), part.begin(), part.end());
  return deliver(stream, output, std::move(result), input, std::move(parts[communicator.rank]));
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  const bool gives = open_communicator(handle).rank == root;
  EXCHANGE((Header{kBroadcast, static_cast<uint32_t>(dtype), 0, root, count}), buffer, gives ? count * size_of(dtype) : 0);
  return gives ? HCCL_SUCCESS : deliver(stream, buffer, std::move(parts[root]), buffer, {});
}

HcclResult HcclScatter(void* input, void* output, uint64_t count, HcclDataType dtype, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
  FINISH(stream);
  const size_t size = count * size_of(dtype);
  const Communicator& me = open_communicator(handle);
  EXCHANGE((Header{kScatter, static_cast<uint32_t>(dtype), 0, root, count}), input, me.rank == root ? size * me.size : 0);
  const auto begin = parts[root].begin() + communicator.rank * size;
  return deliver(stream, output, Bytes(begin, begin + size), input, std::move(parts[communicator.rank]));
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  EXCHANGE((Header{kBarrier, 0, 0, 0, 0}), nullptr, 0);
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAllV(const void* input, const void* send_counts, const void* send_offsets, HcclDataType send_dtype,
                         const void* output, const void* receive_counts, const void* receive_offsets, HcclDataType,
                         HcclComm handle, aclrtStream stream) {
  FINISH(stream);
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
    char* target = static_cast<char*>(const_cast<void*>(output)) + static_cast<const uint64_t*>(receive_offsets)[peer] * element;
    const char* sent = static_cast<const char*>(input) + offsets[peer] * element;
    const auto data = parts[peer].begin() + begin;
    deliver(stream, target, Bytes(data, data + expected * element), sent, Bytes(sent, sent + counts[peer] * element));
  }
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAll(const void* input, uint64_t count, HcclDataType dtype, const void* output, uint64_t, HcclDataType,
                        HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  const size_t size = count * size_of(dtype);
  EXCHANGE((Header{kAllToAll, static_cast<uint32_t>(dtype), 0, 0, count}), input, size * open_communicator(handle).size);
  Bytes result;
  for (const Bytes& part : parts) {
    const auto begin = part.begin() + communicator.rank * size;
    result.insert(result.end(), begin, begin + size);
  }
  return deliver(stream, const_cast<void*>(output), std::move(result), input, std::move(parts[communicator.rank]));
}

static std::string message_file(const Communicator& communicator, uint32_t from, uint32_t to, uint64_t number) {
  return communicator.directory + "/message-" + std::to_string(from) + "-" + std::to_string(to) + "." + std::to_string(number);
}

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType dtype, uint32_t target, HcclComm handle, aclrtStream stream) {
  FINISH(stream);
  Communicator& communicator = open_communicator(handle);
  const Header header{kSend, static_cast<uint32_t>(dtype), 0, 0, count};
  const std::string path = message_file(communicator, communicator.rank, target, communicator.sent[target]++);
  if (publish(path, header, buffer, count * size_of(dtype))) return HCCL_SUCCESS;
  return refuse(HCCL_E_INTERNAL, "cannot write " + path + ": " + std::strerror(errno));
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType dtype, uint32_t source, HcclComm handle, aclrtStream stream) {
  FINISH(stream);
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
  return deliver(stream, buffer, std::move(data), buffer, {});
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
