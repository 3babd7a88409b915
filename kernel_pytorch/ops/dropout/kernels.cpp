// The kernels of dropout are the pointwise engine's, with the identity for a function.
#include "kernel_pytorch/ops/dropout/dropout.h"
#include "kernel_pytorch/ops/dropout/operation.h"
#include "kernel_pytorch/ops/engines/pointwise/operation.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::dropout {
namespace {

// Options: p=NUMBER, default 0.5.
pointwise::ForwardProblem make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"p"});
  registry::ProblemRequest plain = request;
  plain.options = {{"dropout", "0.5"}};
  for (const auto& [name, value] : request.options) plain.options = {{"dropout", value}};
  return pointwise::make_forward(plain, false, "identity");
}

std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const char* p : {"0", "0.1", "0.5", "1"}) {
      for (int64_t columns : {1, 7, 8, 100, 1024, 4100}) add({13, columns}, dtype, {{"p", p}});
      add({0, 16}, dtype, {{"p", p}});
    }
  }
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<pointwise::ForwardProblem> kForward =
    pointwise::forward_operation("dropout", make, check, shapes);

// Its backward is the same function of the gradient.
constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("dropout", "dropout_forward", kForwardFields),
                   registry::plain<Forward, forward>("dropout_backward", kForwardFields, {.renamed = "x=grad_output"}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward>};

}  // namespace kernel_pytorch::dropout
