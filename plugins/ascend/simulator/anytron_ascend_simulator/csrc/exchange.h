// How the ranks of a communicator exchange data: files in its directory.
#pragma once

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

#include "reduction.h"

namespace exchange {

using reduction::Bytes;

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

inline const char* name_of(uint32_t operation) {
  static const char* names[] = {"?", "init", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "scatter",
                                "barrier", "all_to_all_v", "all_to_all", "send"};
  return operation <= kSend ? names[operation] : names[0];
}

inline size_t size_of(uint32_t dtype) {
  // HcclDataType: int8, int16, int32, fp16, fp32, int64, uint64, uint8, uint16, uint32, fp64, bfp16, int128.
  static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
  return dtype <= 12 ? sizes[dtype] : 1;
}

inline HcclResult refuse(HcclResult code, const std::string& text) {
  std::fprintf(stderr, "simulated HCCL: %s\n", text.c_str());
  return code;
}

inline std::chrono::seconds timeout() {
  static const char* value = std::getenv("ANYTRON_ASCEND_SIMULATOR_HCCL_TIMEOUT");
  return std::chrono::seconds(value != nullptr && *value != '\0' ? std::atol(value) : 120);
}

inline std::string describe(uint32_t rank, const Header& header) {
  return "rank " + std::to_string(rank) + " called " + name_of(header.operation) + " of " + std::to_string(header.count) +
         " elements (dtype " + std::to_string(header.dtype) + ", reduction " + std::to_string(header.reduction) + ", root " +
         std::to_string(header.root) + ")";
}

// Write header and data under a name that appears only when the file is complete.
inline bool publish(const std::string& path, const Header& header, const void* data, size_t size) {
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
inline bool collect(const std::string& path, Header* header, Bytes* data) {
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

inline std::string collective_file(const Communicator& communicator, uint64_t sequence, uint32_t rank) {
  return communicator.directory + "/collective-" + std::to_string(sequence) + "." + std::to_string(rank);
}

// Every rank gives `data` and gets everybody's, in rank order.
inline HcclResult meet(Communicator& communicator, const Header& header, const void* data, size_t size,
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

}  // namespace exchange
