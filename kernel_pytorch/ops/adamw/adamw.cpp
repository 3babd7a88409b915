#include "kernel_pytorch/ops/adamw/adamw.h"

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::adamw {
namespace {

class Checks {
 public:
  Checks(const Step& step, Device device) : step_(step), first_(step.parameters.front()), device_(device) {}

  void check_types() const {
    const DType type = first_.parameter.dtype, average = first_.exp_avg.dtype;
    const bool is_known = type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16 ||
                          (type == DType::kFloat64 && device_.kind == DeviceKind::kCpu);
    KP_CHECK(is_known, "adamw: parameters are ", type, " on ", device_,
             "; fp32, bf16 and fp16 are supported, and fp64 on the CPU");
    const bool is_small = type != DType::kFloat64;
    KP_CHECK(average == type || (is_small && (average == DType::kFloat32 || average == DType::kBFloat16)),
             "adamw: averages are ", average, ", parameters ", type,
             "; averages may have the parameters' type, fp32 or bf16 (fp64 parameters: fp64)");
    KP_CHECK(!(type == DType::kFloat16 && average == DType::kBFloat16),
             "adamw: averages are bf16, parameters fp16; keep the averages in fp32 or fp16");
    KP_CHECK(!first_.master.is_present() || type == DType::kBFloat16 || type == DType::kFloat16,
             "adamw: a master copy is for bf16 and fp16 parameters, these are ", type, "; leave it out");
    KP_CHECK(!step_.seed.is_present() || (type == DType::kBFloat16 || average == DType::kBFloat16),
             "adamw: stochastic rounding is for bf16, parameters are ", type, " and averages ", average,
             "; leave the seed out");
  }

  void check_parameter(size_t index) const {
    const Parameter& one = step_.parameters[index];
    const DType type = first_.parameter.dtype, average = first_.exp_avg.dtype;
    check_tensor(index, "parameter", one.parameter, type, one, true);
    KP_CHECK(is_dense(one.parameter), "adamw: parameter ", index, " has shape ", shape_text(one.parameter.shape()),
             " and strides ", strides_text(one.parameter), ", which leave gaps or overlap; make it contiguous");
    check_tensor(index, "gradient", one.gradient, type, one, true);
    check_tensor(index, "exp_avg", one.exp_avg, average, one, true);
    check_tensor(index, "exp_avg_sq", one.exp_avg_sq, average, one, true);
    check_tensor(index, "max_exp_avg_sq", one.max_exp_avg_sq, average, one, first_.max_exp_avg_sq.is_present());
    check_tensor(index, "master", one.master, DType::kFloat32, one, first_.master.is_present());
    check_scalar("step", one.step);
    KP_CHECK(one.step.is_present(), "adamw: step of parameter ", index, " is missing");
  }

  void check_scalar(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    KP_CHECK(view.element_count() == 1 && view.dtype == DType::kFloat32, "adamw: ", name, " is ", view.dtype, " with ",
             view.element_count(), " elements; it must be one fp32");
  }

  void check_seed() const {
    const TensorView& seed = step_.seed;
    if (!seed.is_present()) return;
    check_device("seed", seed);
    KP_CHECK(seed.dtype == DType::kInt64 && seed.element_count() == 2 && is_contiguous(seed), "adamw: seed is ", seed,
             "; it must be a contiguous int64[2], seed and offset");
  }

 private:
  static std::string strides_text(const TensorView& view) {
    return shape_text({view.strides.data(), static_cast<size_t>(view.rank)});
  }
  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.device == device_, "adamw: ", name, " is on ", view.device, ", the call runs on ", device_,
             "; move it there, or step each device's parameters by themselves");
  }
  void check_tensor(size_t index, std::string_view name, const TensorView& view, DType wanted, const Parameter& one,
                    bool is_wanted) const {
    KP_CHECK(view.is_present() == is_wanted, "adamw: ", name, " of parameter ", index,
             is_wanted ? " is missing" : " is present, that of parameter 0 is not", "; give all of a list or none");
    if (!is_wanted) return;
    check_device(name, view);
    KP_CHECK(view.dtype == wanted, "adamw: ", name, " of parameter ", index, " is ", view.dtype, "; it must be ",
             wanted, ", as of parameter 0");
    KP_CHECK(has_layout_of(view, one.parameter), "adamw: ", name, " of parameter ", index, " has shape ",
             shape_text(view.shape()), " and strides ", strides_text(view), ", the parameter has ",
             shape_text(one.parameter.shape()), " and ", strides_text(one.parameter), "; they must agree");
  }

  const Step& step_;
  const Parameter& first_;
  Device device_;
};

}  // namespace

void step_lists(const StepLists& lists, Context& context) {
  Step arguments = lists.step;
  const size_t count = lists.parameters.size();
  arguments.parameters.clear();
  arguments.parameters.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto entry = [&](std::string_view name, const std::vector<TensorView>& views) {
      return entry_of("adamw", name, views, i, count);
    };
    arguments.parameters.push_back({.parameter = lists.parameters[i],
                                    .gradient = entry("gradients", lists.gradients),
                                    .exp_avg = entry("exp_avgs", lists.exp_avgs),
                                    .exp_avg_sq = entry("exp_avg_sqs", lists.exp_avg_sqs),
                                    .max_exp_avg_sq = entry("max_exp_avg_sqs", lists.max_exp_avg_sqs),
                                    .master = entry("masters", lists.masters),
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
  KP_CHECK(is_rate(arguments.beta1) && is_rate(arguments.beta2), "adamw: betas are ", arguments.beta1, " and ",
           arguments.beta2, "; each must be at least 0 and below 1");
  KP_CHECK(!arguments.total_norm.is_present() || arguments.max_norm > 0, "adamw: max_norm is ", arguments.max_norm,
           "; with total_norm it must be positive");
}

void step(const Step& arguments, Context& context) {
  if (arguments.parameters.empty()) return;
  check(arguments, context.device());
  registry::run_best(kStep, arguments, context);
}

}  // namespace kernel_pytorch::adamw
