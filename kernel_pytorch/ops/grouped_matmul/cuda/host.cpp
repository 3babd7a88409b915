// Host side of the grouped products on CUDA that work on every device: by mma for 16-bit types whose lines are aligned,
// by FMA for the rest. A gate is a launch of its own after the product, as are sums of groups.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/grouped_matmul/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

constexpr const char* kGateSource = "kernel_pytorch/ops/grouped_matmul/cuda/gate.cuh";
constexpr const char* kSumSource = "kernel_pytorch/ops/grouped_matmul/cuda/sums.cuh";
constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kMisaligned = "rows of a or b do not begin at multiples of 16 bytes";
constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than four million rows";
constexpr int64_t kMostRows = int64_t{65535 - kMostGroups - 1} * 64, kMostSize = int64_t{1} << 30;

const char* size_obstacle(int64_t rows, int64_t first, int64_t second) {
  return rows > kMostRows || std::max(first, second) >= kMostSize ? kTooLarge : nullptr;
}
bool has_aligned_matrices(const TensorView& view) {
  return has_aligned_rows(view, kVectorBytes, is_row_major(view) ? 2 : 1);
}

registry::Support supports_tile(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(size_obstacle(rows_of(problem), problem.b.sizes[1], problem.b.sizes[2]));
}
registry::Support supports_mma(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  if (size_of(problem.a.dtype) != 2) return registry::Support::no(kNeeds16Bit);
  if (!has_aligned_rows(problem.a) || !has_aligned_matrices(problem.b)) return registry::Support::no(kMisaligned);
  return registry::Support::unless(size_obstacle(rows_of(problem), problem.b.sizes[1], problem.b.sizes[2]));
}
registry::Support supports_weight_tile(const WeightGradient& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  const int64_t largest = std::max(problem.a.sizes[1], problem.b.sizes[1]);
  return registry::Support::unless(size_obstacle(largest, rows_of(problem), 0));
}
registry::Support supports_weight_mma(const WeightGradient& problem, const DeviceInfo& device) {
  const registry::Support support = supports_weight_tile(problem, device);
  if (!support) return support;
  if (size_of(problem.a.dtype) != 2) return registry::Support::no(kNeeds16Bit);
  if (!has_aligned_rows(problem.a) || !has_aligned_rows(problem.b)) return registry::Support::no(kMisaligned);
  return registry::Support::yes();
}
registry::Support supports_sums(const Sums& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.x.dtype, device));
}

product::GroupedTileArguments arguments_of(const Product& problem, const TensorView& sums) {
  product::GroupedTileArguments arguments{};
  product::TileArguments& product = arguments.product;
  const bool is_plain = problem.form == Form::kPlain;
  product.a = {.data = problem.a.data, .batch = 0, .outer = problem.a.strides[0], .inner = 1, .pair = 0};
  product.b = {.data = problem.b.data,
               .batch = problem.b.strides[0],
               .outer = problem.b.strides[2],
               .inner = problem.b.strides[1],
               .pair = 0};
  product.m = static_cast<int32_t>(rows_of(problem));
  product.n = static_cast<int32_t>(problem.b.sizes[2]);
  product.k = static_cast<int32_t>(problem.b.sizes[1]);
  product.alpha = product.beta = 1.0f;
  product.kind = is_plain ? problem.activation : Kind::kIdentity;
  product.bias = product::tile_matrix(problem.bias);
  product.output = product::tile_matrix(is_plain ? problem.output : sums);
  if (is_plain) product.preactivation = product::tile_matrix(problem.preactivation);
  arguments.offsets = problem.offsets.as<const int32_t>();
  arguments.gather_a = problem.gather.as<const int32_t>();
  arguments.groups = static_cast<int32_t>(problem.b.sizes[0]);
  arguments.bias_stride = problem.bias.is_present() ? problem.bias.strides[0] : 0;
  return arguments;
}

