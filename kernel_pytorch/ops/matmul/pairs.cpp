// The gradient of a gated product's pairs as an op of its own: its checks, what the registry asks about its problems,
// and the reference.
#include <algorithm>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr std::string_view kOp = "gated_pairs_backward";

int64_t flops(const PairGradient& problem) {
  return 8 * problem.saved.element_count();
}

constexpr const char* kPairShapes = R"(
  fp32 bf16 fp16: 13x1,7,8,33,256,1030 activation=silu,gelu,gelu_tanh,relu,sigmoid,identity; 0x8
  fp64: 5x9
)";

void run_reference(const PairGradient& problem, int, Context&) {
  const DType dtype = problem.saved.dtype;
  for (int64_t i = 0; i < problem.saved.sizes[0]; ++i) {
    const int64_t row = i * problem.saved.strides[0], grad_row = i * problem.grad_input.strides[0];
    for (int64_t j = 0; j < problem.grad_output.sizes[1]; ++j) {
      const double gradient = load_element(problem.grad_output.data, dtype, i * problem.grad_output.strides[0] + j);
      const auto gate = pointwise::evaluate(problem.activation, load_element(problem.saved.data, dtype, row + 2 * j));
      const double up = load_element(problem.saved.data, dtype, row + 2 * j + 1);
      store_element(problem.grad_input.data, dtype, grad_row + 2 * j, gradient * up * gate.derivative);
      store_element(problem.grad_input.data, dtype, grad_row + 2 * j + 1, gradient * gate.value);
    }
  }
}

uint64_t pair_code_version() {
  return hash_text("gated pairs reference 1");
}

}  // namespace

void check(PairGradient& problem, Device device) {
  const PairGradient& arguments = problem;
  const TensorView &saved = arguments.saved, &grad_output = arguments.grad_output;
  KP_CHECK(saved.rank == 2 && grad_output.rank == 2 && arguments.grad_input.rank == 2, kOp,
           ": grad_output, saved and grad_input are ", grad_output, ", ", saved, ", ", arguments.grad_input,
           "; they must have two dimensions");
  for (const TensorView* view : {&grad_output, &saved, &arguments.grad_input}) {
    KP_CHECK(view->device == device, kOp, ": a tensor is on ", view->device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view->dtype == saved.dtype, kOp, ": saved is ", saved.dtype, ", another tensor is ", view->dtype,
             "; convert one of them");
    KP_CHECK(view->sizes[1] <= 1 || view->strides[1] == 1, kOp, ": a tensor is ", *view, "; its last stride must be 1");
    const int64_t columns = view == &grad_output ? 2 * view->sizes[1] : view->sizes[1];
    KP_CHECK(view->sizes[0] == saved.sizes[0] && columns == saved.sizes[1], kOp, ": saved has shape ",
             shape_text(saved.shape()), ", another tensor is ", *view, "; rows are equal, grad_output's columns half");
  }
  KP_CHECK(saved.dtype == DType::kFloat32 || saved.dtype == DType::kBFloat16 || saved.dtype == DType::kFloat16 ||
               saved.dtype == DType::kFloat64,
           kOp, ": saved is ", saved.dtype, "; convert it to fp32, bf16, fp16 or fp64");
}

void pair_gradient(const PairGradient& arguments, Context& context) {
  PairGradient problem = arguments;
  check(problem, context.device());
  registry::run_best(kPairGradient, problem, context);
}

constinit const registry::Operation<PairGradient> kPairGradient = registry::declared<PairGradient, kPairFields, flops>(
    {.name = kOp,
     .kernels = registry::kernel_list<kPairCuda, kPairCpu, kPairReference>,
     .check = check,
     .shapes = kPairShapes});
constinit const registry::Kernel<PairGradient> kPairReference{.name = "reference",
                                                              .supports = supports_on_cpu<PairGradient>,
                                                              .run = run_reference,
                                                              .source_hash = pair_code_version};

}  // namespace kernel_pytorch::matmul
