// Host side of quantising on the GPU: one launch, or two where a scale is of more than a tile; never a wait.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantize {

constexpr auto kMadeFields =
    config_fields<ProducerKind>(config_field<&ProducerKind::source>(), config_field<&ProducerKind::kind>());
constexpr ConfigFields fields_of(const ProducerKind&) {
  return kMadeFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantize/cuda/kernel.cuh";
constexpr const char* kNeedsVectors =
    "what is made on the way comes in vectors: rows of all tensors 16 bytes aligned and dense, a multiple of 8 "
    "columns, "
    "no random bits";
constexpr const char* kComputedTwice =
    "a measured scale would make the norm or gradient twice, which costs more than writing and reading it";
constexpr int kTypes = std::size(kCudaTypes);
constexpr int kVariantCount =
    3 + 2 * pointwise::kKindCount;  // x in elements, x in vectors, norm, gates, their gradients

struct TileConfig {
  int group = 4;  // row tiles that blocks walk down before the next tile to the right
};
constexpr auto kTileConfigFields = config_fields<TileConfig>(config_field<&TileConfig::group>());
constexpr ConfigFields fields_of(const TileConfig&) {
  return kTileConfigFields;
}
constexpr TileConfig kConfigs[] = {{.group = 4}, {.group = 1}, {.group = 16}};

ProducerKind producer_kind_of(const Quantize& problem) {
  const bool is_gate = problem.source == Source::kGate || problem.source == Source::kGateGradient;
  return {problem.source, is_gate ? problem.kind : pointwise::Kind::kIdentity};
}
int variant_of(const ProducerKind& produced, bool has_vectors) {
  if (produced.source == Source::kGiven) return has_vectors ? 1 : 0;
  if (produced.source == Source::kNorm) return 2;
  return 3 + static_cast<int>(produced.kind) + (produced.source == Source::kGate ? 0 : pointwise::kKindCount);
}

DeviceCode code_of(std::string_view function, DType dtype, std::string_view code_type, bool has_vectors,
                   const ProducerKind& produced) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantize::", function, "<", element_type_name(dtype), ", ", code_type,
                          bool_name(has_vectors), ", ", device_text(produced), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}
DeviceCode dense_code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantize::measure_dense<", element_type_name(dtype), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}
DeviceCode statistics_code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantize::row_statistics<", element_type_name(dtype), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}
std::string_view code_type_name(bool is_e5m2) {
  return is_e5m2 ? "kernel_pytorch::tile::Float8E5M2, " : "kernel_pytorch::tile::Float8E4M3, ";
}

bool has_rows_of_vectors(const TensorView& view) {
  return !view.is_present() || (view.strides[1] == 1 && has_aligned_rows(view));
}
// Whole vectors of 8 elements on every side. Random bits come one by one.
bool has_vectors(const Quantize& problem) {
  for (const TensorView* view :
       {&problem.x, &problem.up, &problem.grad_output, &problem.residual, &problem.value, &problem.sum}) {
    if (!has_rows_of_vectors(*view)) return false;
  }
  return is_aligned(problem.weight, kVectorBytes) && problem.x.sizes[1] % 8 == 0 &&
         has_aligned_rows(problem.codes, 8) && has_aligned_rows(problem.transposed) && !problem.seed.is_present();
}

// Whether scales are of more than a tile, so that all is visited before.
bool measures(const Quantize& problem) {
  const bool is_of_more = problem.granularity == Granularity::kTensor || problem.granularity == Granularity::kRow;
  return !problem.scale.is_present() && is_of_more;
}

registry::Support supports(const Quantize& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return registry::Support::no(obstacle);
  if (const char* obstacle = float8_obstacle(device)) return registry::Support::no(obstacle);
  if (!has_producer(problem)) return registry::Support::yes();
  if (!has_vectors(problem)) return registry::Support::no(kNeedsVectors);
  return registry::Support::unless(measures(problem) && problem.source != Source::kGate ? kComputedTwice : nullptr);
}

Scales scales_of(const TensorView& scales) {
  if (!scales.is_present()) return {};
  return {scales.as<float>(), scales.strides[0], scales.strides[1]};
}

