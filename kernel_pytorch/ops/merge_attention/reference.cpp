// The reference: in double, element by element.
#include <cmath>
#include <limits>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/merge_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::merge_attention {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

double lse_at(const TensorView& lse, int64_t head, int64_t token) {
  return lse.as<const float>()[head * lse.strides[0] + token * lse.strides[1]];
}

void run(const Merge& problem, int, Context&) {
  const auto value = [](const TensorView& view, int64_t token, int64_t head, int64_t i, double weight) {
    return weight == 0
               ? 0.0
               : weight * load_element(view.data, view.dtype, token * view.strides[0] + head * view.strides[1] + i);
  };
  for (int64_t token = 0; token < problem.output.sizes[0]; ++token) {
    for (int64_t head = 0; head < problem.output.sizes[1]; ++head) {
      const double lse1 = lse_at(problem.lse1, head, token), lse2 = lse_at(problem.lse2, head, token);
      const double most = std::fmax(lse1, lse2);
      const double weight1 = lse1 == kNothing ? 0 : std::exp(lse1 - most);
      const double weight2 = lse2 == kNothing ? 0 : std::exp(lse2 - most);
      const double sum = weight1 + weight2;
      for (int64_t i = 0; i < problem.output.sizes[2]; ++i) {
        const double merged =
            value(problem.output1, token, head, i, weight1) + value(problem.output2, token, head, i, weight2);
        store_element(problem.output.data, problem.output.dtype,
                      token * problem.output.strides[0] + head * problem.output.strides[1] + i,
                      sum == 0 ? 0 : merged / sum);
      }
      if (problem.lse.is_present()) {
        problem.lse.as<float>()[head * problem.lse.strides[0] + token * problem.lse.strides[1]] =
            static_cast<float>(sum == 0 ? kNothing : most + std::log(sum));
      }
    }
  }
}

uint64_t code_version() {
  return hash_text("merge_attention reference 1");
}

}  // namespace

constinit const registry::Kernel<Merge> kMergeReference{
    .name = "reference", .supports = supports_on_cpu<Merge>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::merge_attention
