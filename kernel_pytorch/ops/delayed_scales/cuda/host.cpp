// Host side of delayed scales on CUDA: one launch for every 512 layers.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/delayed_scales/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/delayed_scales/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::delayed_scales {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/delayed_scales/cuda/kernel.cuh";
constexpr const char* kTooLarge = "a layer has 2^20 numbers or more, or there are 2^31 steps";

DeviceCode device_code() {
  return {.source = kSource,
          .entry = "kernel_pytorch::delayed_scales::update",
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Update& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  const bool is_large =
      elements_of(problem) >= int64_t{1} << 20 || problem.histories.sizes[0] > std::numeric_limits<int32_t>::max();
  return registry::Support::unless(is_large ? kTooLarge : nullptr);
}

void run(const Update& problem, int, Context& context) {
  static const std::string kLabel = "delayed_scales";
  static KernelTable<1> table;
  const int64_t elements = elements_of(problem), layers = static_cast<int64_t>(problem.amax.size());
  if (elements * layers == 0) return;
  CUkern_st* kernel = table.get(0, context, device_code);
  Arguments arguments{};
  arguments.histories = problem.histories.as<float>();
  arguments.factors = problem.factors.as<const float>();
  arguments.joined = problem.joined.as<const float>();
  arguments.all = elements * layers;
  arguments.elements = static_cast<int32_t>(elements);
  arguments.steps = static_cast<int32_t>(problem.histories.sizes[0]);
  arguments.least = kLeastScale;
  arguments.most = kMostScale;
  for (int64_t first = 0; first < layers; first += kMaxLayers) {
    const int64_t count = std::min<int64_t>(kMaxLayers, layers - first);
    for (int64_t i = 0; i < count; ++i) {
      arguments.amax[i] = problem.amax[static_cast<size_t>(first + i)].as<float>();
      arguments.scales[i] = problem.scales[static_cast<size_t>(first + i)].as<float>();
    }
    arguments.first = first * elements;
    arguments.count = static_cast<int32_t>(count * elements);
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(divide_up(arguments.count, kThreads));
    shape.block_x = kThreads;
    void* pointers[] = {&arguments};
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  }
}

std::vector<DeviceCode> all_device_code() {
  return {device_code()};
}
uint64_t source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Update> kCuda{
    .name = "cuda", .supports = supports, .run = run, .source_hash = source_hash, .device_code = all_device_code};

}  // namespace kernel_pytorch::delayed_scales
