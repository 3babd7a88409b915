// The reference of delayed scales: one number after another, products in double.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/delayed_scales/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::delayed_scales {
namespace {

void run(const Update& problem, int, Context&) {
  const int64_t elements = elements_of(problem), count = elements * static_cast<int64_t>(problem.amax.size());
  const int64_t steps = problem.histories.sizes[0];
  auto* histories = problem.histories.as<float>();
  for (int64_t place = 0; place < count; ++place) {
    const auto layer = static_cast<size_t>(place / elements);
    float& amax = problem.amax[layer].as<float>()[place % elements];
    for (int64_t step = 0; step + 1 < steps; ++step) {
      histories[step * count + place] = histories[(step + 1) * count + place];
    }
    histories[(steps - 1) * count + place] =
        problem.joined.is_present() ? problem.joined.as<const float>()[place] : amax;
    float peak = 0;
    for (int64_t step = 0; step < steps; ++step) {
      const float value = histories[step * count + place];
      peak = peak > value ? peak : value;
    }
    const double scale = double{peak} * problem.factors.as<const float>()[place];
    problem.scales[layer].as<float>()[place % elements] =
        peak > 0 ? static_cast<float>(std::clamp<double>(scale, kLeastScale, kMostScale)) : 1.0f;
    amax = 0;
  }
}

uint64_t code_version() {
  return hash_text("delayed_scales reference 1");
}

}  // namespace

constinit const registry::Kernel<Update> kReference{
    .name = "reference", .supports = supports_on_cpu<Update>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::delayed_scales
