// The kernels of quantising, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/quantize/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantize {
namespace {

std::span<const registry::Kernel<Quantize>> kernels() {
  static const registry::Kernel<Quantize> kKernels[] = {kCuda, kComposed, kCpu, kReference};
  return kKernels;
}

void describe(const Quantize& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kFields, &problem, key);
  key.field("code", code_type_of(problem));
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

// What x is multiplied with or normalised by: residual=0|1 and weight_dtype=TYPE of norms, value=0|1.
void make_producer(const registry::ProblemRequest& request, Quantize& problem) {
  const TensorView& x = problem.x;
  const int64_t rows = x.sizes[0], columns = x.sizes[1];
  const auto like_x = [&](int64_t width) { return contiguous_view(nullptr, x.dtype, {rows, width}, request.device); };
  if (problem.source == Source::kNorm) {
    problem.weight =
        contiguous_view(nullptr, registry::dtype_option(request, "weight_dtype", x.dtype), {columns}, request.device);
    problem.rstd = contiguous_view(nullptr, DType::kFloat32, {rows}, request.device);
    if (registry::flag_option(request, "residual", false)) problem.residual = problem.sum = like_x(columns);
  } else if (has_producer(problem)) {
    problem.up = like_x(columns);
    if (problem.source == Source::kGateGradient) problem.grad_output = like_x(columns);
  }
  if (registry::flag_option(request, "value", false)) problem.value = like_x(columns_of(problem));
}

// Besides the options of the list: scales=given|GRANULARITY, code=TYPE, codes, transposed, amax, seed, padded,
// strided=0|1.
Quantize make(const registry::ProblemRequest& request) {
  std::vector<std::string_view> known = registry::option_names(kFields);
  known.insert(known.end(), {"scales", "code", "codes", "transposed", "amax", "seed", "padded", "strided", "residual",
                             "weight_dtype", "value"});
  registry::check_options(request, known);
  KP_CHECK(request.shape.size() == 2, "quantize: the shape is ", shape_text(request.shape),
           "; it must be [rows, columns]");
  const int word = registry::choice_option(request, "scales", {"given", "tensor", "row", "1x128", "128x128"}, "tensor");
  const DType code = registry::dtype_option(request, "code", DType::kFloat8E4M3);
  Quantize problem;
  registry::make_options(kFields, request, &problem);
  problem.granularity = word == 0 ? Granularity::kTensor : static_cast<Granularity>(word - 1);
  problem.x = contiguous_view(nullptr, request.dtype, request.shape, request.device);
  make_producer(request, problem);
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
  for (TensorView* view :
       {&small.x, &small.up, &small.grad_output, &small.residual, &small.value, &small.sum, &small.rstd}) {
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

int64_t flops(const Quantize& problem) {
  return 2 * problem.x.element_count();
}

}  // namespace

constinit const registry::Operation<Quantize> kQuantize =
    registry::declared<Quantize, kFields, flops>({.name = "quantize",
                                                  .kernels = kernels,
                                                  .describe = describe,
                                                  .filling = fill,
                                                  .make = make,
                                                  .check = check,
                                                  .shrink = shrink,
                                                  .shapes = shapes});

namespace {

constexpr std::string_view kWritten = "value sum rstd codes transposed scales transposed_scales";
constexpr auto kDeclarations =
    registry::join(registry::plain<Quantize, quantize>("quantize_", kFields,
                                                       {.never = "up grad_output residual weight",
                                                        .without = "value sum rstd source kind eps weight_offset",
                                                        .updated = kWritten}),
                   registry::plain<Quantize, quantize>("quantize_produced_", kFields, {.updated = kWritten}));

}  // namespace

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kQuantize>};

}  // namespace kernel_pytorch::quantize
