// The kernels of quantising, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantize {
namespace {

void describe(const Quantize& problem, tuning::KeyBuilder& key) {
  key.field("code", code_type_of(problem));
}

TensorView make_scales(Granularity granularity, int64_t rows, int64_t columns, Device device) {
  const int64_t groups = (rows + kTile - 1) / kTile, blocks = (columns + kTile - 1) / kTile;
  const int64_t sizes[][2] = {{1, 1}, {rows, 1}, {rows, blocks}, {groups, blocks}};
  TensorView scales = contiguous_view(nullptr, DType::kFloat32, sizes[static_cast<int>(granularity)], device);
  // Neighbouring rows side by side, as the product on Hopper reads them.
  if (granularity == Granularity::k1x128) scales.strides = {1, rows};
  return scales;
}

// What there is of scales follows from the rest.
void set_scales(Quantize& problem) {
  const int64_t rows = problem.x.sizes[0], columns = columns_of(problem);
  if (!problem.scale.is_present()) problem.scales = make_scales(problem.granularity, rows, columns, problem.x.device);
  if (!problem.transposed.is_present() || !has_transposed_scales(problem.granularity)) return;
  problem.transposed_scales = make_scales(transposed_granularity(problem), columns, rows, problem.x.device);
}

// Options besides those of the list: scales=given|GRANULARITY, code=TYPE; padded=1: rows of codes lie further apart
// than they are long, as those of a product with odd sizes; strided=1: x is transposed.
void arrange(const registry::ProblemRequest& request, Quantize& problem) {
  const int word = registry::choice_option(request, "scales", {"given", "tensor", "row", "1x128", "128x128"}, "tensor");
  problem.granularity = word == 0 ? Granularity::kTensor : static_cast<Granularity>(word - 1);
  if (word == 0) problem.scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  if (problem.source != Source::kNorm) problem.residual = problem.weight = problem.sum = problem.rstd = {};
  const bool has_gate = has_producer(problem) && problem.source != Source::kNorm;
  if (has_gate) problem.up = problem.x;
  if (problem.source == Source::kGateGradient) problem.grad_output = problem.x;
  for (TensorView* codes : {&problem.codes, &problem.transposed}) {
    codes->dtype = registry::dtype_option(request, "code", DType::kFloat8E4M3);
    registry::store_matrices(*codes, registry::flag_option(request, "padded", false) ? 16 : 0);
  }
  registry::store_matrices(problem.x, 0, registry::flag_option(request, "strided", false));
  set_scales(problem);
}

// Not below the rows of a tile.
Quantize shrink(const Quantize& problem, int64_t elements) {
  Quantize small = problem;
  registry::shrink_fields(kFields, &small, std::max<int64_t>(elements, kTile * columns_of(problem)));
  set_scales(small);
  return small;
}

// Shapes that quantising is tested and measured on: [rows, columns], the type being x's.
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x1 scales=given,tensor,row,1x128,128x128; 200x136 scales=given,tensor,row,1x128,128x128 amax=1
    130x259 scales=given,tensor,row,1x128,128x128 code=e5m2 amax=1
    256x512 scales=given,tensor,row,1x128,128x128 padded=1; 96x384 scales=tensor codes=0
    300x520 scales=1x128 transposed=0 power_of_two=1; 200x300 scales=1x128 square=1 amax=1
    256x384 scales=1x128 square=1 code=e5m2; 130x100 scales=given seed=1; 130x264 scales=1x128 seed=1 code=e5m2
    140x70 scales=row strided=1; 3x2056 scales=row transposed=0; 2x9000 scales=row transposed=0 code=e5m2 power_of_two=1
    # A producer's value may differ between kernels in its last place, and a scale that follows from it with it: powers
    # of two do not.
    200x136 producer=norm,gate,gate_gradient scales=given value=1
    130x384 producer=norm,gate,gate_gradient scales=given code=e5m2 residual=1
    256x256 producer=norm,gate,gate_gradient scales=tensor power_of_two=1 kind=gelu
    140x128 producer=norm,gate,gate_gradient scales=row power_of_two=1 weight_dtype=fp32
    130x264 producer=norm,gate,gate_gradient scales=1x128 power_of_two=1 square=1
    128x512 producer=norm,gate,gate_gradient scales=1x128 power_of_two=1 transposed=0
    9x37 producer=norm,gate,gate_gradient scales=given kind=relu; 0x16 scales=tensor; 16x0 scales=row
)";

}  // namespace

constinit const registry::Operation<Quantize> kQuantize = registry::declared<Quantize, kFields>(
    {.name = "quantize",
     .kernels = registry::kernel_list<kCudaRows, kCuda, kComposed, kCpu, kReference>,
     .describe = describe,
     .request = {.shape = "rows columns", .options = "scales code padded strided"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink,
     .flops_per_element = 2,
     .shapes = kShapes});

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
