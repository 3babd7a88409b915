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

void describe(const Step& problem, tuning::KeyBuilder& key) {
  const Parameter first = problem.parameters.empty() ? Parameter() : problem.parameters.front();
  key.field("parameters", tuning::bucket(static_cast<int64_t>(problem.parameters.size())));
  key.field("elements", tuning::bucket(elements_of(problem)));
  key.field("dtype", first.parameter.dtype);
  key.field("gradient", first.gradient);
  key.field("exp_avg", first.exp_avg);
  key.field("exp_avg_sq", first.exp_avg_sq);
  key.field("max_exp_avg_sq", first.max_exp_avg_sq);
  key.field("master", first.master);
  key.field("step", first.step);
  key.field("seed", problem.seed);
  key.field("lr_tensor", problem.lr_tensor);
  key.field("grad_scale", problem.grad_scale);
  key.field("found_inf", problem.found_inf);
  key.field("total_norm", problem.total_norm);
}

void visit_tensors(Step& problem, registry::TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
  using enum registry::Role;
  for (size_t i = 0; i < problem.parameters.size(); ++i) {
    Parameter& one = problem.parameters[i];
    call(concat("parameter", i), one.master.is_present() ? kOutput : kUpdated, one.parameter);
    call(concat("gradient", i), kInput, one.gradient);
    call(concat("exp_avg", i), kUpdated, one.exp_avg);
    call(concat("exp_avg_sq", i), kUpdated, one.exp_avg_sq);
    call(concat("max_exp_avg_sq", i), kUpdated, one.max_exp_avg_sq);
    call(concat("master", i), kUpdated, one.master);
    call(concat("step", i), kUpdated, one.step);
  }
  call("lr_tensor", kInput, problem.lr_tensor);
  call("grad_scale", kInput, problem.grad_scale);
  call("found_inf", kInput, problem.found_inf);
  call("total_norm", kInput, problem.total_norm);
  call("seed", kInput, problem.seed);
}

registry::Filling filling(const Step&, std::string_view tensor) {
  using enum registry::Content;
  if (tensor == "seed") return {.content = kSeeds};
  const bool is_normal = tensor.starts_with("parameter") || tensor.starts_with("gradient") ||
                         tensor.starts_with("master") ||
                         (tensor.starts_with("exp_avg") && !tensor.starts_with("exp_avg_sq"));
  return {.content = is_normal ? kNormal : kPositive};
}

Step make(const registry::ProblemRequest& request) {
  registry::check_options(
      request, {"amsgrad", "master", "scale", "clip", "skip", "lr_tensor", "maximize", "state", "stochastic"});
  KP_CHECK(request.shape.size() == 2, "adamw: the shape is ", shape_text(request.shape),
           "; it must be [parameters, average elements]");
  const auto flag = [&](std::string_view name) { return registry::flag_option(request, name, false); };
  const DType fallback = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const DType state = registry::dtype_option(request, "state", fallback);
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
  problem.maximize = flag("maximize");
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
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (auto [tensors, average] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, 0}, {3, 7}, {1, 4096}, {7, 5000}, {900, 20}, {3, 70001}}) {
      add({tensors, average}, dtype);
    }
    add({5, 3001}, dtype, {{"amsgrad", "1"}});
    add({5, 3001}, dtype, {{"scale", "1"}, {"clip", "1"}});
    add({5, 3001}, dtype, {{"skip", "1"}});
    add({5, 3001}, dtype, {{"lr_tensor", "1"}, {"maximize", "1"}});
    if (dtype == DType::kFloat16) {
      add({5, 3001}, dtype, {{"state", "fp16"}});
      continue;
    }
    add({5, 3001}, dtype, {{"state", "bf16"}});
    add({5, 3001}, dtype, {{"state", "bf16"}, {"stochastic", "1"}, {"amsgrad", "1"}});
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    add({7, 5000}, dtype, {{"master", "1"}});
    add({5, 3001}, dtype, {{"master", "1"}, {"amsgrad", "1"}, {"scale", "1"}});
  }
  add({5, 3001}, DType::kBFloat16, {{"stochastic", "1"}});
  add({5, 3001}, DType::kBFloat16, {{"master", "1"}, {"state", "bf16"}});
  add({5, 301}, DType::kFloat64);
  add({5, 301}, DType::kFloat64, {{"amsgrad", "1"}, {"clip", "1"}});
  return std::move(add.all);
}

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
                                                .shapes = shapes};

constexpr auto kDeclarations = registry::join(registry::plain<StepLists, step_lists>("adamw_", kStepListsFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kStep>};

}  // namespace kernel_pytorch::adamw
