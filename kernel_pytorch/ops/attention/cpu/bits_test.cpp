// Promises of the CPU kernels of attention that a comparison with the reference cannot see: bits.
#include <gtest/gtest.h>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {
namespace {

// A row has the same bits alone as in a batch, with more queries, and with more keys behind the causal ones.
TEST(AttentionCpu, RowsDoNotDependOnTheirNeighbours) {
  OwnContext context;
  for (const char* window : {"-1", "70"}) {
    Bound<ForwardProblem> bound = make({2, 3, 250, 450, 40}, DType::kFloat32,
                                       {{"causal", "1"}, {"causal_offset", "200"}, {"window_left", window}});
    kForwardCpu.run(bound.problem, 0, context);
    const ForwardProblem& all = bound.problem;
    for (int64_t rows : {1, 37, 200}) {
      ForwardProblem part = all;
      for (TensorView* view : {&part.query, &part.key, &part.value, &part.output}) {
        view->data = view->as<float>() + view->strides[0] + 2 * view->strides[1];
        view->sizes[0] = view->sizes[1] = 1;
      }
      part.query.sizes[2] = part.output.sizes[2] = rows;
      part.key.sizes[2] = part.value.sizes[2] = 200 + rows;
      part.lse = {};
      Bound<ForwardProblem> results;
      part.output = results.own(contiguous_view(nullptr, DType::kFloat32, {1, 1, rows, 40}));
      kForwardCpu.run(part, 0, context);
      for (int64_t row = 0; row < rows; ++row) {
        const float* alone = part.output.as<float>() + row * 40;
        const float* among =
            all.output.as<float>() + all.output.strides[0] + 2 * all.output.strides[1] + row * all.output.strides[2];
        for (int i = 0; i < 40; ++i) ASSERT_EQ(alone[i], among[i]) << "row " << row << " of " << rows;
      }
    }
  }
}

TEST(AttentionCpu, BackwardGivesTheSameBitsEveryTime) {
  const registry::ProblemRequest request{.shape = {1, 2, unless_emulated(300, 200), 64},
                                         .dtype = DType::kFloat32,
                                         .device = {},
                                         .options = {{"causal", "1"}, {"bias", "head"}, {"key_heads", "1"}}};
  Bound<BackwardProblem> bound = bind(kBackward, make_backward(request));
  const BackwardProblem& problem = bound.problem;
  std::vector<std::vector<double>> first;
  OwnContext context;
  for (int run = 0; run < unless_emulated(100, 5); ++run) {
    kBackwardCpu.run(problem, 0, context);
    const std::vector<std::vector<double>> results = {values_of(problem.grad_query), values_of(problem.grad_key),
                                                      values_of(problem.grad_value), values_of(problem.grad_bias)};
    if (run == 0) first = results;
    ASSERT_EQ(first, results) << "run " << run;
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
