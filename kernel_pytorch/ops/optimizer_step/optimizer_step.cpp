#include "kernel_pytorch/ops/optimizer_step/optimizer_step.h"

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::optimizer_step {
namespace {

class Checks {
 public:
  Checks(const Step& step, Device device) : step_(step), first_(step.parameters.front()), device_(device) {}

  void check_types() const {
    const DType type = first_.parameter.dtype;
    const bool is_double = type == DType::kFloat64 && device_.kind == DeviceKind::kCpu && is_plain();
    KP_CHECK(type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16 || is_double,
             "optimizer_step: parameters are ", type, " on ", device_,
             "; fp32, bf16 and fp16 are supported, and fp64 on the CPU with plain states");
    KP_CHECK(!first_.correction.is_present() || type == DType::kBFloat16,
             "optimizer_step: a correction is for bf16 parameters, these are ", type, "; leave it out");
    if (is_plain()) check_state_type();
    const bool may_keep_more = is_plain() && step_.rule == Rule::kAdamW;
    KP_CHECK(may_keep_more || !(first_.master.is_present() || first_.maximum.is_present() || step_.seed.is_present()),
             "optimizer_step: masters, maxima and seeds are for adamw with plain states; leave them out");
    KP_CHECK(!first_.master.is_present() || type == DType::kBFloat16 || type == DType::kFloat16,
             "optimizer_step: a master is for bf16 and fp16 parameters, these are ", type, "; leave it out");
    KP_CHECK(!first_.correction.is_present() || !(first_.master.is_present() || step_.seed.is_present()),
             "optimizer_step: a correction goes with neither master nor seed; leave one out");
    KP_CHECK(!step_.seed.is_present() || type == DType::kBFloat16 || first_.first.dtype == DType::kBFloat16,
             "optimizer_step: stochastic rounding is for bf16, parameters are ", type, " and states ",
             first_.first.dtype, "; leave the seed out");
    KP_CHECK(step_.rule == Rule::kSgd || !step_.nesterov, "optimizer_step: nesterov is for sgd alone");
    KP_CHECK(first_.first.is_present() || step_.rule == Rule::kSgd,
             "optimizer_step: first of parameter 0 is missing; sgd alone goes without");
    KP_CHECK(first_.first.is_present() || (step_.storage == Storage::kPlain && !step_.nesterov),
             "optimizer_step: sgd without momentum has plain storage and no nesterov");
  }
  // Of plain states: which types go with the parameters'.
  void check_state_type() const {
    if (!first_.first.is_present()) return;
    const DType type = first_.parameter.dtype, state = first_.first.dtype;
    const DType usual = type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const bool may_be_narrow = step_.rule == Rule::kAdamW && !first_.correction.is_present() &&
                               (state == type || (state == DType::kBFloat16 && type == DType::kFloat32));
    KP_CHECK(state == usual || may_be_narrow, "optimizer_step: states are ", state, ", parameters ", type,
             "; plain states may be ", usual,
             ", and of adamw without a correction the parameters' type, or bf16 beside fp32");
  }

  void check_parameter(size_t index) const {
    const Parameter& one = step_.parameters[index];
    const DType state = is_plain() ? first_.first.dtype : DType::kInt8;
    const bool has_first = first_.first.is_present(), has_second = step_.rule == Rule::kAdamW;
    const bool has_scales = !is_plain();
    check_tensor(index, "parameter", one.parameter, first_.parameter.dtype, one, true);
    KP_CHECK(is_dense(one.parameter), "optimizer_step: parameter ", index, " has shape ",
             shape_text(one.parameter.shape()), " and strides ", strides_text(one.parameter),
             ", which leave gaps or overlap; make it contiguous");
    check_tensor(index, "gradient", one.gradient, first_.parameter.dtype, one, true);
    check_tensor(index, "correction", one.correction, DType::kInt8, one, first_.correction.is_present());
    check_tensor(index, "master", one.master, DType::kFloat32, one, first_.master.is_present());
    check_tensor(index, "first", one.first, state, one, has_first);
    check_tensor(index, "second", one.second, state, one, has_second);
    check_tensor(index, "maximum", one.maximum, state, one, first_.maximum.is_present());
    check_scale(index, "first_scale", one.first_scale, one, has_first && has_scales);
    check_scale(index, "second_scale", one.second_scale, one, has_second && has_scales);
    KP_CHECK(one.step.is_present(), "optimizer_step: step of parameter ", index, " is missing");
    check_scalar("step", one.step);
  }

  void check_scalar(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    KP_CHECK(view.element_count() == 1 && view.dtype == DType::kFloat32, "optimizer_step: ", name, " is ", view.dtype,
             " with ", view.element_count(), " elements; it must be one fp32");
  }

  void check_seed() const {
    const TensorView& seed = step_.seed;
    if (!seed.is_present()) return;
    check_device("seed", seed);
    KP_CHECK(seed.dtype == DType::kInt64 && seed.element_count() == 2 && is_contiguous(seed),
             "optimizer_step: seed is ", seed, "; it must be a contiguous int64[2], seed and offset");
  }

 private:
  bool is_plain() const { return step_.storage == Storage::kPlain; }
  static std::string strides_text(const TensorView& view) {
    return shape_text({view.strides.data(), static_cast<size_t>(view.rank)});
  }
  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.device == device_, "optimizer_step: ", name, " is on ", view.device, ", the call runs on ", device_,
             "; move it there, or step each device's parameters by themselves");
  }
  void check_presence(size_t index, std::string_view name, const TensorView& view, bool is_wanted) const {
    KP_CHECK(view.is_present() == is_wanted, "optimizer_step: ", name, " of parameter ", index,
             is_wanted ? " is missing" : " is present", "; the rule, the storage and parameter 0 want it ",
             is_wanted ? "given" : "left out");
  }
  void check_tensor(size_t index, std::string_view name, const TensorView& view, DType wanted, const Parameter& one,
                    bool is_wanted) const {
    check_presence(index, name, view, is_wanted);
    if (!is_wanted) return;
    check_device(name, view);
    KP_CHECK(view.dtype == wanted, "optimizer_step: ", name, " of parameter ", index, " is ", view.dtype,
             "; it must be ", wanted);
    KP_CHECK(has_layout_of(view, one.parameter), "optimizer_step: ", name, " of parameter ", index, " has shape ",
             shape_text(view.shape()), " and strides ", strides_text(view), ", the parameter has ",
             shape_text(one.parameter.shape()), " and ", strides_text(one.parameter), "; they must agree");
  }
  void check_scale(size_t index, std::string_view name, const TensorView& view, const Parameter& one,
                   bool is_wanted) const {
    check_presence(index, name, view, is_wanted);
    if (!is_wanted) return;
    check_device(name, view);
    const int64_t group = group_elements(step_.storage), groups = (one.parameter.element_count() + group - 1) / group;
    KP_CHECK(view.dtype == DType::kFloat32 && is_contiguous(view) && view.element_count() == groups,
             "optimizer_step: ", name, " of parameter ", index, " is ", view, "; it must be ", groups,
             " contiguous fp32, one for ", group, " elements");
  }

  const Step& step_;
  const Parameter& first_;
  Device device_;
};

