// Loaded modules and launches. What the driver wants to know before a launch (large shared memory, clusters above 8)
// and which function a kernel is on a device are asked once and remembered, so a warm launch makes two driver calls:
// current context, launch.
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/device/cuda/launch_counts.h"
#include "kernel_pytorch/device/cuda/paper.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch::cuda_device {
namespace {

// Dynamic bytes that need no grant: static shared memory counts against the same 48 KB, and asking for more is
// harmless.
constexpr unsigned kDefaultSharedBytes = 32 * 1024;
constexpr unsigned kPortableClusterBlocks = 8;

// A kernel on a device: its function there, and what has been granted to it so far.
struct Ready {
  CUkern_st* kernel = nullptr;
  int device_index = 0;
  CUfunc_st* function = nullptr;
  std::atomic<unsigned> shared_bytes{kDefaultSharedBytes};
  std::atomic<bool> large_cluster{false};
};

// Found without a lock: slots are filled under one, from the hash of the kernel on, and never change until a module is
// unloaded (which only tests do). Entries live on, since a reader may hold one.
class ReadyKernels {
 public:
  Ready* find(CUkern_st* kernel, int device_index) const {
    for (size_t i = first_slot(kernel, device_index);; i = (i + 1) % kSlots) {
      Ready* ready = slots_[i].load(std::memory_order_acquire);
      if (ready == nullptr || (ready->kernel == kernel && ready->device_index == device_index)) return ready;
    }
  }
  Ready& add(const DriverTable& driver, CUkern_st* kernel, int device_index, const std::string& label) {
    const std::lock_guard lock(mutex_);
    if (Ready* found = find(kernel, device_index)) return *found;
    const RelaxedCapture relaxed(driver);
    auto ready = std::make_unique<Ready>();
    ready->kernel = kernel;
    ready->device_index = device_index;
    check(driver.kernel_function(&ready->function, kernel), label, ": finding its function on cuda:", device_index);
    entries_.push_back(std::move(ready));
    Ready& added = *entries_.back();
    if (++used_ > kSlots / 2) clear();  // find() must meet an empty slot; what is in use comes back
    size_t slot = first_slot(kernel, device_index);
    while (slots_[slot].load(std::memory_order_relaxed) != nullptr) slot = (slot + 1) % kSlots;
    slots_[slot].store(&added, std::memory_order_release);
    return added;
  }
  // The handles of an unloaded module may come back for other kernels.
  void forget() {
    const std::lock_guard lock(mutex_);
    clear();
  }

 private:
  static constexpr size_t kSlots = 4096;
  void clear() {
    for (std::atomic<Ready*>& slot : slots_) slot.store(nullptr, std::memory_order_release);
    used_ = 0;
  }
  static size_t first_slot(CUkern_st* kernel, int device_index) {
    const auto address = reinterpret_cast<uintptr_t>(kernel);
    return (address >> 4 ^ address >> 16 ^ static_cast<uintptr_t>(device_index) * 61) % kSlots;
  }
  std::mutex mutex_;
  std::array<std::atomic<Ready*>, kSlots> slots_{};
  std::vector<std::unique_ptr<Ready>> entries_;
  size_t used_ = 0;
};

ReadyKernels& ready_kernels() {
  static auto* all = new ReadyKernels;
  return *all;
}

// Call with the device's context current.
Ready& ready_kernel(const DriverTable& driver, CUkern_st* kernel, int device_index, const std::string& label) {
  if (Ready* ready = ready_kernels().find(kernel, device_index)) [[likely]]
    return *ready;
  return ready_kernels().add(driver, kernel, device_index, label);
}

void grant_attributes(const DriverTable& driver, Ready& ready, unsigned shared_bytes, unsigned cluster_blocks,
                      const std::string& label) {
  const bool needs_bytes = shared_bytes > ready.shared_bytes.load(std::memory_order_acquire);
  const bool needs_cluster =
      cluster_blocks > kPortableClusterBlocks && !ready.large_cluster.load(std::memory_order_acquire);
  if (!needs_bytes && !needs_cluster) [[likely]]
    return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const RelaxedCapture relaxed(driver);
  int device = 0;
  check(driver.device_get(&device, ready.device_index), label, ": finding cuda:", ready.device_index);
  if (shared_bytes > ready.shared_bytes) {
    check(driver.kernel_set_attribute(kMaximumDynamicSharedBytes, static_cast<int>(shared_bytes), ready.kernel, device),
          label, ": asking for ", shared_bytes, " bytes of shared memory a block on cuda:", ready.device_index);
    ready.shared_bytes = shared_bytes;
  }
  if (needs_cluster) {
    check(driver.kernel_set_attribute(kNonPortableClusterSizeAllowed, 1, ready.kernel, device), label,
          ": allowing clusters of ", cluster_blocks, " blocks on cuda:", ready.device_index);
    ready.large_cluster = true;
  }
}

}  // namespace

