#include "kernel_pytorch/ops/quantize/quantize.h"

#include <cmath>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::quantize {
namespace {

struct Checks {
  Device device;

  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), "quantize: ", name, " is missing");
    KP_CHECK(view.device == device, "quantize: ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }

  void check_x(const TensorView& x) const {
    check_device("x", x);
    KP_CHECK(x.dtype == DType::kFloat32 || x.dtype == DType::kBFloat16 || x.dtype == DType::kFloat16, "quantize: x is ",
             x.dtype, "; convert it to fp32, bf16 or fp16");
    KP_CHECK(x.rank == 2, "quantize: x has shape ", shape_text(x.shape()), "; it must be [rows, columns]");
  }

  void check_codes(std::string_view name, const TensorView& codes, int64_t rows, int64_t columns, DType dtype) const {
    if (!codes.is_present()) return;
    check_device(name, codes);
    KP_CHECK(codes.dtype == DType::kFloat8E4M3 || codes.dtype == DType::kFloat8E5M2, "quantize: ", name, " is ",
             codes.dtype, "; it must be e4m3 or e5m2");
    KP_CHECK(codes.dtype == dtype, "quantize: ", name, " is ", codes.dtype, ", codes are ", dtype,
             "; they must have one type");
    KP_CHECK(codes.rank == 2 && codes.sizes[0] == rows && codes.sizes[1] == columns, "quantize: ", name, " has shape ",
             shape_text(codes.shape()), "; it must be [", rows, ", ", columns, "]");
    KP_CHECK(columns <= 1 || codes.strides[1] == 1, "quantize: ", name, " has strides ",
             shape_text({codes.strides.data(), 2}), "; its last dimension must be dense");
  }

  void check_one(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    KP_CHECK(view.dtype == DType::kFloat32 && view.element_count() == 1, "quantize: ", name, " is ", view,
             "; it must be fp32 with one element");
  }

  void check_seed(const TensorView& seed) const {
    if (!seed.is_present()) return;
    check_device("seed", seed);
    KP_CHECK(seed.dtype == DType::kInt64 && seed.rank == 1 && seed.sizes[0] == 2 && seed.strides[0] == 1,
             "quantize: seed is ", seed, "; it must be int64[2], the seed and the offset");
  }

  // In the two dimensions of operation.h.
  TensorView normal_scales(std::string_view name, const TensorView& scales, Granularity granularity, int64_t rows,
                           int64_t columns) const {
    check_device(name, scales);
    KP_CHECK(scales.dtype == DType::kFloat32, "quantize: ", name, " is ", scales.dtype, "; it must be fp32");
    const auto blocks_of = [](int64_t size) { return (size + kTile - 1) / kTile; };
    const bool is_blocked = granularity == Granularity::k1x128 || granularity == Granularity::k128x128;
    const int64_t first = granularity == Granularity::kTensor    ? 1
                          : granularity == Granularity::k128x128 ? blocks_of(rows)
                                                                 : rows;
    const int64_t second = is_blocked ? blocks_of(columns) : 1;
    const bool has_two = scales.rank == 2 && scales.sizes[0] == first && scales.sizes[1] == second;
    const bool has_one = scales.rank == 1 && !is_blocked && scales.sizes[0] == first;
    const bool has_none = scales.rank == 0 && granularity == Granularity::kTensor;
    KP_CHECK(has_two || has_one || has_none, "quantize: ", name, " has shape ", shape_text(scales.shape()),
             "; it must be [", first, ", ", second, "]");
    TensorView form = scales;
    form.rank = 2;
    form.sizes = {first, second};
    form.strides = {has_none ? 1 : scales.strides[0], has_two ? scales.strides[1] : 1};
    return form;
  }
};

void check_gate(const Quantize& problem, const ArgumentCheck& check) {
  const bool is_known = problem.kind <= pointwise::Kind::kRelu || problem.kind == pointwise::Kind::kSigmoid;
  KP_CHECK(is_known, "quantize: kind is \"", pointwise::name_of(problem.kind),
           "\"; a gate is gelu, gelu_tanh, silu, relu or sigmoid");
  KP_CHECK(problem.up.is_present(), "quantize: up is missing; a gate has it");
  check.check_like("up", problem.up);
  const bool is_gradient = problem.source == Source::kGateGradient;
  KP_CHECK(is_gradient == problem.grad_output.is_present(), "quantize: grad_output is ",
           is_gradient ? "missing" : "given", "; the gradient of a gate has it, and only that");
  check.check_like("grad_output", problem.grad_output);
}

