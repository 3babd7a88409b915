#include "kernel_pytorch/ops/engines/gemm/tile/host.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::product {
namespace {

constexpr const char* kTileSource = "kernel_pytorch/ops/engines/gemm/tile/kernel.cuh";
constexpr const char* kMmaSource = "kernel_pytorch/ops/engines/gemm/mma/kernel.cuh";
constexpr const char* kFloatSource = "kernel_pytorch/ops/engines/gemm/mma/float_kernel.cuh";
constexpr const char* kFloat8Source = "kernel_pytorch/ops/engines/gemm/mma/float8_kernel.cuh";
constexpr const char* kDoubleSource = "kernel_pytorch/ops/engines/gemm/mma/double_kernel.cuh";
constexpr const char* kGroupedSource = "kernel_pytorch/ops/engines/gemm/tile/grouped.cuh";
constexpr int64_t kMaximumGrid = 65535;  // in y and z

constexpr int type_index(DType dtype) {
  return dtype == DType::kFloat32      ? 0
         : dtype == DType::kBFloat16   ? 1
         : dtype == DType::kFloat16    ? 2
         : dtype == DType::kFloat8E4M3 ? 3
         : dtype == DType::kFloat8E5M2 ? 4
                                       : 5;
}
std::string_view tile_type_name(DType dtype) {
  constexpr std::string_view kNames[] = {"float", "kernel_pytorch::tile::BFloat16", "kernel_pytorch::tile::Float16",
                                         "kernel_pytorch::tile::Float8E4M3", "kernel_pytorch::tile::Float8E5M2"};
  return kNames[type_index(dtype)];
}

int64_t bytes_of(TileType type) {
  if (type == TileType::kFloat64) return 8;
  return type == TileType::kFloat32 ? 4 : type <= TileType::kFloat16 ? 2 : 1;
}

template <class Pointer>
void skip(Pointer& pointer, int64_t bytes) {
  if (pointer == nullptr) return;
  pointer = static_cast<Pointer>(const_cast<char*>(static_cast<const char*>(pointer)) + bytes);
}

// More batches than a grid has are launched in parts.
struct TileEdges {
  int64_t rows, columns;
};
void launch_tiles(CUkern_st* kernel, TileEdges edges, unsigned shared_bytes, DType a, DType b, int64_t batch,
                  TileArguments& arguments, Context& context, const std::string& label) {
  KP_CHECK(arguments.m <= kMaximumGrid * edges.rows, label, ": ", arguments.m, " rows; this kernel takes up to ",
           kMaximumGrid * edges.rows);
  for (int64_t first = 0; first < batch; first += kMaximumGrid) {
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(std::max<int64_t>(divide_up(arguments.n, edges.columns), 1));
    shape.grid_y = static_cast<unsigned>(divide_up(arguments.m, edges.rows));
    shape.grid_z = static_cast<unsigned>(std::min(batch - first, kMaximumGrid));
    shape.block_x = kTileThreads;
    shape.shared_bytes = shared_bytes;
    void* pointers[] = {&arguments};
    cuda_device::launch(context, kernel, shape, pointers, label);
    skip(arguments.a.data, arguments.a.batch * kMaximumGrid * size_of(a));
    skip(arguments.b.data, arguments.b.batch * kMaximumGrid * size_of(b));
    for (TileMatrix* matrix :
         {&arguments.saved, &arguments.residual, &arguments.output, &arguments.preactivation, &arguments.row_sums}) {
      skip(matrix->data, matrix->batch * kMaximumGrid * bytes_of(matrix->type));
    }
  }
}

}  // namespace

TileMatrix tile_matrix(const TensorView& view) {
  if (!view.is_present()) return {};
  const bool has_batch = view.rank == 3;
  return {.data = view.data,
          .batch = has_batch ? view.strides[0] : 0,
          .row = view.rank >= 2 ? view.strides[has_batch ? 1 : 0] : 0,
          .type = static_cast<TileType>(type_index(view.dtype))};
}

DeviceCode tile_code(const TileVariant& variant) {
  const bool has_bytes = size_of(variant.a) == 1 || size_of(variant.b) == 1;
  return {.source = kTileSource,
          .entry = concat("kernel_pytorch::product::tile_product<", tile_type_name(variant.a), ", ",
                          tile_type_name(variant.b), ", ", variant.per_thread, ", ", bool_name(variant.blocked), ">"),
          .minimum_capability = has_bytes ? 89 : 80,
          .architecture_specific = false};
}

uint64_t tile_source_hash() {
  return jit::source_hash(kTileSource);
}

void tile_launch(const TileVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                 const std::string& label) {
  static KernelTable<5 * 5 * 4> kernels;
  const int entry =
      ((type_index(variant.a) * 5 + type_index(variant.b)) * 2 + (variant.per_thread == 8)) * 2 + variant.blocked;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return tile_code(variant); });
  const int64_t edge = tile_edge(variant.per_thread);
  launch_tiles(kernel, {edge, edge}, 0, variant.a, variant.b, batch, arguments, context, label);
}

