// Streams and events of the invented accelerator, and its current device.

#include "device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>

namespace invented {

namespace {

constexpr size_t kFullQueue = 1 << 16;

struct Queue {
  std::deque<Work> work;
  uint64_t done = 0;
  uint64_t end() const { return done + work.size(); }
};

std::string& fault() {
  static std::string name = [] {
    const char* set = std::getenv("INVENTED_FAULT");
    return std::string(set != nullptr ? set : "");
  }();
  return name;
}

thread_local int current = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::array<std::deque<Queue>, kDevices> streams{std::deque<Queue>(1), std::deque<Queue>(1)};

Queue& queue(c10::Stream stream) { return streams.at(stream.device_index()).at(stream.id()); }

void run_one(Queue& queue) {
  Work work = std::move(queue.work.front());
  queue.work.pop_front();
  ++queue.done;
  const at::AutoDispatchBelowADInplaceOrView guard;  // whatever mode the waiting thread is in
  work();
}

void finish_until(c10::Stream stream, uint64_t position) {
  const Lock lock(mutex());
  Queue& mine = queue(stream);
  while (mine.done < position) run_one(mine);
}

}  // namespace

bool has_fault(const char* name) { return fault() == name; }

void set_fault(std::string name) { fault() = std::move(name); }

std::recursive_mutex& mutex() {
  static std::recursive_mutex one;
  return one;
}

c10::Device device_at(int index) { return c10::Device(c10::DeviceType::PrivateUse1, index); }

int current_device() { return current; }

void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "invented: there is no device ", index);
  if (!has_fault("set-device-ignored")) current = index;
}

c10::Stream stream_of(int index, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device_at(index), id); }

c10::Stream current_stream(int index) { return stream_of(index, current_streams.at(index)); }

void set_current_stream(c10::Stream stream) { current_streams.at(stream.device_index()) = stream.id(); }

c10::Stream new_stream(int index) {
  const Lock lock(mutex());
  streams.at(index).emplace_back();
  return stream_of(index, streams.at(index).size() - 1);
}

void enqueue(c10::Stream stream, Work work) {
  const Lock lock(mutex());
  Queue& mine = queue(stream);
  mine.work.push_back(std::move(work));
  if (mine.work.size() >= kFullQueue) run_one(mine);
}

uint64_t queued(c10::Stream stream) {
  const Lock lock(mutex());
  return queue(stream).end();
}

bool passed(c10::Stream stream, uint64_t position) {
  const Lock lock(mutex());
  return queue(stream).done >= position;
}

void finish(c10::Stream stream) { finish_until(stream, queued(stream)); }

void finish_device(int index) {
  const Lock lock(mutex());
  for (size_t id = 0; id < streams.at(index).size(); ++id) finish(stream_of(index, id));
}

Event* record(Event* event, c10::Stream stream) {
  using namespace std::chrono;
  const double now = duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  Event* made = new Event{stream, has_fault("events-pass-early") ? 0 : queued(stream), now};
  delete event;
  return made;
}

void finish(const Event& event) { finish_until(event.stream, event.position); }

void wait(c10::Stream stream, const Event& event) {
  if (has_fault("waits-ignored")) return;
  const c10::Stream other = event.stream;
  const uint64_t position = event.position;
  enqueue(stream, [other, position] { finish_until(other, position); });
}

bool progress(c10::Stream stream) {
  const Lock lock(mutex());
  Queue& mine = queue(stream);
  if (!mine.work.empty()) run_one(mine);
  return mine.work.empty();
}

bool progress(const Event& event) {
  const Lock lock(mutex());
  if (!passed(event.stream, event.position)) progress(event.stream);
  return passed(event.stream, event.position);
}

}  // namespace invented
