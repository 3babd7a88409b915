// Memory, streams and events in a device's primary context, for callers that bring no framework.
#include <algorithm>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/device/cuda/launch_counts.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch::cuda_device {
namespace {

DeviceAddress address_of(const void* memory) {
  return reinterpret_cast<DeviceAddress>(memory);
}

CUstream_st* as_stream(void* stream) {
  return static_cast<CUstream_st*>(stream);
}

}  // namespace

void* allocate(int device_index, size_t bytes) {
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  const RelaxedCapture relaxed(driver);
  DeviceAddress address = 0;
  const Result result = driver.memory_allocate(&address, std::max<size_t>(bytes, 1));
  if (result != kSuccess) {
    size_t free_bytes = 0, total_bytes = 0;
    driver.memory_info(&free_bytes, &total_bytes);
    fail(ErrorCode::kDevice, "cuda:", device_index, ": allocating ", bytes, " bytes with ", free_bytes, " of ",
         total_bytes, " free: ", error_text(result));
  }
  return reinterpret_cast<void*>(address);
}

void copy_to_device(int device_index, void* target, const void* source, size_t bytes, void* stream) {
  if (bytes == 0 || Rehearsal::is_running()) return;
  const CurrentDevice current(device_index);
  check(driver()->copy_to_device(address_of(target), source, bytes, as_stream(stream)), "cuda:", device_index,
        ": copying ", bytes, " bytes to the device");
}

void copy_to_host(int device_index, void* target, const void* source, size_t bytes, void* stream) {
  if (bytes == 0 || Rehearsal::is_running()) return;
  const CurrentDevice current(device_index);
  check(driver()->copy_to_host(target, address_of(source), bytes, as_stream(stream)), "cuda:", device_index,
        ": copying ", bytes, " bytes to the host");
}

void copy_on_device(int device_index, void* target, const void* source, size_t bytes, void* stream) {
  if (bytes == 0 || Rehearsal::is_running()) return;
  const CurrentDevice current(device_index);
  check(driver()->copy_on_device(address_of(target), address_of(source), bytes, as_stream(stream)),
        "cuda:", device_index, ": copying ", bytes, " bytes on the device");
}

void fill_bytes(int device_index, void* target, unsigned char value, size_t bytes, void* stream) {
  if (bytes == 0 || Rehearsal::is_running()) return;
  const CurrentDevice current(device_index);
  check(driver()->fill_bytes(address_of(target), value, bytes, as_stream(stream)), "cuda:", device_index, ": filling ",
        bytes, " bytes");
  count_fill();
}

void synchronize(int device_index, void* stream) {
  if (Rehearsal::is_running()) return;
  const CurrentDevice current(device_index);
  check(driver()->stream_synchronize(as_stream(stream)), "cuda:", device_index, ": waiting for a stream");
}

Stream::Stream(int device_index) : device_index_(device_index) {
  const CurrentDevice current(device_index);
  CUstream_st* stream = nullptr;
  // Ordered with the legacy default stream (flags 0), so that data prepared there is seen without an event.
  check(driver()->stream_create(&stream, 0), "cuda:", device_index, ": creating a stream");
  handle_ = stream;
}

Stream::~Stream() {
  driver()->stream_destroy(as_stream(handle_));
}

Event::Event(int device_index) : device_index_(device_index) {
  const CurrentDevice current(device_index);
  check(driver()->event_create(&handle_, 0), "cuda:", device_index, ": creating an event");
}

Event::~Event() {
  driver()->event_destroy(handle_);
}

void Event::record(void* stream) {
  const CurrentDevice current(device_index_);
  check(driver()->event_record(handle_, as_stream(stream)), "cuda:", device_index_, ": recording an event");
}

void Event::synchronize() {
  check(driver()->event_synchronize(handle_), "cuda:", device_index_, ": waiting for an event");
}

float Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0;
  check(driver()->event_elapsed(&milliseconds, start.handle_, handle_), "cuda:", device_index_,
        ": reading the time between two events");
  return milliseconds;
}

}  // namespace kernel_pytorch::cuda_device
