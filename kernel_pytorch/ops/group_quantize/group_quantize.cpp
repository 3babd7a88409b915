#include "kernel_pytorch/ops/group_quantize/group_quantize.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/group_quantize/operation.h"
#include "kernel_pytorch/ops/support/group_format/check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::group_quantize {

void check(const Quantize& problem, Device device) {
  const GroupFormatCheck check{"group_quantize", device, problem.format, problem.group};
  check.check_float_matrix("x", problem.x);
  check.check_matrix(problem.codes, problem.scales, problem.zeros, problem.tensor_scale, problem.x.sizes[0],
                     problem.x.sizes[1]);
  KP_CHECK(problem.scales.dtype == scale_type_of(problem.format, problem.x.dtype), "group_quantize: scales are ",
           problem.scales.dtype, ", x is ", problem.x.dtype, "; scales of integers have x's type");
  if (!problem.seed.is_present()) return;
  check.check_device("seed", problem.seed);
  KP_CHECK(problem.seed.dtype == DType::kInt64 && problem.seed.rank == 1 && problem.seed.sizes[0] == 2 &&
               problem.seed.strides[0] == 1,
           "group_quantize: seed is ", problem.seed, "; it must be int64[2], the seed and the offset");
}

void check(const Dequantize& problem, Device device) {
  const GroupFormatCheck check{"group_dequantize", device, problem.format, problem.group};
  check.check_output_matrix(problem.output);
  check.check_matrix(problem.codes, problem.scales, problem.zeros, problem.tensor_scale, problem.output.sizes[0],
                     problem.output.sizes[1]);
}

void quantize(const Quantize& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kQuantize, arguments, context);
}

void dequantize(const Dequantize& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kDequantize, arguments, context);
}

}  // namespace kernel_pytorch::group_quantize
