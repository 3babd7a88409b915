// cuda_mma_fp64, the forward and backward of fp64 on a GPU: dense tensors and what stands between the products without
// programs, lists of tiles, packed sequences or dropout. Calls with those are computed on the host
// (registry/host_call.h asks `supports`).
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/cuda_double/tile_cuda.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::attention {

constexpr auto kDoubleTileFields = config_fields<DoubleTile>(
    config_field<&DoubleTile::size>(), config_field<&DoubleTile::warps>(), config_field<&DoubleTile::columns>());
constexpr ConfigFields fields_of(const DoubleTile&) {
  return kDoubleTileFields;
}

namespace {

constexpr const char* kDoubleForwardSource = "kernel_pytorch/ops/attention/cuda_double/forward.cuh";
constexpr const char* kDoubleBackwardSource = "kernel_pytorch/ops/attention/cuda_double/backward.cuh";
constexpr const char* kNotDouble = "takes fp64";
constexpr const char* kDoubleSizes = "takes fp64 heads of up to 128 columns";
constexpr const char* kDoubleLong = "takes sequences below 2^30 and 65535 heads of all batches";
constexpr const char* kDoubleMemory = "this head size needs more shared memory than the device's blocks have";
constexpr const char* kDoubleOptions =
    "of fp64 takes no packed sequences, block lists, programs, dropout or parts of a whole";
constexpr const char* kDoubleGradients = "of fp64 gives no gradients of bias, sinks or captured tensors";
constexpr int64_t kDoubleLongest = int64_t{1} << 30;
constexpr int64_t kUnbounded = int64_t{1} << 40;  // more than any distance

constexpr DoubleTile kDoubleTiles[] = {{.size = 64, .warps = 4, .columns = 16},
                                       {.size = 128, .warps = 4, .columns = 16}};
static_assert(are_legal(kDoubleTiles));

// With fewer warps where blocks have less shared memory.
template <class Bytes>
DoubleTile double_tile(int64_t size, const DeviceInfo& device, const Bytes& bytes) {
  DoubleTile tile = kDoubleTiles[size > 64];
  while (bytes(tile) > device.cuda.shared_bytes_per_block && tile.warps > 1) tile.warps /= 2;
  return tile;
}

template <class Problem>
const char* double_obstacle(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return obstacle;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.output}) {
    if (view->dtype != DType::kFloat64 || view->rank != 4) return kNotDouble;
  }
  const Scoring& scoring = problem.scoring;
  if (scoring.is_packed() || scoring.block_list.is_present() || !scoring.score_mod.empty() ||
      !scoring.mask_mod.empty() || scoring.dropout_p > 0 || scoring.is_part() || problem.accumulate) {
    return kDoubleOptions;
  }
  const Sizes sizes = sizes_of(problem);
  if (std::max(sizes.size, sizes.value_size) > kDoubleTiles[1].size) return kDoubleSizes;
  const bool is_long = std::max(sizes.queries, sizes.keys) >= kDoubleLongest || sizes.batch * sizes.heads > 65535;
  return is_long ? kDoubleLong : nullptr;
}

ScoreTensor double_scores_of(const TensorView& view) {
  if (!view.is_present()) return {};
  const bool has_scores = view.rank == 4;
  return {.data = view.data,
          .batch = view.strides[0],
          .head = view.strides[1],
          .query = has_scores ? view.strides[2] : 0,
          .key = has_scores ? view.strides[3] : 0};
}

