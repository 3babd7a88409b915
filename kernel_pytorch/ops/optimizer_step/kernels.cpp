// The kernels of optimizer_step, best first, the reference last, and what the registry asks about a problem.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::optimizer_step {
namespace {

int64_t elements_of(const Step& problem) {
  int64_t elements = 0;
  for (const Parameter& one : problem.parameters) elements += one.parameter.element_count();
  return elements;
}

// What each parameter has besides itself, and what all share.
constexpr auto kOfEach =
    fields<Parameter>(unused<&Parameter::parameter>(), input<&Parameter::gradient>(),
                      optional_updated<&Parameter::correction>(), optional_updated<&Parameter::master>(),
                      optional_updated<&Parameter::first>(), optional_updated<&Parameter::second>(),
                      optional_updated<&Parameter::maximum>(), optional_updated<&Parameter::first_scale>(),
                      optional_updated<&Parameter::second_scale>(), updated<&Parameter::step>());
constexpr Fields kShared{.all = kStepFields.fields};

void describe(const Step& problem, tuning::KeyBuilder& key) {
  const Parameter first = problem.parameters.empty() ? Parameter() : problem.parameters.front();
  key.field("parameters", tuning::bucket(static_cast<int64_t>(problem.parameters.size())));
  key.field("elements", tuning::bucket(elements_of(problem)));
  key.field("rule", static_cast<int64_t>(problem.rule));
  key.field("storage", static_cast<int64_t>(problem.storage));
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
  using enum registry::Content;
  if (tensor.starts_with("seed")) return registry::detail::declared_filling(kShared, &problem, tensor);
  const bool is_state =
      (tensor.starts_with("first") || tensor.starts_with("second")) && tensor.find("scale") == std::string_view::npos;
  if (tensor.starts_with("correction") || (is_state && problem.storage != Storage::kPlain)) {
    return {.content = kIndices, .limit = 256};  // every code
  }
  const bool is_normal = tensor.starts_with("parameter") || tensor.starts_with("gradient") ||
                         tensor.starts_with("master") || (is_state && tensor.starts_with("first"));
  return {.content = is_normal ? kNormal : kPositive};
}

Step make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"rule", "storage", "state", "correction", "master", "amsgrad", "stochastic",
                                    "momentum", "nesterov", "scale", "clip", "skip", "lr_tensor", "maximize"});
  KP_CHECK(request.shape.size() == 2, "optimizer_step: the shape is ", shape_text(request.shape),
           "; it must be [parameters, average elements]");
  const auto flag = [&](std::string_view name, bool usual = false) {
    return registry::flag_option(request, name, usual);
  };
  Step problem;
  registry::make_options(kShared, request, &problem);
  const bool has_scales = problem.storage != Storage::kPlain, has_second = problem.rule == Rule::kAdamW;
  const bool has_first = problem.rule != Rule::kSgd || flag("momentum", true);
  const int64_t group = group_elements(problem.storage);
  const auto view = [&](DType dtype, int64_t size, bool wanted = true) {
    return wanted ? contiguous_view(nullptr, dtype, {size}, request.device) : TensorView();
  };
  const TensorView scalar = contiguous_view(nullptr, DType::kFloat32, {}, request.device);
  const DType plain = registry::dtype_option(request, "state", statistic_type(request.dtype));
  const DType state = has_scales ? DType::kInt8 : plain;
  for (int64_t size : uneven_sizes(request.shape[0], request.shape[1])) {
    const int64_t groups = (size + group - 1) / group;
    problem.parameters.push_back({.parameter = view(request.dtype, size),
                                  .gradient = view(request.dtype, size),
                                  .correction = view(DType::kInt8, size, flag("correction")),
                                  .master = view(DType::kFloat32, size, flag("master")),
                                  .first = view(state, size, has_first),
                                  .second = view(state, size, has_second),
                                  .maximum = view(state, size, flag("amsgrad")),
                                  .first_scale = view(DType::kFloat32, groups, has_first && has_scales),
                                  .second_scale = view(DType::kFloat32, groups, has_second && has_scales),
                                  .step = scalar});
  }
  problem.max_norm = flag("clip") ? 0.7 : 0;
  if (flag("lr_tensor")) problem.lr_tensor = scalar;
  if (flag("scale")) problem.grad_scale = scalar;
  if (flag("skip")) problem.found_inf = scalar;
  if (flag("clip")) problem.total_norm = scalar;
  if (flag("stochastic")) problem.seed = view(DType::kInt64, 2);
  return problem;
}

Step shrink(const Step& problem, int64_t elements) {
  Step small = problem;
  const int64_t group = group_elements(problem.storage);
  const int64_t most =
      std::max<int64_t>(elements / std::max<int64_t>(static_cast<int64_t>(small.parameters.size()), 1), 1);
  for (Parameter& one : small.parameters) {
    const int64_t count = std::min(most, one.parameter.element_count());
    const auto cut = [](TensorView& view, int64_t to) {
      if (view.is_present()) view = contiguous_view(view.data, view.dtype, {to}, view.device);
    };
    for (TensorView* view :
         {&one.parameter, &one.gradient, &one.correction, &one.master, &one.first, &one.second, &one.maximum}) {
      cut(*view, count);
    }
    for (TensorView* view : {&one.first_scale, &one.second_scale}) cut(*view, (count + group - 1) / group);
  }
  return small;
}

registry::Cost cost(const Step& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 20 * elements_of(problem)};
}

// Lists that a step is tested and measured on: [parameters, average elements].
constexpr const char* kShapes = R"(
  bf16: 1x1 1x0 3x7 7x5000 900x20 3x40001 storage=companded correction=1; storage=dynamic,plain correction=0
    5x3001 rule=adamw,lion,sgd storage=companded,dynamic,plain correction=1 scale=1 clip=1
  fp32 bf16 fp16: 5x3001 rule=adamw,lion,sgd storage=companded,dynamic,plain
  fp32: rule=adamw,lion,sgd storage=companded,dynamic,plain lr_tensor=1 maximize=1
    rule=adamw,lion,sgd storage=companded,dynamic,plain skip=1
    rule=sgd storage=companded,dynamic,plain nesterov=1; rule=sgd momentum=0
  fp32: 1x1 1x0 3x7 1x4096 900x20 3x70001; fp32 bf16 fp16: 5x3001 amsgrad=1; amsgrad=1 scale=1 clip=1
  fp32 bf16: 5x3001 state=bf16; state=bf16 stochastic=1 amsgrad=1; fp16: state=fp16
  bf16 fp16: 7x5000 master=1; 5x3001 master=1 amsgrad=1 scale=1; bf16: stochastic=1; master=1 state=bf16
  fp64: 5x301 rule=adamw,lion,sgd; amsgrad=1 clip=1
)";

}  // namespace

constinit const registry::Operation<Step> kStep{.name = "optimizer_step",
                                                .kernels = registry::kernel_list<kSm90, kCuda, kCpu, kReference>,
                                                .describe = describe,
                                                .visit_tensors = visit_tensors,
                                                .filling = filling,
                                                .make = make,
                                                .check = registry::check_only<Step, check>,
                                                .shrink = shrink,
                                                .cost = cost,
                                                .shapes = kShapes};

constexpr auto kDeclarations =
    registry::join(registry::plain<StepLists, step_lists>("optimizer_step_", kStepListsFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kStep>};

}  // namespace kernel_pytorch::optimizer_step
