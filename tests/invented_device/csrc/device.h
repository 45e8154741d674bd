// An invented accelerator: two devices whose memory the host cannot read, and which work only when something waits.
//
// Each device has one arena, mapped twice: without any access at the addresses that tensors hold (a host that follows
// such a pointer gets a segmentation fault), and readable at the addresses that kernels use.
//
// A stream is a queue. An operation is put into the queue and returns; it is computed when something waits for the
// stream: a synchronisation, an event, a copy to the host, an operation whose result's size depends on data. So a missing
// wait is not a race that is lost now and then: the reader finds the old bytes, each time.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

namespace invented {

constexpr int kDevices = 2;

// Whether the device has the named fault: the variable INVENTED_FAULT, or set_fault; faults.py lists them.
bool has_fault(const char* name);
void set_fault(std::string name);

c10::Device device_at(int index);
int current_device();
void set_current_device(int index);

c10::Stream current_stream(int device);
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(int device);
c10::Stream stream_of(int device, c10::StreamId id);

// Held while anything is queued, computed, allocated or freed.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

using Work = std::function<void()>;
void enqueue(c10::Stream stream, Work work);
// The number of operations queued so far, and whether the first `position` of them are done.
uint64_t queued(c10::Stream stream);
bool passed(c10::Stream stream, uint64_t position);
// Compute everything that is queued on the stream, or on all streams of the device.
void finish(c10::Stream stream);
void finish_device(int device);

struct Event {
  c10::Stream stream;
  uint64_t position;
  double recorded_ms;
};
Event* record(Event* event, c10::Stream stream);
void wait(c10::Stream stream, const Event& event);
void finish(const Event& event);
// Compute one operation of the event's stream; return whether the event has passed.
bool progress(const Event& event);
bool progress(c10::Stream stream);

// Addresses of tensors, and the addresses at which kernels find the same bytes; nullptr for a foreign address.
char* readable(const void* address);
// The tensor's address of a kernel's address; nullptr for a foreign address.
char* address_of(const void* readable_address);

// The device whose memory an address is; an error for a foreign address.
int owner(const void* address);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void use_on(const c10::DataPtr& data, c10::Stream stream);

}  // namespace invented