struct Tiles {
  int64_t rows, columns;
  explicit Tiles(const Quantize& problem)
      : rows(divide_up(problem.x.sizes[0], kTile)), columns(divide_up(columns_of(problem), kTile)) {
    const TensorView& x = problem.x;
    KP_CHECK(std::max(x.sizes[0], columns_of(problem)) < (int64_t{1} << 31) - kTile, "quantize: x has shape ",
             shape_text(x.shape()), "; at most 2^31 - 129 rows and columns are supported, split it");
    KP_CHECK(rows * columns < int64_t{1} << 31, "quantize: x has shape ", shape_text(x.shape()), ", ", rows * columns,
             " tiles; at most 2^31 - 1 are supported, split the rows");
  }
  unsigned count() const { return static_cast<unsigned>(rows * columns); }
};

// The rows' statistics, and the sum where there is a residual. Where they are.
const float* measure_rows(const Quantize& problem, Context& context) {
  static const std::string kLabel = "quantize norm";
  static KernelTable<kTypes> table;
  const TensorView &x = problem.x, &residual = problem.residual, &rstd = problem.rstd;
  const auto rows = static_cast<size_t>(x.sizes[0]);
  NormArguments arguments{.x = x.data,
                          .residual = residual.data,
                          .sum = problem.sum.data,
                          .row_stride = x.strides[0],
                          .residual_stride = residual.is_present() ? residual.strides[0] : 0,
                          .columns = x.sizes[1],
                          .eps = static_cast<float>(problem.eps),
                          .rstd = rstd.is_present()
                                      ? rstd.as<float>()
                                      : static_cast<float*>(context.scratch->allocate(rows * sizeof(float)))};
  CUkern_st* kernel = table.get(cuda_type_index(x.dtype), context, [&] { return statistics_code_of(x.dtype); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(rows);
  shape.block_x = kNormThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return arguments.rstd;
}

Input input_of(const Quantize& problem, Context& context) {
  const TensorView& x = problem.residual.is_present() ? problem.sum : problem.x;
  return {.x = x.data,
          .row_stride = x.strides[0],
          .column_stride = x.strides[1],
          .rows = x.sizes[0],
          .columns = columns_of(problem),
          .half = x.sizes[1],
          .up = problem.up.data,
          .grad_output = problem.grad_output.data,
          .up_stride = problem.up.is_present() ? problem.up.strides[0] : 0,
          .grad_stride = problem.grad_output.is_present() ? problem.grad_output.strides[0] : 0,
          .rstd = problem.source == Source::kNorm ? measure_rows(problem, context) : nullptr,
          .weight = problem.weight.data,
          .weight_offset = static_cast<float>(problem.weight_offset),
          .weight_is_float = problem.weight.is_present() && problem.weight.dtype == DType::kFloat32,
          .value = problem.value.data};
}

// Scales that no tile knows alone: bits of magnitudes in scratch memory, of rows and columns or of parts of all.
struct Measured {
  uint32_t* bits = nullptr;
  int32_t parts = 0;
};
Measured measure(const Quantize& problem, const Input& input, bool vectors, const Tiles& tiles, Context& context) {
  static const std::string kLabel = "quantize measure";
  static KernelTable<kTypes * kVariantCount> table;
  static KernelTable<kTypes> dense_table;
  const TensorView& x = problem.x;
  const bool by_row = problem.granularity == Granularity::kRow;
  const bool is_dense = vectors && !by_row && x.strides[0] == x.sizes[1] && !has_producer(problem);
  cuda_device::LaunchShape shape;
  // Dense: as many blocks as run at once; a block takes in a tile and more at each step.
  shape.grid_x = is_dense ? std::min(tiles.count(), 2u * static_cast<unsigned>(context.info->cuda.multiprocessors))
                          : tiles.count();
  shape.block_x = kThreads;
  const int64_t count = is_dense ? shape.grid_x : by_row ? input.rows + input.columns : 1;
  const auto bytes = static_cast<size_t>(count) * sizeof(uint32_t);
  auto* bits = static_cast<uint32_t*>(context.scratch->allocate(bytes));
  if (!is_dense) cuda_device::fill_bytes(context.info->device.index, bits, 0, bytes, context.stream);
  MeasureArguments arguments{.input = input,
                             .row_tiles = static_cast<int32_t>(tiles.rows),
                             .column_tiles = static_cast<int32_t>(tiles.columns),
                             .by_row_and_column = by_row,
                             .measured = bits};
  arguments.input.value = nullptr;  // the cast writes it
  const int type = cuda_type_index(x.dtype);
  const ProducerKind produced = producer_kind_of(problem);
  CUkern_st* kernel = is_dense ? dense_table.get(type, context, [&] { return dense_code_of(x.dtype); })
                               : table.get(type * kVariantCount + variant_of(produced, vectors), context,
                                           [&] { return code_of("measure", x.dtype, "", vectors, produced); });
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return {bits, by_row ? 0 : static_cast<int32_t>(count)};
}

// The scales of an empty tensor are 1.
void fill_scales_of_nothing(const TensorView& scales, const Context& context) {
  if (!scales.is_present() || scales.element_count() == 0) return;
  const std::vector<float> ones(static_cast<size_t>(scales.element_count()), 1.0f);
  cuda_device::copy_to_device(context.info->device.index, scales.data, ones.data(), ones.size() * sizeof(float),
                              context.stream);
}

void run(const Quantize& problem, int config, Context& context) {
  static const std::string kLabel = "quantize";
  static KernelTable<kTypes * 2 * kVariantCount> table;
  const TensorView& x = problem.x;
  if (x.element_count() == 0) {
    fill_scales_of_nothing(problem.scales, context);
    return fill_scales_of_nothing(problem.transposed_scales, context);
  }
  const bool vectors = has_vectors(problem), is_e5m2 = code_type_of(problem) == DType::kFloat8E5M2;
  const ProducerKind produced = producer_kind_of(problem);
  const Tiles tiles(problem);
  const Input input = input_of(problem, context);
  const bool is_measured = measures(problem);
  const Measured measured = is_measured ? measure(problem, input, vectors, tiles, context) : Measured{};
  Arguments arguments{
      .input = input,
      .row_tiles = static_cast<int32_t>(tiles.rows),
      .column_tiles = static_cast<int32_t>(tiles.columns),
      .group = kConfigs[config].group,
      .from_the_end = is_measured || produced.source == Source::kNorm,
      .in_pairs = produced.source == Source::kGateGradient && input.half % kTile == 0,
      .mode = problem.square_transpose ? Mode::k1x128Square : static_cast<Mode>(problem.granularity),
      .rule = rule_of(problem),
      .codes = problem.codes.as<uint8_t>(),
      .transposed = problem.transposed.as<uint8_t>(),
      .codes_stride = problem.codes.strides[0],
      .transposed_stride = problem.transposed.strides[0],
      .given_scale = problem.scale.as<const float>(),
      .measured = measured.bits,
      .measured_parts = measured.parts,
      .scales = scales_of(problem.scales),
      .transposed_scales = scales_of(problem.transposed_scales),
      .seed = problem.seed.as<const int64_t>(),
      .amax = problem.amax.as<uint32_t>(),
      .found_nonfinite = problem.found_nonfinite.as<float>(),
  };
  CUkern_st* kernel =
      table.get((cuda_type_index(x.dtype) * 2 + is_e5m2) * kVariantCount + variant_of(produced, vectors), context,
                [&] { return code_of("cast", x.dtype, code_type_name(is_e5m2), vectors, produced); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = tiles.count();
  shape.block_x = kThreads;
  shape.programmatic_dependent = is_measured;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<std::string> configs(const Quantize&, const DeviceInfo&) {
  return config_texts(kConfigs);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    codes.push_back(dense_code_of(dtype));
    constexpr ProducerKind kGiven{Source::kGiven, pointwise::Kind::kIdentity};
    for (bool vectors : {false, true}) {
      codes.push_back(code_of("measure", dtype, "", vectors, kGiven));
      for (bool is_e5m2 : {false, true}) {
        codes.push_back(code_of("cast", dtype, code_type_name(is_e5m2), vectors, kGiven));
      }
    }
  }
  // What is made: as training makes it, in bf16.
  constexpr DType kType = DType::kBFloat16;
  codes.push_back(statistics_code_of(kType));
  for (const ProducerKind& produced :
       {ProducerKind{Source::kNorm, pointwise::Kind::kIdentity}, ProducerKind{Source::kGate, pointwise::Kind::kSilu},
        ProducerKind{Source::kGateGradient, pointwise::Kind::kSilu}}) {
    if (produced.source == Source::kGate) codes.push_back(code_of("measure", kType, "", true, produced));
    codes.push_back(code_of("cast", kType, code_type_name(produced.source == Source::kGateGradient), true, produced));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Quantize> kCuda{.name = "cuda_tiles",
                                                 .supports = supports,
                                                 .configs = configs,
                                                 .run = run,
                                                 .source_hash = source_hash,
                                                 .device_code = device_code};

}  // namespace kernel_pytorch::quantize
