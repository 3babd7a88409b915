// The CPU kernel: a layer after another, the history once: what moves is compared on its way.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/delayed_scales/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::delayed_scales {
namespace {

void run_cpu(const Update& problem, int, Context&) {
  const int64_t elements = elements_of(problem), layers = static_cast<int64_t>(problem.amax.size());
  const int64_t count = elements * layers, steps = problem.histories.sizes[0];
  if (count == 0) return;
  auto* histories = problem.histories.as<float>();
  const auto* factors = problem.factors.as<const float>();
  std::memmove(histories, histories + count, static_cast<size_t>((steps - 1) * count) * sizeof(float));
  float* newest = histories + (steps - 1) * count;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const auto bytes = static_cast<size_t>(elements) * sizeof(float);
    auto* amax = problem.amax[static_cast<size_t>(layer)].as<float>();
    auto* scales = problem.scales[static_cast<size_t>(layer)].as<float>();
    const int64_t first = layer * elements;
    std::memcpy(newest + first, problem.joined.is_present() ? problem.joined.as<const float>() + first : amax, bytes);
    for (int64_t i = 0; i < elements; ++i) {
      float peak = 0;
      for (int64_t step = 0; step < steps; ++step) {
        const float value = histories[step * count + first + i];
        peak = peak > value ? peak : value;
      }
      const float scale = peak * factors[first + i];
      scales[i] = !(peak > 0) ? 1 : scale < kLeastScale ? kLeastScale : scale > kMostScale ? kMostScale : scale;
      amax[i] = 0;
    }
  }
}

uint64_t cpu_version() {
  return hash_text("delayed_scales cpu 1");
}

}  // namespace

constinit const registry::Kernel<Update> kCpu{
    .name = "cpu", .supports = supports_on_cpu<Update>, .run = run_cpu, .source_hash = cpu_version};

}  // namespace kernel_pytorch::delayed_scales
