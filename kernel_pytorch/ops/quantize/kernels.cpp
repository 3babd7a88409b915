// The kernels of quantising, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantize {
namespace {

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

// Shapes that quantising is tested and measured on: [rows, columns], the type being x's.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* scales : {"given", "tensor", "row", "1x128", "128x128"}) {
      add({1, 1}, dtype, {{"scales", scales}});
      add({200, 136}, dtype, {{"scales", scales}, {"amax", "1"}});
      add({130, 259}, dtype, {{"scales", scales}, {"code", "e5m2"}, {"amax", "1"}});
      add({256, 512}, dtype, {{"scales", scales}, {"padded", "1"}});
    }
    add({96, 384}, dtype, {{"scales", "tensor"}, {"codes", "0"}});
    add({300, 520}, dtype, {{"scales", "1x128"}, {"transposed", "0"}, {"power_of_two", "1"}});
    add({200, 300}, dtype, {{"scales", "1x128"}, {"square", "1"}, {"amax", "1"}});
    add({256, 384}, dtype, {{"scales", "1x128"}, {"square", "1"}, {"code", "e5m2"}});
    add({130, 100}, dtype, {{"scales", "given"}, {"seed", "1"}});
    add({130, 264}, dtype, {{"scales", "1x128"}, {"seed", "1"}, {"code", "e5m2"}});
    add({140, 70}, dtype, {{"scales", "row"}, {"strided", "1"}});
    // ProducerKind on the way. A value's last place may differ between kernels, and a scale that follows from it with
    // it: powers of two do not.
    for (const char* produced : {"norm", "gate", "gate_gradient"}) {
      add({200, 136}, dtype, {{"producer", produced}, {"scales", "given"}, {"value", "1"}});
      add({130, 384}, dtype, {{"producer", produced}, {"scales", "given"}, {"code", "e5m2"}, {"residual", "1"}});
      add({256, 256}, dtype, {{"producer", produced}, {"scales", "tensor"}, {"power_of_two", "1"}, {"kind", "gelu"}});
      add({140, 128}, dtype,
          {{"producer", produced}, {"scales", "row"}, {"power_of_two", "1"}, {"weight_dtype", "fp32"}});
      add({130, 264}, dtype, {{"producer", produced}, {"scales", "1x128"}, {"power_of_two", "1"}, {"square", "1"}});
      add({128, 512}, dtype, {{"producer", produced}, {"scales", "1x128"}, {"power_of_two", "1"}, {"transposed", "0"}});
      add({9, 37}, dtype, {{"producer", produced}, {"scales", "given"}, {"kind", "relu"}});
    }
    add({0, 16}, dtype, {{"scales", "tensor"}});
    add({16, 0}, dtype, {{"scales", "row"}});
  }
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Quantize> kQuantize =
    registry::declared<Quantize, kFields, flops>({.name = "quantize",
                                                  .kernels = registry::kernel_list<kCuda, kComposed, kCpu, kReference>,
                                                  .describe = describe,
                                                  .filling = fill,
                                                  .make = make,
                                                  .check = check,
                                                  .shrink = shrink,
                                                  .shapes = shapes});

constexpr std::string_view kWritten = "value sum rstd codes transposed scales transposed_scales";
constexpr auto kDeclarations =
    registry::join(registry::plain<Quantize, quantize>("quantize_", kFields,
                                                       {.never = "up grad_output residual weight",
                                                        .without = "value sum rstd source kind eps weight_offset",
                                                        .updated = kWritten}),
                   registry::plain<Quantize, quantize>("quantize_produced_", kFields, {.updated = kWritten}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kQuantize>};

}  // namespace kernel_pytorch::quantize
