// The queues of the simulated streams; the same for libascendcl.so, libhccl.so and the kernels in Python.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

extern "C" {

// Whether ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS=1: work is queued, and done when something waits for it.
int anytron_simulator_asynchronous();

// Queue work on a stream (nullptr: the device's default stream); done at once where nothing is queued. `run` returns 0
// or an error, which whoever waits for the stream gets.
int anytron_simulator_enqueue(void* stream, int (*run)(void*), void* argument);

// Do everything that is queued on a stream; return the first error.
int anytron_simulator_finish(void* stream);

// Do everything that is queued anywhere; errors stay with their streams.
void anytron_simulator_finish_all();

// The process ends: forget what is queued, and queue nothing any more.
void anytron_simulator_stop();
}

namespace streams {

using Work = std::function<int()>;

inline int enqueue(void* stream, Work work) {
  if (!anytron_simulator_asynchronous()) return work();
  const auto run = [](void* argument) {
    auto* queued = static_cast<Work*>(argument);
    const int status = (*queued)();
    delete queued;
    return status;
  };
  return anytron_simulator_enqueue(stream, run, new Work(std::move(work)));
}

}  // namespace streams
