// The kernels of merging, best first, reference last, and the shapes they are tested on.
#include <limits>

#include "kernel_pytorch/ops/merge_attention/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::merge_attention {
namespace {

// Parts that saw no key, alone and both; what they hold is not a number.
void set_trial_inputs(const Merge& problem) {
  const int64_t tokens = problem.output.sizes[0], heads = problem.output.sizes[1], size = problem.output.sizes[2];
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < heads * tokens; i += 5) {
    const int64_t head = i / tokens, token = i % tokens;
    problem.lse1.as<float>()[head * problem.lse1.strides[0] + token * problem.lse1.strides[1]] = kNothing;
    if (i % 10 == 0)
      problem.lse2.as<float>()[head * problem.lse2.strides[0] + token * problem.lse2.strides[1]] = kNothing;
    if (problem.output1.dtype != DType::kFloat32) continue;
    float* const row =
        problem.output1.as<float>() + token * problem.output1.strides[0] + head * problem.output1.strides[1];
    for (int64_t k = 0; k < size; ++k) row[k] = std::numeric_limits<float>::quiet_NaN();
  }
}

constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x1x64; 7x3x128 lse=0,1; 33x8x80; 5x2x7 lse=0; 0x2x64; 3x0x8; 65x4x512
)";

}  // namespace

constinit const registry::Operation<Merge> kMerge =
    registry::declared<Merge, kMergeFields>({.name = "merge_attention",
                                             .kernels = registry::kernel_list<kMergeCuda, kMergeCpu, kMergeReference>,
                                             .set_trial_inputs = set_trial_inputs,
                                             .request = {.shape = "tokens heads size"},
                                             .check = registry::check_only<Merge, check>,
                                             .flops_per_element = 3,
                                             .shapes = kShapes});

constexpr auto kDeclarations = registry::plain<Merge, merge>("merge_attention", kMergeFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kMerge>};

}  // namespace kernel_pytorch::merge_attention
