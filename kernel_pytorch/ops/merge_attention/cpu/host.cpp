// The host side of the CPU kernel: weights of a head and its row, tokens over the threads.
#include <cmath>
#include <limits>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/merge_attention/cpu/row.h"
#include "kernel_pytorch/ops/merge_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::merge_attention {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

float& lse_at(const TensorView& lse, int64_t head, int64_t token) {
  return lse.as<float>()[head * lse.strides[0] + token * lse.strides[1]];
}
char* row_at(const TensorView& view, int64_t token, int64_t head) {
  return view.as<char>() + (token * view.strides[0] + head * view.strides[1]) * size_of(view.dtype);
}

void run(const Merge& problem, int, Context& context) {
  const RowKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels);
  const auto merge_row = kernels.merge[cpu_type_index(problem.output.dtype)];
  const int64_t heads = problem.output.sizes[1], size = problem.output.sizes[2];
  parallel_for(context.threads, problem.output.sizes[0], [&](int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      const float lse1 = lse_at(problem.lse1, head, token), lse2 = lse_at(problem.lse2, head, token);
      const float most = std::fmax(lse1, lse2);
      const float weight1 = lse1 == kNothing ? 0 : std::exp(lse1 - most);
      const float weight2 = lse2 == kNothing ? 0 : std::exp(lse2 - most);
      const float sum = weight1 + weight2, inverse = sum == 0 ? 0 : 1 / sum;
      merge_row({.first = row_at(problem.output1, token, head),
                 .second = row_at(problem.output2, token, head),
                 .output = row_at(problem.output, token, head),
                 .size = size,
                 .first_weight = weight1 * inverse,
                 .second_weight = weight2 * inverse});
      if (problem.lse.is_present()) {
        lse_at(problem.lse, head, token) = sum == 0 ? kNothing : most + std::log(sum);
      }
    }
  });
}

uint64_t code_version() {
  return hash_text("merge_attention cpu 1");
}

}  // namespace

constinit const registry::Kernel<Merge> kMergeCpu{
    .name = "cpu", .supports = supports_on_cpu<Merge>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::merge_attention
