#include "kernel_pytorch/ops/attention/fp8/fp8.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/check.h"
#include "kernel_pytorch/ops/attention/fp8/operation.h"
#include "kernel_pytorch/ops/attention/fp8/rounding_cuda.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::attention::fp8 {

void check(Forward& problem, Device device) {
  const DType type = problem.query.dtype;
  KP_CHECK(type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16, "attention_fp8: query is ",
           type, "; give fp32, bf16 or fp16");
  Options options{};
  options.heads_first = problem.heads_first;
  options.scale = problem.scale;
  options.causal = problem.causal;
  options.window_left = problem.window_left;
  options.window_right = problem.window_right;
  const ForwardProblem whole = problem_of(attention::Forward{.query = problem.query,
                                                             .key = problem.key,
                                                             .value = problem.value,
                                                             .options = options,
                                                             .output = problem.output,
                                                             .lse = problem.lse});
  attention::check(whole, device);
  KP_CHECK(whole.output.dtype == whole.query.dtype, "attention_fp8: output is ", whole.output.dtype, ", query is ",
           whole.query.dtype, "; they must be equal");
  KP_CHECK(whole.query.sizes[3] <= kLargestSize && whole.value.sizes[3] <= kLargestSize,
           "attention_fp8: head sizes are ", whole.query.sizes[3], " and ", whole.value.sizes[3], "; at most ",
           kLargestSize, " are supported, use attention");
  problem.query = whole.query;
  problem.key = whole.key;
  problem.value = whole.value;
  problem.output = whole.output;
  problem.lse = whole.lse;
  problem.scale = whole.scoring.scale;
  problem.heads_first = true;
}

int64_t size_of_rounded(const Forward& problem) {
  const auto size = static_cast<int>(problem.query.sizes[3]);
  return problem.rotate && size > 0 ? rotated_columns(size) : size;
}

double scale_of(const Forward& problem) {
  if (!problem.rotate || problem.query.sizes[3] == 0) return *problem.scale;
  const int columns = rotated_columns(static_cast<int>(problem.query.sizes[3]));
  return *problem.scale * static_cast<double>(1 << 2 * halved_exponent(columns)) / columns;
}

ForwardProblem attention_of(const Forward& problem, const TensorView& query, const TensorView& key,
                            const TensorView& value) {
  ForwardProblem whole{.query = query, .key = key, .value = value};
  whole.scoring.scale = scale_of(problem);
  whole.scoring.causal = problem.causal;
  whole.scoring.window_left = problem.window_left;
  whole.scoring.window_right = problem.window_right;
  whole.output = problem.output;
  whole.lse = problem.lse;
  return whole;
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

}  // namespace kernel_pytorch::attention::fp8
