// Loaded modules and launches. Attributes that the driver wants before a launch (large shared memory, clusters above 8)
// are set once per kernel and device and remembered, so a warm launch makes two driver calls: current context, launch.
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"

namespace kernel_pytorch::cuda_device {
namespace {

// Dynamic bytes that need no grant: static shared memory counts against the same 48 KB, and asking for more is
// harmless.
constexpr unsigned kDefaultSharedBytes = 32 * 1024;
constexpr unsigned kPortableClusterBlocks = 8;

// What has been granted to a kernel on a device so far.
struct Grant {
  unsigned shared_bytes = kDefaultSharedBytes;
  bool large_cluster = false;
};

struct Grants {
  std::shared_mutex mutex;
  std::map<std::pair<CUkern_st*, int>, Grant> by_kernel;
};

Grants& grants() {
  static Grants* all = new Grants;
  return *all;
}

bool suffices(const Grant& grant, unsigned shared_bytes, unsigned cluster_blocks) {
  return grant.shared_bytes >= shared_bytes && (grant.large_cluster || cluster_blocks <= kPortableClusterBlocks);
}

void grant_attributes(const DriverTable& driver, CUkern_st* kernel, int device_index, unsigned shared_bytes,
                      unsigned cluster_blocks, const std::string& label) {
  if (suffices(Grant{}, shared_bytes, cluster_blocks)) return;
  Grants& all = grants();
  {
    const std::shared_lock lock(all.mutex);
    const auto found = all.by_kernel.find({kernel, device_index});
    if (found != all.by_kernel.end() && suffices(found->second, shared_bytes, cluster_blocks)) return;
  }
  const std::unique_lock lock(all.mutex);
  Grant& grant = all.by_kernel[{kernel, device_index}];
  const RelaxedCapture relaxed(driver);
  int device = 0;
  check(driver.device_get(&device, device_index), label, ": finding cuda:", device_index);
  if (shared_bytes > grant.shared_bytes) {
    check(driver.kernel_set_attribute(kMaximumDynamicSharedBytes, static_cast<int>(shared_bytes), kernel, device),
          label, ": asking for ", shared_bytes, " bytes of shared memory a block on cuda:", device_index);
    grant.shared_bytes = shared_bytes;
  }
  if (cluster_blocks > kPortableClusterBlocks && !grant.large_cluster) {
    check(driver.kernel_set_attribute(kNonPortableClusterSizeAllowed, 1, kernel, device), label,
          ": allowing clusters of ", cluster_blocks, " blocks on cuda:", device_index);
    grant.large_cluster = true;
  }
}

void forget_grants() {
  Grants& all = grants();
  const std::unique_lock lock(all.mutex);
  all.by_kernel.clear();  // the handles of an unloaded module may come back for other kernels
}

// The driver takes a context-independent kernel wherever it takes a function, by this cast (cuda.h says so).
CUfunc_st* as_function(CUkern_st* kernel) {
  return reinterpret_cast<CUfunc_st*>(kernel);
}

}  // namespace

Module::Module(std::span<const char> cubin, const std::string& label) : label_(label) {
  const DriverTable& driver = require_driver();
  const RelaxedCapture relaxed(driver);
  check(driver.library_load_data(&library_, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), label_,
        ": loading a compiled module of ", cubin.size(), " bytes");
}

Module::~Module() {
  forget_grants();
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

void launch(const Context& context, CUkern_st* kernel, const LaunchShape& shape, std::span<void*> arguments,
            const std::string& label) {
  const int device_index = context.info->device.index;
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  grant_attributes(driver, kernel, device_index, shape.shared_bytes, shape.cluster_x, label);
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
  check(driver.launch_kernel(&configuration, as_function(kernel), arguments.data(), nullptr), label,
        ": launching grid (", shape.grid_x, ", ", shape.grid_y, ", ", shape.grid_z, "), block ", shape.block_x,
        ", cluster ", shape.cluster_x, ", ", shape.shared_bytes, " bytes of shared memory on cuda:", device_index);
}

int resident_blocks(CUkern_st* kernel, int device_index, unsigned block_threads, unsigned shared_bytes) {
  const CurrentDevice current(device_index);
  const DriverTable& driver = *cuda_device::driver();
  grant_attributes(driver, kernel, device_index, shared_bytes, 1, "occupancy");
  int blocks = 0;
  check(driver.occupancy(&blocks, as_function(kernel), static_cast<int>(block_threads), shared_bytes),
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
