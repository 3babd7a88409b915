// Host side of quantising on the GPU: one launch, or two where a scale is of more than a tile; never a wait.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/cuda_support.h"
#include "kernel_pytorch/ops/quantize/operation.h"

namespace kernel_pytorch::quantize {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/quantize/quantize_cuda.cuh";
constexpr const char* kNeedsFloat8 = "needs compute capability 8.9 or newer, whose conversions to FP8 it uses";
constexpr int kTypes = std::size(kCudaTypes);
constexpr int kGroups[] = {4, 1, 16};  // by config

DeviceCode code_of(std::string_view function, DType dtype, std::string_view code_type, bool has_vectors) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantize::", function, "<", element_type_name(dtype), ", ", code_type,
                          bool_name(has_vectors), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}
DeviceCode dense_code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::quantize::measure_dense<", element_type_name(dtype), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}
std::string_view code_type_name(bool is_e5m2) {
  return is_e5m2 ? "kernel_pytorch::tile::Float8E5M2, " : "kernel_pytorch::tile::Float8E4M3, ";
}

registry::Support supports(const Quantize& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(device.cuda.capability() < 89 ? kNeedsFloat8 : nullptr);
}

bool is_aligned(const TensorView& view, int64_t bytes) {
  return !view.is_present() || (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) == 0 &&
                                (view.sizes[0] <= 1 || view.strides[0] * size_of(view.dtype) % bytes == 0));
}
// Whole vectors of 8 elements on every side. Random bits come one by one.
bool has_vectors(const Quantize& problem) {
  const TensorView& x = problem.x;
  return x.strides[1] == 1 && x.sizes[1] % 8 == 0 && is_aligned(x, 16) && is_aligned(problem.codes, 8) &&
         is_aligned(problem.transposed, 16) && !problem.seed.is_present();
}

Scales scales_of(const TensorView& scales) {
  if (!scales.is_present()) return {};
  return {scales.as<float>(), scales.strides[0], scales.strides[1]};
}

struct Tiles {
  int64_t rows, columns;
  explicit Tiles(const TensorView& x) : rows(divide_up(x.sizes[0], kTile)), columns(divide_up(x.sizes[1], kTile)) {
    KP_CHECK(std::max(x.sizes[0], x.sizes[1]) < (int64_t{1} << 31) - kTile, "quantize: x has shape ",
             shape_text(x.shape()), "; at most 2^31 - 129 rows and columns are supported, split it");
    KP_CHECK(rows * columns < int64_t{1} << 31, "quantize: x has shape ", shape_text(x.shape()), ", ", rows * columns,
             " tiles; at most 2^31 - 1 are supported, split the rows");
  }
  unsigned count() const { return static_cast<unsigned>(rows * columns); }
};

// Scales that no tile knows alone: bits of the amax of all, or of rows and columns, in scratch memory.
uint32_t* measure(const Quantize& problem, bool vectors, const Tiles& tiles, Context& context) {
  static const std::string kLabel = "quantize measure";
  static KernelTable<kTypes * 2> table;
  static KernelTable<kTypes> dense_table;
  const TensorView& x = problem.x;
  const bool by_row = problem.granularity == Granularity::kRow;
  const auto bytes = static_cast<size_t>(by_row ? x.sizes[0] + x.sizes[1] : 1) * sizeof(uint32_t);
  auto* measured = static_cast<uint32_t*>(context.scratch->allocate(bytes));
  cuda_device::fill_bytes(context.info->device.index, measured, 0, bytes, context.stream);
  MeasureArguments arguments{.x = x.data,
                             .row_stride = x.strides[0],
                             .column_stride = x.strides[1],
                             .rows = x.sizes[0],
                             .columns = x.sizes[1],
                             .row_tiles = static_cast<int32_t>(tiles.rows),
                             .column_tiles = static_cast<int32_t>(tiles.columns),
                             .by_row_and_column = by_row,
                             .measured = measured};
  const int type = cuda_type_index(x.dtype);
  const bool is_dense = vectors && !by_row && x.strides[0] == x.sizes[1];
  CUkern_st* kernel =
      is_dense ? dense_table.get(type, context, [&] { return dense_code_of(x.dtype); })
               : table.get(type * 2 + vectors, context, [&] { return code_of("measure", x.dtype, "", vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  // Dense: as many blocks as run at once; a block takes in a tile and more at each step.
  shape.grid_x = is_dense ? std::min(tiles.count(), 2u * static_cast<unsigned>(context.info->cuda.multiprocessors))
                          : tiles.count();
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return measured;
}

// Of nothing they are 1.
void fill_scales_of_nothing(const TensorView& scales, const Context& context) {
  if (!scales.is_present() || scales.element_count() == 0) return;
  const std::vector<float> ones(static_cast<size_t>(scales.element_count()), 1.0f);
  cuda_device::copy_to_device(context.info->device.index, scales.data, ones.data(), ones.size() * sizeof(float),
                              context.stream);
}

void run(const Quantize& problem, int config, Context& context) {
  static const std::string kLabel = "quantize";
  static KernelTable<kTypes * 4> table;
  const TensorView& x = problem.x;
  if (x.element_count() == 0) {
    fill_scales_of_nothing(problem.scales, context);
    return fill_scales_of_nothing(problem.transposed_scales, context);
  }
  const bool vectors = has_vectors(problem), is_e5m2 = code_type_of(problem) == DType::kFloat8E5M2;
  const Tiles tiles(x);
  const bool measures = !problem.scale.is_present() &&
                        (problem.granularity == Granularity::kTensor || problem.granularity == Granularity::kRow);
  Arguments arguments{
      .x = x.data,
      .row_stride = x.strides[0],
      .column_stride = x.strides[1],
      .rows = x.sizes[0],
      .columns = x.sizes[1],
      .row_tiles = static_cast<int32_t>(tiles.rows),
      .column_tiles = static_cast<int32_t>(tiles.columns),
      .group = kGroups[config],
      .from_the_end = measures,
      .mode = problem.square_transpose ? Mode::k1x128Square : static_cast<Mode>(problem.granularity),
      .rule = rule_of(problem),
      .codes = problem.codes.as<uint8_t>(),
      .transposed = problem.transposed.as<uint8_t>(),
      .codes_stride = problem.codes.strides[0],
      .transposed_stride = problem.transposed.strides[0],
      .given_scale = problem.scale.as<const float>(),
      .measured = measures ? measure(problem, vectors, tiles, context) : nullptr,
      .scales = scales_of(problem.scales),
      .transposed_scales = scales_of(problem.transposed_scales),
      .seed = problem.seed.as<const int64_t>(),
      .amax = problem.amax.as<uint32_t>(),
      .found_nonfinite = problem.found_nonfinite.as<float>(),
  };
  CUkern_st* kernel = table.get(cuda_type_index(x.dtype) * 4 + is_e5m2 * 2 + vectors, context,
                                [&] { return code_of("cast", x.dtype, code_type_name(is_e5m2), vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = tiles.count();
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<std::string> configs(const Quantize&, const DeviceInfo&) {
  std::vector<std::string> texts;
  for (int group : kGroups) texts.push_back(concat("group=", group));
  return texts;
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    codes.push_back(dense_code_of(dtype));
    for (bool vectors : {false, true}) {
      codes.push_back(code_of("measure", dtype, "", vectors));
      for (bool is_e5m2 : {false, true}) codes.push_back(code_of("cast", dtype, code_type_name(is_e5m2), vectors));
    }
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