void check_norm(const Quantize& problem, const ArgumentCheck& check) {
  check.check_like("residual", problem.residual);
  check.check_columns("weight", problem.weight);
  KP_CHECK(problem.eps >= 0 && std::isfinite(problem.eps), "quantize: eps is ", problem.eps,
           "; it must be finite and not negative");
  KP_CHECK(std::isfinite(problem.weight_offset), "quantize: weight_offset is ", problem.weight_offset,
           "; it must be finite");
  KP_CHECK(problem.sum.is_present() == problem.residual.is_present(),
           "quantize: residual and sum go together: residual is ", problem.residual.is_present() ? "given" : "absent",
           ", sum is ", problem.sum.is_present() ? "given" : "absent");
  check.check_output("sum", problem.sum);
  check.check_statistics("rstd", problem.rstd);
}

void check_producer(const Quantize& problem, Device device) {
  const ArgumentCheck check{"quantize", "x", problem.x, device};
  const bool is_norm = problem.source == Source::kNorm;
  const bool is_gate = problem.source == Source::kGate || problem.source == Source::kGateGradient;
  KP_CHECK(is_gate || (!problem.up.is_present() && !problem.grad_output.is_present()),
           "quantize: up or grad_output is given; they are for gates");
  const bool has_norm_tensors = problem.residual.is_present() || problem.weight.is_present() ||
                                problem.sum.is_present() || problem.rstd.is_present();
  KP_CHECK(is_norm || !has_norm_tensors, "quantize: residual, weight, sum or rstd is given; they are for norms");
  KP_CHECK(has_producer(problem) || !problem.value.is_present(), "quantize: value is given; x is rounded as it is");
  if (is_gate) check_gate(problem, check);
  if (is_norm) check_norm(problem, check);
  if (!problem.value.is_present()) return;
  check.check_device("value", problem.value);
  const int64_t columns = columns_of(problem);
  KP_CHECK(problem.value.dtype == problem.x.dtype && problem.value.rank == 2 &&
               problem.value.sizes[0] == problem.x.sizes[0] && problem.value.sizes[1] == columns &&
               is_contiguous(problem.value),
           "quantize: value is ", problem.value, "; it must be contiguous ", problem.x.dtype, " [", problem.x.sizes[0],
           ", ", columns, "]");
}

}  // namespace

void check(Quantize& problem, Device device) {
  const Checks checks{device};
  const Quantize arguments = problem;
  checks.check_x(arguments.x);
  check_producer(arguments, device);
  const int64_t rows = arguments.x.sizes[0], columns = columns_of(arguments);
  KP_CHECK(arguments.codes.is_present() || arguments.transposed.is_present(),
           "quantize: neither codes nor transposed is given; give one of them");
  const DType code_type = code_type_of(arguments);
  checks.check_codes("codes", arguments.codes, rows, columns, code_type);
  checks.check_codes("transposed", arguments.transposed, columns, rows, code_type);
  checks.check_seed(arguments.seed);
  checks.check_one("scale", arguments.scale);
  checks.check_one("amax", arguments.amax);
  checks.check_one("found_nonfinite", arguments.found_nonfinite);
  KP_CHECK(arguments.margin >= -32 && arguments.margin <= 32, "quantize: margin is ", arguments.margin,
           "; it must lie between -32 and 32");
  if (arguments.scale.is_present()) {
    KP_CHECK(arguments.granularity == Granularity::kTensor && !arguments.scales.is_present(),
             "quantize: a scale is given; it is for the whole tensor, and no scales are computed");
  } else {
    problem.scales = checks.normal_scales("scales", arguments.scales, arguments.granularity, rows, columns);
  }
  const bool wants_transposed_scales =
      arguments.transposed.is_present() && has_transposed_scales(arguments.granularity);
  KP_CHECK(wants_transposed_scales == arguments.transposed_scales.is_present(), "quantize: transposed_scales are ",
           wants_transposed_scales ? "missing" : "given",
           "; transposed codes have scales of their own by row and by 1x128 blocks, and only then");
  KP_CHECK(!arguments.square_transpose || arguments.granularity == Granularity::k1x128,
           "quantize: square_transpose is set; it is for 1x128 blocks, other granularities have one transpose");
  if (wants_transposed_scales) {
    problem.transposed_scales = checks.normal_scales("transposed_scales", arguments.transposed_scales,
                                                     transposed_granularity(arguments), columns, rows);
  }
}

void quantize(const Quantize& arguments, Context& context) {
  Quantize problem = arguments;
  check(problem, context.device());
  registry::run_best(kQuantize, problem, context);
}

}  // namespace kernel_pytorch::quantize