template <class Problem>
DoubleArguments double_arguments(const Problem& problem) {
  const Sizes sizes = sizes_of(problem);
  const Scoring& scoring = problem.scoring;
  DoubleArguments arguments{};
  arguments.query = row_tensor_of(problem.query);
  arguments.key = row_tensor_of(problem.key);
  arguments.value = row_tensor_of(problem.value);
  arguments.output = row_tensor_of(problem.output);
  arguments.lse = problem.lse.is_present() ? problem.lse.template as<double>() : nullptr;
  arguments.batches = static_cast<int32_t>(sizes.batch);
  arguments.heads = static_cast<int32_t>(sizes.heads);
  arguments.group = static_cast<int32_t>(sizes.group());
  arguments.queries = static_cast<int32_t>(sizes.queries);
  arguments.keys = static_cast<int32_t>(sizes.keys);
  arguments.size = static_cast<int32_t>(sizes.size);
  arguments.value_size = static_cast<int32_t>(sizes.value_size);
  arguments.left = scoring.window_left >= 0 ? std::min(scoring.window_left, kUnbounded) : kUnbounded;
  arguments.right = scoring.causal              ? 0
                    : scoring.window_right >= 0 ? std::min(scoring.window_right, kUnbounded)
                                                : kUnbounded;
  arguments.has_offset = scoring.causal_offset.has_value();
  arguments.offset = scoring.offset().value_or(0);
  arguments.softcap_after = scoring.softcap_after_bias;
  arguments.scale = *scoring.scale;
  arguments.softcap = scoring.softcap;
  arguments.bias = double_scores_of(scoring.bias);
  arguments.mask = double_scores_of(scoring.mask);
  arguments.alibi_slopes = double_scores_of(scoring.alibi_slopes);
  if (scoring.sinks.is_present()) {
    arguments.sinks = scoring.sinks.as<const double>();
    arguments.sinks_stride = scoring.sinks.strides[0];
  }
  if (const TensorView& ids = scoring.query_segment_ids; ids.is_present()) {
    arguments.query_ids = ids.as<const int32_t>();
    arguments.query_ids_batch = ids.strides[0];
    arguments.query_ids_row = ids.strides[1];
    arguments.key_ids = scoring.key_segment_ids.as<const int32_t>();
    arguments.key_ids_batch = scoring.key_segment_ids.strides[0];
    arguments.key_ids_row = scoring.key_segment_ids.strides[1];
  }
  if (scoring.key_lengths.is_present()) {
    arguments.key_lengths = scoring.key_lengths.as<const int32_t>();
    arguments.key_lengths_stride = scoring.key_lengths.strides[0];
  }
  return arguments;
}

DeviceCode double_forward_code(const DoubleTile& tile) {
  DeviceCode code;
  code.source = kDoubleForwardSource;
  code.entry = concat("kernel_pytorch::attention::double_forward<", device_text(tile), ">");
  return code;
}
DeviceCode double_backward_code(const DoubleTile& tile, DoubleOf of) {
  constexpr const char* kNames[] = {"kQueries", "kKeys", "kValues"};
  DeviceCode code;
  code.source = kDoubleBackwardSource;
  code.entry = concat("kernel_pytorch::attention::double_backward<", device_text(tile),
                      ", kernel_pytorch::attention::DoubleOf::", kNames[static_cast<int>(of)], ">");
  return code;
}
DeviceCode double_statistics_code() {
  DeviceCode code;
  code.source = kDoubleBackwardSource;
  code.entry = "kernel_pytorch::attention::double_statistics";
  return code;
}
int tile_entry(const DoubleTile& tile) {  // warps 4, 2, 1
  return (tile.size > 64) * 3 + (tile.warps == 4 ? 0 : tile.warps == 2 ? 1 : 2);
}

template <class Problem>
int64_t widest(const Problem& problem) {
  return std::max(problem.query.sizes[3], problem.value.sizes[3]);
}

registry::Support supports_double_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = double_obstacle(problem, device)) return registry::Support::no(obstacle);
  const DoubleTile tile = double_tile(widest(problem), device, double_forward_bytes);
  const bool is_large = double_forward_bytes(tile) > device.cuda.shared_bytes_per_block;
  return registry::Support::unless(is_large ? kDoubleMemory : nullptr);
}

void run_double_forward(const ForwardProblem& problem, int, Context& context) {
  static const std::string kLabel = "attention_forward/cuda_mma_fp64";
  static KernelTable<6> kernels;
  DoubleArguments arguments = double_arguments(problem);
  if (arguments.batches * arguments.heads == 0 || arguments.queries == 0) return;
  const DoubleTile tile = double_tile(widest(problem), *context.info, double_forward_bytes);
  CUkern_st* kernel = kernels.get(tile_entry(tile), context, [&] { return double_forward_code(tile); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(arguments.queries, double_rows(tile)));
  shape.grid_y = static_cast<unsigned>(arguments.batches * arguments.heads);
  shape.block_x = static_cast<unsigned>(32 * tile.warps);
  shape.shared_bytes = static_cast<unsigned>(double_forward_bytes(tile));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

registry::Support supports_double_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = double_obstacle(problem, device)) return registry::Support::no(obstacle);
  if (problem.grad_bias.is_present() || problem.grad_sinks.is_present() ||
      std::ranges::any_of(problem.grad_captured, &TensorView::is_present)) {
    return registry::Support::no(kDoubleGradients);
  }
  const DoubleTile tile = double_tile(widest(problem), device, double_backward_bytes);
  const bool is_large = double_backward_bytes(tile) > device.cuda.shared_bytes_per_block;
  return registry::Support::unless(is_large ? kDoubleMemory : nullptr);
}