DeviceCode mma_code(const MmaVariant& variant) {
  return {.source = kMmaSource,
          .entry = concat("kernel_pytorch::product::mma_product<", tile_type_name(variant.dtype), ", ",
                          bool_name(variant.across_a), ", ", bool_name(variant.across_b), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

uint64_t mma_source_hash() {
  return jit::source_hash(kMmaSource);
}

void mma_launch(const MmaVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                const std::string& label) {
  static KernelTable<8> kernels;
  const int entry = (variant.dtype == DType::kFloat16) * 4 + variant.across_a * 2 + variant.across_b;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return mma_code(variant); });
  launch_tiles(kernel, {kMmaEdge, kMmaEdge}, kMmaSharedBytes, variant.dtype, variant.dtype, batch, arguments, context,
               label);
}

DeviceCode float8_code(const Float8Variant& variant) {
  return {.source = kFloat8Source,
          .entry = concat("kernel_pytorch::product::float8_product<", tile_type_name(variant.a), ", ",
                          tile_type_name(variant.b), ", ", bool_name(variant.promotes), ">"),
          .minimum_capability = 89,
          .architecture_specific = false};
}

uint64_t float8_source_hash() {
  return jit::source_hash(kFloat8Source);
}

void float8_launch(const Float8Variant& variant, TileArguments& arguments, Context& context, const std::string& label) {
  static KernelTable<8> kernels;
  const int entry = (variant.a == DType::kFloat8E5M2) * 4 + (variant.b == DType::kFloat8E5M2) * 2 + variant.promotes;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return float8_code(variant); });
  launch_tiles(kernel, {kMmaEdge, kMmaEdge}, kFloat8SharedBytes, variant.a, variant.b, 1, arguments, context, label);
}

DeviceCode float_code(const FloatVariant& variant) {
  return {.source = kFloatSource,
          .entry = concat("kernel_pytorch::product::float_product<", variant.edge, ", ", bool_name(variant.across_a),
                          ", ", bool_name(variant.across_b), ", ", bool_name(variant.once), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

uint64_t float_source_hash() {
  return jit::source_hash(kFloatSource);
}

void float_launch(const FloatVariant& variant, int64_t batch, TileArguments& arguments, Context& context,
                  const std::string& label) {
  static KernelTable<16> kernels;
  const int entry = (variant.edge == 64) * 8 + variant.once * 4 + variant.across_a * 2 + variant.across_b;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return float_code(variant); });
  launch_tiles(kernel, {variant.edge, variant.edge}, static_cast<unsigned>(float_shared_bytes(variant.edge)),
               DType::kFloat32, DType::kFloat32, batch, arguments, context, label);
}

DeviceCode double_code(int stages) {
  return {.source = kDoubleSource,
          .entry = concat("kernel_pytorch::product::double_product<", stages, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

uint64_t double_source_hash() {
  return jit::source_hash(kDoubleSource);
}

void double_launch(int64_t batch, TileArguments& arguments, Context& context, const std::string& label) {
  static KernelTable<2> kernels;
  const bool is_small = kDoubleSharedBytes > context.info->cuda.shared_bytes_per_block;  // AMD's 64 KiB
  const int stages = is_small ? kDoubleStages - 1 : kDoubleStages;
  CUkern_st* kernel = kernels.get(is_small, context, [&] { return double_code(stages); });
  launch_tiles(kernel, {kDoubleRows, kDoubleColumns}, static_cast<unsigned>(stages * kDoubleStageBytes),
               DType::kFloat64, DType::kFloat64, batch, arguments, context, label);
}

namespace {

// Groups of rows have at most one tile more than their rows fill, and rows in no group are cleared by tiles of theirs.
void launch_groups(CUkern_st* kernel, int64_t edge, unsigned shared_bytes, GroupedTileArguments& arguments,
                   Context& context, const std::string& label) {
  const TileArguments& product = arguments.product;
  const int64_t rows = divide_up(product.m, edge) + (arguments.by_depth ? 0 : arguments.groups + 1);
  KP_CHECK(rows <= kMaximumGrid, label, ": ", product.m, " rows in ", arguments.groups,
           " groups; this kernel takes up to ", (kMaximumGrid - arguments.groups - 1) * edge, " rows");
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(product.n, edge));
  shape.grid_y = static_cast<unsigned>(rows);
  shape.grid_z = arguments.by_depth ? static_cast<unsigned>(arguments.groups) : 1;
  shape.block_x = kTileThreads;
  shape.shared_bytes = shared_bytes;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, label);
}

}  // namespace

DeviceCode grouped_mma_code(const MmaVariant& variant) {
  return {.source = kGroupedSource,
          .entry = concat("kernel_pytorch::product::mma_grouped<", tile_type_name(variant.dtype), ", ",
                          bool_name(variant.across_a), ", ", bool_name(variant.across_b), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

DeviceCode grouped_tile_code(DType dtype) {
  return {.source = kGroupedSource,
          .entry = concat("kernel_pytorch::product::tile_grouped<", tile_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

uint64_t grouped_source_hash() {
  return jit::source_hash(kGroupedSource);
}

void grouped_mma_launch(const MmaVariant& variant, GroupedTileArguments& arguments, Context& context,
                        const std::string& label) {
  static KernelTable<8> kernels;
  const int entry = (variant.dtype == DType::kFloat16) * 4 + variant.across_a * 2 + variant.across_b;
  CUkern_st* kernel = kernels.get(entry, context, [&] { return grouped_mma_code(variant); });
  launch_groups(kernel, kMmaEdge, kMmaSharedBytes, arguments, context, label);
}

void grouped_tile_launch(DType dtype, GroupedTileArguments& arguments, Context& context, const std::string& label) {
  static KernelTable<3> kernels;
  CUkern_st* kernel = kernels.get(type_index(dtype), context, [&] { return grouped_tile_code(dtype); });
  launch_groups(kernel, tile_edge(4), 0, arguments, context, label);
}

}  // namespace kernel_pytorch::product