Module::Module(std::span<const char> cubin, const std::string& label) : label_(label) {
  const DriverTable& driver = require_driver();
  const RelaxedCapture relaxed(driver);
  check(driver.library_load_data(&library_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), label_,
        ": loading a compiled module of ", cubin.size(), " bytes");
}

Module::~Module() {
  ready_kernels().forget();
  if (const DriverTable* table = driver()) table->library_unload(library_);
}

CUkern_st* Module::kernel(const std::string& lowered_name) const {
  const DriverTable& driver = require_driver();
  const RelaxedCapture relaxed(driver);
  CUkern_st* kernel = nullptr;
  check(driver.library_kernel(&kernel, library_, lowered_name.c_str()), label_, ": finding function ", lowered_name);
  return kernel;
}

void load_now(CUkern_st* kernel, int device_index, const std::string& label) {
  const DriverTable& driver = require_driver();
  const CurrentDevice current(device_index);
  const RelaxedCapture relaxed(driver);
  CUfunc_st* function = nullptr;
  check(driver.kernel_function(&function, kernel), label, ": loading onto cuda:", device_index);
  if (driver.function_load != nullptr) {
    check(driver.function_load(function), label, ": loading onto cuda:", device_index);
  }
}

void launch(const Context& context, CUkern_st* kernel, const LaunchShape& asked, std::span<void*> arguments,
            const std::string& label) {
  LaunchShape shape = asked;
  shape.programmatic_dependent &= has_feature(*context.info, CudaFeature::kDependentLaunch);
  if (PaperLaunches* paper = PaperLaunches::current()) return paper->launch(kernel, shape, label);
  const int device_index = context.info->device.index;
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  Ready& ready = ready_kernel(driver, kernel, device_index, label);
  grant_attributes(driver, ready, shape.shared_bytes, shape.cluster_x, label);
  if (Rehearsal::is_running()) return;
  LaunchAttribute attributes[2];
  unsigned attribute_count = 0;
  if (shape.cluster_x > 1) {
    LaunchAttribute& attribute = attributes[attribute_count++];
    attribute.id = LaunchAttribute::kClusterDimension;
    attribute.value.cluster[0] = shape.cluster_x;
    attribute.value.cluster[1] = attribute.value.cluster[2] = 1;
  }
  if (shape.programmatic_dependent) {
    LaunchAttribute& attribute = attributes[attribute_count++];
    attribute.id = LaunchAttribute::kProgrammaticStreamSerialization;
    attribute.value.flag = 1;
  }
  const LaunchConfiguration configuration{.grid = {shape.grid_x, shape.grid_y, shape.grid_z},
                                          .block = {shape.block_x, 1, 1},
                                          .shared_bytes = shape.shared_bytes,
                                          .stream = static_cast<CUstream_st*>(context.stream),
                                          .attributes = attributes,
                                          .attribute_count = attribute_count};
  check(driver.launch_kernel(&configuration, ready.function, arguments.data(), nullptr), label, ": launching grid (",
        shape.grid_x, ", ", shape.grid_y, ", ", shape.grid_z, "), block ", shape.block_x, ", cluster ", shape.cluster_x,
        ", ", shape.shared_bytes, " bytes of shared memory on cuda:", device_index);
  count_kernel();
}

int resident_blocks(CUkern_st* kernel, int device_index, unsigned block_threads, unsigned shared_bytes) {
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  Ready& ready = ready_kernel(driver, kernel, device_index, "occupancy");
  grant_attributes(driver, ready, shared_bytes, 1, "occupancy");
  int blocks = 0;
  check(driver.occupancy(&blocks, ready.function, static_cast<int>(block_threads), shared_bytes),
        "occupancy: asking how many blocks of ", block_threads, " threads and ", shared_bytes,
        " bytes of shared memory fit on a multiprocessor of cuda:", device_index);
  return blocks;
}

KernelResources resources(CUkern_st* kernel, int device_index) {
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  int device = 0;
  check(driver.device_get(&device, device_index), "cuda:", device_index, ": finding the device");
  const auto read = [&](FunctionAttribute attribute) {
    int value = 0;
    check(driver.kernel_attribute(&value, attribute, kernel, device), "cuda:", device_index,
          ": reading kernel attribute ", attribute);
    return value;
  };
  return {
      .registers = read(kRegisters), .local_bytes = read(kLocalBytes), .static_shared_bytes = read(kStaticSharedBytes)};
}

}  // namespace kernel_pytorch::cuda_device
