// The kernels of adamw, best first, the reference last, and what the registry asks about a problem.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::adamw {
namespace {

int64_t elements_of(const Step& problem) {
  int64_t elements = 0;
  for (const Parameter& one : problem.parameters) elements += one.parameter.element_count();
  return elements;
}

// What each parameter has besides itself, and what all share.
constexpr auto kOfEach =
    fields<Parameter>(unused<&Parameter::parameter>(), input<&Parameter::gradient>(), updated<&Parameter::exp_avg>(),
                      updated<&Parameter::exp_avg_sq>({.content = "positive"}),
                      optional_updated<&Parameter::max_exp_avg_sq>({.content = "positive"}),
                      optional_updated<&Parameter::master>(), updated<&Parameter::step>({.content = "positive"}));
constexpr Fields kShared{.all = kStepFields.fields};

void describe(const Step& problem, tuning::KeyBuilder& key) {
  const Parameter first = problem.parameters.empty() ? Parameter() : problem.parameters.front();
  key.field("parameters", tuning::bucket(static_cast<int64_t>(problem.parameters.size())));
  key.field("elements", tuning::bucket(elements_of(problem)));
  key.field("dtype", first.parameter.dtype);
  registry::describe_fields(kOfEach, &first, key);
  registry::describe_fields(kShared, &problem, key);
}

void visit_tensors(Step& problem, registry::TensorVisitor visit, void* state) {
  using enum registry::Role;
  for (Parameter& one : problem.parameters) {
    visit(state, "parameter", one.master.is_present() ? kOutput : kUpdated, one.parameter);
    registry::visit_fields(kOfEach, &one, visit, state);
  }
  registry::visit_fields(kShared, &problem, visit, state);
}

registry::Filling filling(const Step& problem, std::string_view tensor) {
  return registry::detail::declared_filling(Fields(kOfEach).find(tensor) != nullptr ? kOfEach : kShared, &problem,
                                            tensor);
}

Step make(const registry::ProblemRequest& request) {
  registry::check_options(
      request, {"amsgrad", "master", "scale", "clip", "skip", "lr_tensor", "maximize", "state", "stochastic"});
  KP_CHECK(request.shape.size() == 2, "adamw: the shape is ", shape_text(request.shape),
           "; it must be [parameters, average elements]");
  const auto flag = [&](std::string_view name) { return registry::flag_option(request, name, false); };
  const DType state = registry::dtype_option(request, "state", statistic_type(request.dtype));
  const TensorView absent, scalar = contiguous_view(nullptr, DType::kFloat32, {}, request.device);
  Step problem;
  for (int64_t size : uneven_sizes(request.shape[0], request.shape[1])) {
    const TensorView parameter = contiguous_view(nullptr, request.dtype, {size}, request.device);
    const TensorView average = contiguous_view(nullptr, state, {size}, request.device);
    problem.parameters.push_back(
        {.parameter = parameter,
         .gradient = parameter,
         .exp_avg = average,
         .exp_avg_sq = average,
         .max_exp_avg_sq = flag("amsgrad") ? average : absent,
         .master = flag("master") ? contiguous_view(nullptr, DType::kFloat32, {size}, request.device) : absent,
         .step = scalar});
  }
  registry::make_options(kShared, request, &problem);
  problem.max_norm = flag("clip") ? 0.7 : 0;
  if (flag("lr_tensor")) problem.lr_tensor = scalar;
  if (flag("scale")) problem.grad_scale = scalar;
  if (flag("skip")) problem.found_inf = scalar;
  if (flag("clip")) problem.total_norm = scalar;
  if (flag("stochastic")) problem.seed = contiguous_view(nullptr, DType::kInt64, {2}, request.device);
  return problem;
}

Step shrink(const Step& problem, int64_t elements) {
  Step small = problem;
  const int64_t most =
      std::max<int64_t>(elements / std::max<int64_t>(static_cast<int64_t>(small.parameters.size()), 1), 1);
  for (Parameter& one : small.parameters) {
    for (TensorView* view :
         {&one.parameter, &one.gradient, &one.exp_avg, &one.exp_avg_sq, &one.max_exp_avg_sq, &one.master}) {
      if (!view->is_present()) continue;
      *view = contiguous_view(view->data, view->dtype, {std::min(most, view->element_count())}, view->device);
    }
  }
  return small;
}

registry::Cost cost(const Step& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 14 * elements_of(problem)};
}

// Lists that a step is tested and measured on: [parameters, average elements].
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x1 1x0 3x7 1x4096 7x5000 900x20 3x70001; 5x3001 amsgrad=1; scale=1 clip=1; skip=1
    lr_tensor=1 maximize=1; fp32 bf16: 5x3001 state=bf16; state=bf16 stochastic=1 amsgrad=1
    fp16: 5x3001 state=fp16; bf16 fp16: 7x5000 master=1; 5x3001 master=1 amsgrad=1 scale=1
    bf16: 5x3001 stochastic=1; master=1 state=bf16; fp64: 5x301; amsgrad=1 clip=1
)";

}  // namespace

constinit const registry::Operation<Step> kStep{.name = "adamw",
                                                .kernels = registry::kernel_list<kCuda, kCpu, kReference>,
                                                .describe = describe,
                                                .visit_tensors = visit_tensors,
                                                .filling = filling,
                                                .make = make,
                                                .check = registry::check_only<Step, check>,
                                                .shrink = shrink,
                                                .cost = cost,
                                                .shapes = kShapes};

constexpr auto kDeclarations = registry::join(registry::plain<StepLists, step_lists>("adamw_", kStepListsFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kStep>};

}  // namespace kernel_pytorch::adamw
