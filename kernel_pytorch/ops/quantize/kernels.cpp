// The kernels of quantising, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/quantize/shapes.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantize {
namespace {

std::span<const registry::Kernel<Quantize>> kernels() {
  static const registry::Kernel<Quantize> kKernels[] = {kCuda, kComposed, kCpu, kReference};
  return kKernels;
}

void describe(const Quantize& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(problem.x.sizes[0]));
  key.field("columns", problem.x.sizes[1]);
  key.field("dtype", problem.x.dtype);
  key.field("code", code_type_of(problem));
  key.field("granularity", static_cast<int64_t>(problem.granularity));
  key.field("scale", problem.scale);
  key.field("codes", problem.codes);
  key.field("transposed", problem.transposed);
  key.field("scales", problem.scales);
  key.field("transposed_scales", problem.transposed_scales);
  key.field("seed", problem.seed);
  key.field("amax", problem.amax);
  key.field("found_nonfinite", problem.found_nonfinite);
  key.field("square", problem.square_transpose);
  key.field("source", static_cast<int64_t>(problem.producer.source));
  key.field("kind", static_cast<int64_t>(problem.producer.kind));
  key.field("up", problem.producer.up);
  key.field("grad_output", problem.producer.grad_output);
  key.field("residual", problem.producer.residual);
  key.field("weight", problem.producer.weight);
  key.field("value", problem.producer.value);
  key.field("sum", problem.producer.sum);
  key.field("rstd", problem.producer.rstd);
  key.field("dense", problem.x.strides[1] == 1);
}

void visit(Quantize& problem, registry::TensorVisitor visitor, void* state) {
  const registry::PresentTensors visit_present{visitor, state};
  visit_present("x", registry::Role::kInput, problem.x);
  visit_present("scale", registry::Role::kInput, problem.scale);
  visit_present("seed", registry::Role::kInput, problem.seed);
  visit_present("up", registry::Role::kInput, problem.producer.up);
  visit_present("grad_output", registry::Role::kInput, problem.producer.grad_output);
  visit_present("residual", registry::Role::kInput, problem.producer.residual);
  visit_present("weight", registry::Role::kInput, problem.producer.weight);
  visit_present("value", registry::Role::kOutput, problem.producer.value);
  visit_present("sum", registry::Role::kOutput, problem.producer.sum);
  visit_present("rstd", registry::Role::kOutput, problem.producer.rstd);
  visit_present("codes", registry::Role::kOutput, problem.codes);
  visit_present("transposed", registry::Role::kOutput, problem.transposed);
  visit_present("scales", registry::Role::kOutput, problem.scales);
  visit_present("transposed_scales", registry::Role::kOutput, problem.transposed_scales);
  visit_present("amax", registry::Role::kUpdated, problem.amax);
  visit_present("found_nonfinite", registry::Role::kUpdated, problem.found_nonfinite);
}

registry::Filling fill(const Quantize&, std::string_view tensor) {
  if (tensor == "seed") return {.content = registry::Content::kSeeds};
  const bool is_positive = tensor == "scale" || tensor == "amax" || tensor == "found_nonfinite";
  return {.content = is_positive ? registry::Content::kPositive : registry::Content::kNormal};
}

// padded=1: rows of codes lie further apart than they are long, as those of a product with odd sizes.
TensorView make_codes(const registry::ProblemRequest& request, DType dtype, int64_t rows, int64_t columns) {
  TensorView codes = contiguous_view(nullptr, dtype, {rows, columns}, request.device);
  if (registry::flag_option(request, "padded", false)) codes.strides[0] += 16;
  return codes;
}

TensorView make_scales(Granularity granularity, int64_t rows, int64_t columns, Device device) {
  const int64_t groups = (rows + kTile - 1) / kTile, blocks = (columns + kTile - 1) / kTile;
  switch (granularity) {
    case Granularity::kTensor:
      return contiguous_view(nullptr, DType::kFloat32, {1, 1}, device);
    case Granularity::kRow:
      return contiguous_view(nullptr, DType::kFloat32, {rows, 1}, device);
    case Granularity::k128x128:
      return contiguous_view(nullptr, DType::kFloat32, {groups, blocks}, device);
    case Granularity::k1x128:
      break;
  }
  // Neighbouring rows side by side, as the product on Hopper reads them.
  TensorView scales = contiguous_view(nullptr, DType::kFloat32, {rows, blocks}, device);
  scales.strides = {1, rows};
  return scales;
}

