// Streams and events of the simulated runtime, a part of libascendcl.so.
//
// With ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS=1 a stream is a queue. Work is put into it, and done when something waits
// for the stream: a synchronisation, an event, a blocking copy, an operator whose result's size depends on data. So a
// missing wait is no race that is lost now and then: the reader finds the old bytes, each time. Without the variable
// everything is done when a call returns.

#include "streams.h"

#include <acl/acl.h>
#include <acl/acl_rt.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <mutex>

#include "runtime.h"

namespace {

constexpr size_t kFullQueue = 1 << 16;
// A loop that asks until the work is done must end; an allocator that asks now and then must not do the work.
constexpr int kQueriesOfALoop = 1000;

struct Task {
  int (*run)(void*);
  void* argument;
};

struct Stream {
  int device;
  int id;
  std::deque<Task> tasks;
  uint64_t done = 0;
  int error = 0;  // the first that nobody got yet
  int queries = 0;
  uint64_t end() const { return done + tasks.size(); }
};

struct Event {
  uint64_t recorded_us = 0;
  Stream* stream = nullptr;
  uint64_t position = 0;
  int queries = 0;
};

bool stopped = false;

// Never freed: an event may outlive its stream.
std::list<Stream>& streams_made() {
  static auto* made = new std::list<Stream>;
  return *made;
}

template <class Function>
Function of_python(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// Holds the queues, and never waits for them with Python's lock: a kernel in Python takes that lock while it runs.
class Lock {
 public:
  Lock() {
    static const auto holds = of_python<int (*)()>("PyGILState_Check");
    static const auto release = of_python<void* (*)()>("PyEval_SaveThread");
    static const auto initialized = of_python<int (*)()>("Py_IsInitialized");
    if (holds != nullptr && initialized() && holds()) thread_ = release();
    mutex().lock();
  }
  ~Lock() {
    static const auto restore = of_python<void (*)(void*)>("PyEval_RestoreThread");
    mutex().unlock();
    if (thread_ != nullptr) restore(thread_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  static std::recursive_mutex& mutex() {
    static auto* one = new std::recursive_mutex;
    return *one;
  }
  void* thread_ = nullptr;
};

Stream* new_stream(int device) {
  static int id = 0;
  const Lock lock;
  streams_made().push_back({device, ++id, {}});
  return &streams_made().back();
}

Stream* stream_of(void* handle) {
  if (handle != nullptr) return static_cast<Stream*>(handle);
  static std::map<int, Stream*> defaults;
  const Lock lock;
  Stream*& found = defaults[runtime::device()];
  if (found == nullptr) found = new_stream(runtime::device());
  return found;
}

void run_one(Stream& stream) {
  const Task task = stream.tasks.front();
  stream.tasks.pop_front();
  ++stream.done;
  const int status = task.run(task.argument);
  if (stream.error == 0) stream.error = status;
}

void finish_until(Stream& stream, uint64_t position) {
  const Lock lock;
  while (!stopped && stream.done < position) run_one(stream);
}

int take_error(Stream& stream) { return std::exchange(stream.error, 0); }

int finish(Stream& stream) {
  const Lock lock;
  finish_until(stream, stream.end());
  return take_error(stream);
}

// Whether a stream has reached a position. Who asks in a loop makes it go on.
bool reached(Stream& stream, uint64_t position, int* queries) {
  const Lock lock;
  if (stream.done < position && ++*queries > kQueriesOfALoop) run_one(stream);
  return stream.done >= position;
}

uint64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

int anytron_simulator_asynchronous() {
  static const char* value = std::getenv("ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS");
  static const bool asynchronous = value != nullptr && std::strcmp(value, "1") == 0;
  return asynchronous;
}

int anytron_simulator_enqueue(void* handle, int (*run)(void*), void* argument) {
  if (!anytron_simulator_asynchronous()) return run(argument);
  Stream& stream = *stream_of(handle);
  const Lock lock;
  if (stopped) return 0;
  stream.tasks.push_back({run, argument});
  if (stream.tasks.size() >= kFullQueue) run_one(stream);
  return 0;
}

int anytron_simulator_finish(void* handle) { return finish(*stream_of(handle)); }

void anytron_simulator_finish_all() {
  const Lock lock;
  for (Stream& stream : streams_made()) finish_until(stream, stream.end());
}

void anytron_simulator_stop() {
  const Lock lock;
  stopped = true;
}

// ---- streams

aclError aclrtCreateStream(aclrtStream* stream) { return *stream = new_stream(runtime::device()), 0; }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
aclError aclrtDestroyStream(aclrtStream stream) { return anytron_simulator_finish(stream); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return 0; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return 0; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) { return *flag = 0, 0; }
aclError aclrtSynchronizeStream(aclrtStream stream) { return anytron_simulator_finish(stream); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return anytron_simulator_finish(stream); }
aclError aclrtSynchronizeDevice() {
  const Lock lock;
  int error = 0;
  for (Stream& stream : streams_made()) {
    if (stream.device != runtime::device()) continue;
    const int status = finish(stream);
    if (error == 0) error = status;
  }
  return error;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  const Lock lock;
  Stream& stream = *stream_of(handle);
  const bool complete = reached(stream, stream.end(), &stream.queries);
  if (complete) stream.queries = 0;
  *status = complete ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return 0;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  return *id = stream == nullptr ? 0 : static_cast<Stream*>(stream)->id, 0;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  const Event event = *static_cast<Event*>(handle);
  if (event.stream == nullptr) return 0;
  return streams::enqueue(stream, [event] {
    finish_until(*event.stream, event.position);
    return take_error(*event.stream);
  });
}

// ---- events

aclError aclrtCreateEvent(aclrtEvent* event) { return *event = new Event, 0; }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtDestroyEvent(aclrtEvent event) { return delete static_cast<Event*>(event), 0; }

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream handle) {
  Stream* stream = stream_of(handle);
  const Lock lock;
  *static_cast<Event*>(event) = {now_us(), stream, stream->end()};
  return 0;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return 0; }

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  const Event& event = *static_cast<Event*>(handle);
  if (event.stream == nullptr) return 0;
  const Lock lock;
  finish_until(*event.stream, event.position);
  return take_error(*event.stream);
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  auto& event = *static_cast<Event*>(handle);
  const bool complete = event.stream == nullptr || reached(*event.stream, event.position, &event.queries);
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return 0;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  return *status = ACL_EVENT_WAIT_STATUS_COMPLETE, 0;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto begin = static_cast<Event*>(start)->recorded_us;
  return *milliseconds = (static_cast<Event*>(end)->recorded_us - begin) / 1000.0F, 0;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* time) {
  return *time = static_cast<Event*>(event)->recorded_us, 0;
}

uint64_t MsprofSysCycleTime() { return now_us(); }

}  // extern "C"
