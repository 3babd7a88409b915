// The kernels are the pointwise engine's; this is what makes a problem one of dropout.
#include "kernel_pytorch/ops/dropout/dropout.h"

#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::dropout {
namespace {

void check(pointwise::ForwardProblem& problem, Device device) {
  pointwise::check_and_merge("dropout", "x", problem, device);
}

// Options: p=NUMBER, default 0.5.
pointwise::ForwardProblem make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"p"});
  registry::ProblemRequest plain = request;
  plain.options = {{"dropout", request.options.empty() ? "0.5" : request.options.back().second}};
  return pointwise::make_forward(plain, false, "identity");
}

constexpr const char* kShapes = R"(
    fp32 bf16 fp16 fp64: 13x1,7,8,100,1024,4100 0x16 p=0,0.1,0.5,1
)";

constinit const registry::Operation<pointwise::ForwardProblem> kForward =
    pointwise::forward_operation("dropout", make, check, kShapes);

}  // namespace

void forward(const Forward& arguments, Context& context) {
  pointwise::ForwardProblem problem;
  problem.dropout = arguments.p;
  problem.gate = arguments.x;
  problem.seed = arguments.seed;
  problem.output = arguments.output;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

// Its backward is the same function of the gradient.
constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("dropout", "dropout_forward", kForwardFields),
                   registry::plain<Forward, forward>("dropout_backward", kForwardFields, {.renamed = "x=grad_output"}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward>};

}  // namespace kernel_pytorch::dropout