// The shape is x's; made=norm|gate|gate_gradient, kind=WORD, residual=0|1, weight_dtype=NAME, value=0|1.
Producer make_producer(const registry::ProblemRequest& request, const TensorView& x) {
  Producer producer;
  producer.source =
      static_cast<Source>(registry::choice_option(request, "producer", {"no", "norm", "gate", "gate_gradient"}, "no"));
  producer.kind = static_cast<pointwise::Kind>(
      registry::choice_option(request, "kind", {"gelu", "gelu_tanh", "silu", "relu"}, "silu"));
  const int64_t rows = x.sizes[0], columns = x.sizes[1];
  const auto like_x = [&](int64_t width) { return contiguous_view(nullptr, x.dtype, {rows, width}, request.device); };
  if (producer.source == Source::kNorm) {
    producer.weight =
        contiguous_view(nullptr, registry::dtype_option(request, "weight_dtype", x.dtype), {columns}, request.device);
    producer.rstd = contiguous_view(nullptr, DType::kFloat32, {rows}, request.device);
    if (registry::flag_option(request, "residual", false)) producer.residual = producer.sum = like_x(columns);
  } else if (producer.source != Source::kGiven) {
    producer.up = like_x(columns);
    if (producer.source == Source::kGateGradient) producer.grad_output = like_x(columns);
  }
  if (registry::flag_option(request, "value", false)) {
    producer.value = like_x(producer.source == Source::kGateGradient ? 2 * columns : columns);
  }
  return producer;
}

Quantize make(const registry::ProblemRequest& request) {
  registry::check_options(
      request, {"scales", "code", "codes", "transposed", "amax", "seed", "power_of_two", "margin", "square", "padded",
                "strided", "producer", "kind", "residual", "weight_dtype", "value"});
  KP_CHECK(request.shape.size() == 2, "quantize: the shape is ", shape_text(request.shape),
           "; it must be [rows, columns]");
  const int word = registry::choice_option(request, "scales", {"given", "tensor", "row", "1x128", "128x128"}, "tensor");
  const DType code = registry::dtype_option(request, "code", DType::kFloat8E4M3);
  Quantize problem;
  problem.granularity = word == 0 ? Granularity::kTensor : static_cast<Granularity>(word - 1);
  problem.margin = static_cast<int>(registry::integer_option(request, "margin", 0));
  problem.power_of_two = registry::flag_option(request, "power_of_two", false);
  problem.square_transpose = registry::flag_option(request, "square", false);
  problem.x = contiguous_view(nullptr, request.dtype, request.shape, request.device);
  problem.producer = make_producer(request, problem.x);
  const int64_t rows = request.shape[0], columns = columns_of(problem);
  if (registry::flag_option(request, "strided", false)) problem.x.strides = {1, rows};
  const auto one = [&] { return contiguous_view(nullptr, DType::kFloat32, {1}, request.device); };
  if (registry::flag_option(request, "codes", true)) problem.codes = make_codes(request, code, rows, columns);
  if (registry::flag_option(request, "transposed", true)) problem.transposed = make_codes(request, code, columns, rows);
  if (word == 0) {
    problem.scale = one();
  } else {
    problem.scales = make_scales(problem.granularity, rows, columns, request.device);
  }
  if (problem.transposed.is_present() && has_transposed_scales(problem.granularity)) {
    problem.transposed_scales = make_scales(transposed_granularity(problem), columns, rows, request.device);
  }
  if (registry::flag_option(request, "amax", false)) problem.amax = problem.found_nonfinite = one();
  if (registry::flag_option(request, "seed", false)) {
    problem.seed = contiguous_view(nullptr, DType::kInt64, {2}, request.device);
  }
  return problem;
}

// Fewer rows, in whole tiles.
Quantize shrink(const Quantize& problem, int64_t elements) {
  const int64_t rows = problem.x.sizes[0], columns = columns_of(problem);
  const int64_t few = std::min(rows, std::max<int64_t>(elements / std::max<int64_t>(columns, 1) / kTile, 1) * kTile);
  Quantize small = problem;
  Producer& producer = small.producer;
  for (TensorView* view : {&small.x, &producer.up, &producer.grad_output, &producer.residual, &producer.value,
                           &producer.sum, &producer.rstd}) {
    if (view->is_present()) view->sizes[0] = few;
  }
  if (small.codes.is_present()) small.codes.sizes[0] = few;
  if (small.transposed.is_present()) small.transposed.sizes[1] = few;
  if (small.scales.is_present()) {
    small.scales.sizes = make_scales(problem.granularity, few, columns, problem.x.device).sizes;
  }
  if (small.transposed_scales.is_present()) {
    small.transposed_scales.sizes = make_scales(transposed_granularity(problem), columns, few, problem.x.device).sizes;
  }
  return small;
}

registry::Cost cost(const Quantize& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit), .flops = 2 * problem.x.element_count()};
}

}  // namespace

constinit const registry::Operation<Quantize> kQuantize{.name = "quantize",
                                                        .kernels = kernels,
                                                        .describe = describe,
                                                        .visit_tensors = visit,
                                                        .filling = fill,
                                                        .make = make,
                                                        .shrink = shrink,
                                                        .cost = cost,
                                                        .shapes = shapes};

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.operations = registry::erased<kQuantize>};

}  // namespace kernel_pytorch::quantize
