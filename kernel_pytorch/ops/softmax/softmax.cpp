#include "kernel_pytorch/ops/softmax/softmax.h"

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::softmax {
namespace {

void check_scale(std::string_view op, double scale) {
  KP_CHECK(std::isfinite(scale), op, ": scale is ", scale, "; it must be finite");
}

void check_mask(std::string_view op, const ArgumentCheck& check, const TensorView& mask) {
  if (!mask.is_present()) return;
  check.check_device("mask", mask);
  const DType x_type = check.main.dtype;
  const bool is_wider = mask.dtype == DType::kFloat32 && x_type != DType::kFloat64;
  KP_CHECK(mask.dtype == DType::kBool || mask.dtype == x_type || is_wider, op, ": mask is ", mask.dtype, ", x is ",
           x_type, "; it must be bool (true keeps) or ", type_or_wider(x_type));
  KP_CHECK(std::ranges::equal(mask.shape(), check.main.shape()), op, ": mask has shape ", shape_text(mask.shape()),
           ", x has ", shape_text(check.main.shape()), "; expand it to that shape (strides may be 0)");
}

// A tensor that is written may share memory with one that is read only where each element lies on itself.
void check_overlap(std::string_view op, std::string_view name, const TensorView& read, const TensorView& written) {
  KP_CHECK(!read.is_present() || read.data != written.data || read.element_count() == 0 || is_contiguous(read), op,
           ": ", name, " is also written and has strides ",
           shape_text({read.strides.data(), static_cast<size_t>(read.rank)}), "; in place it must be contiguous");
}

}  // namespace

void check(Forward& problem, Device device) {
  const Forward arguments = problem;
  const std::string_view op = arguments.log ? "log_softmax" : "softmax";
  const ArgumentCheck check{op, "x", arguments.x, device};
  check.check_main();
  check_scale(op, arguments.scale);
  check_mask(op, check, arguments.mask);
  KP_CHECK(arguments.output.is_present(), op, ": output is missing");
  check.check_output("output", arguments.output);
  check_overlap(op, "x", arguments.x, arguments.output);
  KP_CHECK(!arguments.causal || arguments.x.rank >= 2, op,
           ": causal needs a dimension of queries before the columns; x has shape ", shape_text(arguments.x.shape()));
  problem.queries = arguments.x.rank >= 2 ? arguments.x.size(-2) : 1;
  TensorView* views[] = {&problem.x, &problem.output};
  merge_leading_dimensions(views);
  TensorView* masks[] = {&problem.mask};
  if (problem.mask.is_present()) merge_leading_dimensions(masks);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void check(Backward& problem, Device device) {
  const Backward arguments = problem;
  const std::string_view op = arguments.log ? "log_softmax backward" : "softmax backward";
  const ArgumentCheck check{op, "output", arguments.output, device};
  check.check_main();
  check_scale(op, arguments.scale);
  KP_CHECK(arguments.grad_output.is_present(), op, ": grad_output is missing");
  check.check_like("grad_output", arguments.grad_output);
  KP_CHECK(arguments.grad_input.is_present(), op, ": grad_input is missing");
  check.check_output("grad_input", arguments.grad_input);
  check_overlap(op, "grad_output", arguments.grad_output, arguments.grad_input);
  check_overlap(op, "output", arguments.output, arguments.grad_input);
  TensorView* views[] = {&problem.output, &problem.grad_output, &problem.grad_input};
  merge_leading_dimensions(views);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::softmax