DeviceCode gate_code(DType dtype) {
  return {.source = kGateSource,
          .entry = concat("kernel_pytorch::grouped_matmul::gate<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void launch_gate(const Product& problem, const TensorView& sums, Context& context) {
  static const std::string kLabel = "grouped_matmul gate";
  static KernelTable<std::size(kCudaTypes)> table;
  GateArguments arguments{.preactivation = sums.data,
                          .output = problem.output.data,
                          .rows = rows_of(problem),
                          .columns = problem.output.sizes[1],
                          .preactivation_stride = sums.strides[0],
                          .output_stride = problem.output.strides[0],
                          .is_packed = problem.form == Form::kPackedGated,
                          .kind = problem.activation,
                          .limit = static_cast<float>(problem.limit),
                          .slope = static_cast<float>(problem.slope)};
  const int64_t blocks = divide_up(problem.output.element_count(), kThreads);
  KP_CHECK(blocks < int64_t{1} << 31, kLabel, ": the output has ", problem.output.element_count(),
           " elements; at most 2^39 are supported");
  const DType dtype = problem.output.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return gate_code(dtype); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

template <class Launch>
void run_product(const Product& problem, Context& context, const Launch& launch) {
  if (problem.output.element_count() == 0) return;
  TensorView sums = problem.preactivation;
  if (problem.form != Form::kPlain && !sums.is_present()) {
    sums = contiguous_view(nullptr, problem.output.dtype, {rows_of(problem), problem.b.sizes[2]}, context.device());
    sums.data = context.scratch->allocate(static_cast<size_t>(sums.byte_count()));
  }
  product::GroupedTileArguments arguments = arguments_of(problem, sums);
  launch(arguments);
  if (problem.form != Form::kPlain) launch_gate(problem, sums, context);
}

void run_mma(const Product& problem, int, Context& context) {
  static const std::string kLabel = "grouped_matmul mma";
  run_product(problem, context, [&](product::GroupedTileArguments& arguments) {
    product::grouped_mma_launch({problem.a.dtype, false, is_row_major(problem.b)}, arguments, context, kLabel);
  });
}
void run_tile(const Product& problem, int, Context& context) {
  static const std::string kLabel = "grouped_matmul tile";
  run_product(problem, context, [&](product::GroupedTileArguments& arguments) {
    product::grouped_tile_launch(problem.a.dtype, arguments, context, kLabel);
  });
}

// A column-major output is the row-major one of the operands exchanged.
product::GroupedTileArguments arguments_of(const WeightGradient& problem) {
  const bool swaps = !is_row_major(problem.output);
  const TensorView &a = swaps ? problem.b : problem.a, &b = swaps ? problem.a : problem.b;
  const TensorView& output = problem.output;
  product::GroupedTileArguments arguments{};
  product::TileArguments& product = arguments.product;
  product.a = {.data = a.data, .batch = 0, .outer = 1, .inner = a.strides[0], .pair = 0};
  product.b = {.data = b.data, .batch = 0, .outer = 1, .inner = b.strides[0], .pair = 0};
  product.m = static_cast<int32_t>(a.sizes[1]);
  product.n = static_cast<int32_t>(b.sizes[1]);
  product.k = static_cast<int32_t>(rows_of(problem));
  product.alpha = product.beta = 1.0f;
  product.kind = Kind::kIdentity;
  product.output = product::tile_matrix(output);
  product.output.row = output.strides[swaps ? 2 : 1];
  arguments.offsets = problem.offsets.as<const int32_t>();
  arguments.gather_a = (swaps ? problem.gather_b : problem.gather_a).as<const int32_t>();
  arguments.gather_b = (swaps ? problem.gather_a : problem.gather_b).as<const int32_t>();
  arguments.groups = static_cast<int32_t>(output.sizes[0]);
  arguments.by_depth = true;
  return arguments;
}

void run_weight_mma(const WeightGradient& problem, int, Context& context) {
  static const std::string kLabel = "grouped_matmul_weight mma";
  if (problem.output.element_count() == 0) return;
  product::GroupedTileArguments arguments = arguments_of(problem);
  product::grouped_mma_launch({problem.a.dtype, true, true}, arguments, context, kLabel);
}
void run_weight_tile(const WeightGradient& problem, int, Context& context) {
  static const std::string kLabel = "grouped_matmul_weight tile";
  if (problem.output.element_count() == 0) return;
  product::GroupedTileArguments arguments = arguments_of(problem);
  product::grouped_tile_launch(problem.a.dtype, arguments, context, kLabel);
}

DeviceCode sum_code(DType dtype) {
  return {.source = kSumSource,
          .entry = concat("kernel_pytorch::grouped_matmul::sum<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_sums(const Sums& problem, int, Context& context) {
  static const std::string kLabel = "group_sums";
  static KernelTable<std::size(kCudaTypes)> table;
  if (problem.output.element_count() == 0) return;
  SumArguments arguments{.x = problem.x.data,
                         .stride = problem.x.strides[0],
                         .ends = problem.offsets.as<const int32_t>(),
                         .gather = problem.gather.as<const int32_t>(),
                         .factors = problem.factors.as<const float>(),
                         .output = problem.output.data,
                         .rows = static_cast<int32_t>(rows_of(problem)),
                         .columns = static_cast<int32_t>(problem.x.sizes[1]),
                         .is_float = problem.output.dtype == DType::kFloat32};
  const DType dtype = problem.x.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return sum_code(dtype); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(problem.x.sizes[1], kSumColumns));
  shape.grid_y = static_cast<unsigned>(problem.output.sizes[0]);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t product_hash() {
  return product::grouped_source_hash() ^ jit::source_hash(kGateSource);
}
uint64_t sums_hash() {
  return jit::source_hash(kSumSource);
}

std::vector<DeviceCode> mma_device_code() {
  return {product::grouped_mma_code({DType::kBFloat16, false, false}),
          product::grouped_mma_code({DType::kBFloat16, false, true}), gate_code(DType::kBFloat16)};
}
std::vector<DeviceCode> tile_device_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) {
    codes.push_back(product::grouped_tile_code(dtype));
    codes.push_back(gate_code(dtype));
  }
  return codes;
}
std::vector<DeviceCode> weight_mma_device_code() {
  return {product::grouped_mma_code({DType::kBFloat16, true, true})};
}
std::vector<DeviceCode> weight_tile_device_code() {
  return {product::grouped_tile_code(DType::kFloat32)};
}
std::vector<DeviceCode> sums_device_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) codes.push_back(sum_code(dtype));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Product> kMma{.name = "cuda_mma",
                                               .supports = supports_mma,
                                               .run = run_mma,
                                               .source_hash = product_hash,
                                               .device_code = mma_device_code,
                                               .is_fallback = true};
constinit const registry::Kernel<Product> kTile{.name = "cuda_tile",
                                                .supports = supports_tile,
                                                .run = run_tile,
                                                .source_hash = product_hash,
                                                .device_code = tile_device_code,
                                                .is_fallback = true};
constinit const registry::Kernel<WeightGradient> kWeightMma{.name = "cuda_mma",
                                                            .supports = supports_weight_mma,
                                                            .run = run_weight_mma,
                                                            .source_hash = product::grouped_source_hash,
                                                            .device_code = weight_mma_device_code,
                                                            .is_fallback = true};
constinit const registry::Kernel<WeightGradient> kWeightTile{.name = "cuda_tile",
                                                             .supports = supports_weight_tile,
                                                             .run = run_weight_tile,
                                                             .source_hash = product::grouped_source_hash,
                                                             .device_code = weight_tile_device_code,
                                                             .is_fallback = true};
constinit const registry::Kernel<Sums> kSumsCuda{.name = "cuda",
                                                 .supports = supports_sums,
                                                 .run = run_sums,
                                                 .source_hash = sums_hash,
                                                 .device_code = sums_device_code};

}  // namespace kernel_pytorch::grouped_matmul