double signal(const TensorView& view, double absent) {
  return view.is_present() ? static_cast<double>(*view.as<const float>()) : absent;
}

}  // namespace

Rates rates_of(const Step& step) {
  return {.lr = step.lr,
          .beta1 = step.beta1,
          .beta2 = step.beta2,
          .eps = step.eps,
          .weight_decay = step.weight_decay,
          .dampening = step.dampening,
          .max_norm = step.max_norm,
          .nesterov = step.nesterov,
          .maximize = step.maximize};
}

template <class Real>
FactorsOf<Real> factors_of(const Step& step, const Parameter& one) {
  const Signals signals{.lr = signal(step.lr_tensor, step.lr),
                        .grad_scale = signal(step.grad_scale, 1),
                        .total_norm = signal(step.total_norm, 0),
                        .steps_taken = signal(one.step, 0),
                        .has_norm = step.total_norm.is_present()};
  const Rates rates = rates_of(step);
  FactorsOf<Real> factors;
  for (int part = 0; part < kFactorParts; ++part) set_factors_part(factors, part, step.rule, rates, signals);
  return factors;
}
template FactorsOf<float> factors_of<float>(const Step&, const Parameter&);
template FactorsOf<double> factors_of<double>(const Step&, const Parameter&);

std::vector<int64_t> random_starts(const Step& step) {
  std::vector<int64_t> starts;
  int64_t start = 0;
  for (const Parameter& one : step.parameters) {
    starts.push_back(start);
    start += (one.parameter.element_count() + kPhiloxElements - 1) / kPhiloxElements;
  }
  return starts;
}

bool is_skipped(const Step& step) {
  return signal(step.found_inf, 0) != 0;
}

void step_lists(const StepLists& lists, Context& context) {
  Step arguments = lists.step;
  const size_t count = lists.parameters.size();
  arguments.parameters.clear();
  arguments.parameters.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto entry = [&](std::string_view name, const std::vector<TensorView>& views) {
      return entry_of("optimizer_step", name, views, i, count);
    };
    arguments.parameters.push_back({.parameter = lists.parameters[i],
                                    .gradient = entry("gradients", lists.gradients),
                                    .correction = entry("corrections", lists.corrections),
                                    .master = entry("masters", lists.masters),
                                    .first = entry("firsts", lists.firsts),
                                    .second = entry("seconds", lists.seconds),
                                    .maximum = entry("maxima", lists.maxima),
                                    .first_scale = entry("first_scales", lists.first_scales),
                                    .second_scale = entry("second_scales", lists.second_scales),
                                    .step = entry("steps", lists.steps)});
  }
  step(arguments, context);
}

void check(const Step& arguments, Device device) {
  if (arguments.parameters.empty()) return;
  const Checks checks(arguments, device);
  checks.check_types();
  for (size_t i = 0; i < arguments.parameters.size(); ++i) checks.check_parameter(i);
  checks.check_scalar("lr_tensor", arguments.lr_tensor);
  checks.check_scalar("grad_scale", arguments.grad_scale);
  checks.check_scalar("found_inf", arguments.found_inf);
  checks.check_scalar("total_norm", arguments.total_norm);
  checks.check_seed();
  const auto is_rate = [](double beta) { return beta >= 0 && beta < 1; };
  KP_CHECK(arguments.rule == Rule::kSgd || (is_rate(arguments.beta1) && is_rate(arguments.beta2)),
           "optimizer_step: betas are ", arguments.beta1, " and ", arguments.beta2,
           "; each must be at least 0 and below 1");
  KP_CHECK(!arguments.total_norm.is_present() || arguments.max_norm > 0, "optimizer_step: max_norm is ",
           arguments.max_norm, "; with total_norm it must be positive");
}

void step(const Step& arguments, Context& context) {
  if (arguments.parameters.empty()) return;
  check(arguments, context.device());
  registry::run_best(kStep, arguments, context);
}

}  // namespace kernel_pytorch::optimizer_step
