// What devices there are, and their primary contexts: retained once, for good, and shared with torch and JAX.
#include "kernel_pytorch/device/cuda/driver.h"

#include <array>
#include <atomic>
#include <mutex>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/device/cuda/paper.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch::cuda_device {
namespace {

constexpr int kMaxDevices = 64;

std::string fingerprint(const DeviceInfo& info) {
  // Clocks are left out: they change with the power limit and would make measurements of the same machine strangers.
  return concat(info.name, "|", info.cuda.architecture(), "|", info.cuda.multiprocessors, " SMs|",
                info.memory_bytes >> 30, " GiB|driver ", info.cuda.driver_version / 1000);
}

// Reads without throwing: what the driver refuses goes into `problem`, with its words.
class DeviceReader {
 public:
  DeviceReader(const DriverTable& driver, int index, std::string& problem) : driver_(driver), problem_(problem) {
    note(driver.device_get(&device_, index), "cuDeviceGet");
  }
  int attribute(DeviceAttribute attribute) {
    int value = 0;
    note(driver_.device_attribute(&value, attribute, device_), "cuDeviceGetAttribute");
    return value;
  }
  std::string name() {
    char text[256] = {};
    note(driver_.device_name(text, sizeof(text) - 1, device_), "cuDeviceGetName");
    return text;
  }
  std::string gfx_name() {
    char text[64] = {};
    note(driver_.gfx_name(text, sizeof(text), device_), "hipGetDeviceProperties");
    return text;
  }
  int64_t memory_bytes() {
    size_t bytes = 0;
    note(driver_.device_total_memory(&bytes, device_), "cuDeviceTotalMem");
    return static_cast<int64_t>(bytes);
  }

 private:
  void note(Result result, const char* call) {
    if (result != kSuccess && problem_.empty()) problem_ = concat("no CUDA device: ", call, ": ", error_text(result));
  }
  const DriverTable& driver_;
  std::string& problem_;
  int device_ = 0;
};

DeviceInfo read_device(const DriverTable& driver, int index, std::string& problem) {
  DeviceReader reader(driver, index, problem);
  DeviceInfo info;
  info.device = {DeviceKind::kCuda, static_cast<int16_t>(index)};
  info.name = reader.name();
  info.memory_bytes = reader.memory_bytes();
  info.cuda = {
      .compute_major = reader.attribute(kComputeMajor),
      .compute_minor = reader.attribute(kComputeMinor),
      .multiprocessors = reader.attribute(kMultiprocessors),
      .l2_bytes = reader.attribute(kL2Bytes),
      .shared_bytes_per_block = reader.attribute(kSharedBytesPerBlockOptIn),
      .shared_bytes_per_multiprocessor = reader.attribute(kSharedBytesPerMultiprocessor),
      .clock_khz = reader.attribute(kClockKilohertz),
      .memory_clock_khz = reader.attribute(kMemoryClockKilohertz),
      .memory_bus_bits = reader.attribute(kMemoryBusBits),
      .driver_version = driver.version,
  };
  if (driver.gfx_name != nullptr) {
    info.cuda.gfx = reader.gfx_name();
    if (const int lanes = reader.attribute(kWarpLanes); lanes != 64 && problem.empty()) {
      problem = concat("no AMD GPU: ", info.name, " (", info.cuda.gfx, ") has waves of ", lanes,
                       " lanes, and kernels are written for 64 (gfx9); HIP_VISIBLE_DEVICES leaves a device out");
    }
  }
  pretend(info);
  info.fingerprint = fingerprint(info);
  info.fingerprint_hash = hash_text(info.fingerprint);
  return info;
}

// One slot a device; filled once, so that a warm call only loads it.
std::array<std::atomic<CUctx_st*>, kMaxDevices> primary_contexts;

CUctx_st* primary_context(const DriverTable& driver, int index) {
  static std::mutex mutex;
  KP_CHECK(index >= 0 && index < kMaxDevices, "cuda:", index, ": device indices go from 0 to ", kMaxDevices - 1);
  std::atomic<CUctx_st*>& slot = primary_contexts[index];
  if (CUctx_st* context = slot.load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(mutex);
  if (CUctx_st* context = slot.load(std::memory_order_acquire)) return context;
  int device = 0;
  check(driver.device_get(&device, index), "cuda:", index, ": finding the device");
  CUctx_st* context = nullptr;
  check(driver.primary_context_retain(&context, device), "cuda:", index, ": retaining its primary context");
  slot.store(context, std::memory_order_release);
  return context;
}

}  // namespace

std::vector<DeviceInfo> detect(std::string& absence) {
  std::vector<DeviceInfo> devices;
  absence.clear();
  if (options().disable_cuda) {
    absence = "no CUDA device: switched off by KERNEL_PYTORCH_DISABLE_CUDA";
    return devices;
  }
  const DriverTable* table = driver();
  if (table == nullptr) {
    absence = driver_absence();
    return devices;
  }
  int count = 0;
  if (const Result result = table->device_count(&count); result != kSuccess) {
    absence = concat("no CUDA device: cuDeviceGetCount: ", error_text(result));
    return devices;
  }
  for (int index = 0; index < count && index < kMaxDevices; ++index) {
    devices.push_back(read_device(*table, index, absence));
  }
  if (!absence.empty()) devices.clear();  // a driver that cannot describe its devices will not run kernels on them
  if (count == 0) absence = "no CUDA device: the driver lists none (is CUDA_VISIBLE_DEVICES empty?)";
  return devices;
}

CurrentDevice::CurrentDevice(int index) {
  if (PaperLaunches::current() != nullptr) return;
  const DriverTable& driver = require_driver();
  CUctx_st* wanted = primary_context(driver, index);
  CUctx_st* current = nullptr;
  check(driver.context_current(&current), "cuda:", index, ": asking for the current context");
  if (current == wanted) return;
  check(driver.context_push(wanted), "cuda:", index, ": making its context current");
  // A thread that had no context keeps it, as after the runtime's first call there. Autograd's threads begin without
  // one, and every launch of a backward would otherwise push and pop it.
  pushed_ = current != nullptr;
}

CurrentDevice::~CurrentDevice() {
  if (!pushed_) return;
  CUctx_st* popped = nullptr;
  require_driver().context_pop(&popped);
}

void release(int device_index, void* memory) noexcept {
  if (memory == nullptr) return;
  // The context was retained when the memory was allocated. Failures have no one to tell: the driver may be going away
  // with the process, and the memory with it.
  CUctx_st* context = primary_contexts[device_index].load(std::memory_order_acquire);
  const DriverTable& table = *driver();
  if (table.context_push(context) != kSuccess) return;
  table.memory_free(reinterpret_cast<DeviceAddress>(memory));
  table.context_pop(&context);
}

bool is_capturing(void* stream) {
  if (Rehearsal::is_running()) return true;
  const DriverTable* table = driver();
  if (table == nullptr) return false;
  int status = 0;
  const Result result = table->stream_is_capturing(static_cast<CUstream_st*>(stream), &status);
  // The legacy stream while another stream captures: work on it would break that capture.
  if (result == kErrorStreamCaptureImplicit) return true;
  return result == kSuccess && status != 0;
}

}  // namespace kernel_pytorch::cuda_device