void run_double_backward(const BackwardProblem& problem, int, Context& context) {
  static const std::string kLabel = "attention_backward/cuda_mma_fp64";
  static KernelTable<18> kernels;
  static KernelTable<1> statistics;
  DoubleArguments arguments = double_arguments(problem);
  const Sizes sizes = sizes_of(problem);
  void* pointers[] = {&arguments};
  arguments.grad_output = row_tensor_of(problem.grad_output);
  arguments.grad_lse = problem.grad_lse.is_present() ? problem.grad_lse.as<const double>() : nullptr;
  const int64_t rows = sizes.batch * sizes.heads * sizes.queries;
  if (rows > 0) {
    arguments.delta = static_cast<double*>(context.scratch->allocate(static_cast<size_t>(rows) * sizeof(double)));
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(divide_up(rows, 4));
    shape.block_x = 128;
    cuda_device::launch(context, statistics.get(0, context, double_statistics_code), shape, pointers, kLabel);
  }
  const DoubleTile tile = double_tile(widest(problem), *context.info, double_backward_bytes);
  const auto launch = [&](DoubleOf of, const TensorView& result) {
    const int64_t heads = of == DoubleOf::kQueries ? sizes.heads : sizes.key_heads;
    const int64_t lines = of == DoubleOf::kQueries ? sizes.queries : sizes.keys;
    if (sizes.batch * heads * lines == 0) return;
    arguments.result = row_tensor_of(result);
    CUkern_st* kernel = kernels.get(tile_entry(tile) * 3 + static_cast<int>(of), context,
                                    [&] { return double_backward_code(tile, of); });
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(divide_up(lines, double_rows(tile)));
    shape.grid_y = static_cast<unsigned>(sizes.batch * heads);
    shape.block_x = static_cast<unsigned>(32 * tile.warps);
    shape.shared_bytes = static_cast<unsigned>(double_backward_bytes(tile));
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  };
  launch(DoubleOf::kQueries, problem.grad_query);
  launch(DoubleOf::kKeys, problem.grad_key);
  launch(DoubleOf::kValues, problem.grad_value);
}

std::vector<DeviceCode> double_forward_codes() {
  std::vector<DeviceCode> codes;
  for (const DoubleTile& tile : kDoubleTiles) codes.push_back(double_forward_code(tile));
  return codes;
}
std::vector<DeviceCode> double_backward_codes() {
  std::vector<DeviceCode> codes = {double_statistics_code()};
  for (DoubleTile tile : kDoubleTiles) {
    for (const DoubleOf of : {DoubleOf::kQueries, DoubleOf::kKeys, DoubleOf::kValues}) {
      codes.push_back(double_backward_code(tile, of));
      tile.warps = 2;
      codes.push_back(double_backward_code(tile, of));
      tile.warps = 4;
    }
  }
  return codes;
}

uint64_t double_forward_hash() {
  return jit::source_hash(kDoubleForwardSource);
}
uint64_t double_backward_hash() {
  return jit::source_hash(kDoubleBackwardSource);
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaDouble{.name = "cuda_mma_fp64",
                                                                    .origin = registry::Origin::kOurs,
                                                                    .supports = supports_double_forward,
                                                                    .configs = nullptr,
                                                                    .heuristic = nullptr,
                                                                    .run = run_double_forward,
                                                                    .source_hash = double_forward_hash,
                                                                    .device_code = double_forward_codes,
                                                                    .is_fallback = true};
constinit const registry::Kernel<BackwardProblem> kBackwardCudaDouble{.name = "cuda_mma_fp64",
                                                                      .origin = registry::Origin::kOurs,
                                                                      .supports = supports_double_backward,
                                                                      .configs = nullptr,
                                                                      .heuristic = nullptr,
                                                                      .run = run_double_backward,
                                                                      .source_hash = double_backward_hash,
                                                                      .device_code = double_backward_codes,
                                                                      .is_fallback = true};

}  // namespace kernel_pytorch::attention
