#include "kernel_pytorch/device/cuda/launch_counts.h"

#include <atomic>

namespace kernel_pytorch::cuda_device {
namespace {

// A line of their own: threads that launch write to nothing else that others read.
struct alignas(64) Counters {
  std::atomic<uint64_t> kernels{0};
  std::atomic<uint64_t> fills{0};
};
constinit Counters counters;

}  // namespace

LaunchCounts launch_counts() noexcept {
  return {counters.kernels.load(std::memory_order_relaxed), counters.fills.load(std::memory_order_relaxed)};
}

void count_kernel() noexcept {
  counters.kernels.fetch_add(1, std::memory_order_relaxed);
}

void count_fill() noexcept {
  counters.fills.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace kernel_pytorch::cuda_device
