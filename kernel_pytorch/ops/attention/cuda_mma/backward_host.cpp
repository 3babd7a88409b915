// cuda_mma, the backward that takes every option on every GPU since compute capability 8.0, bitwise repeatable.
#include <algorithm>
#include <bit>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/cuda_mma/backward_tiles.h"

namespace kernel_pytorch::attention {
namespace {

using namespace backward_tiles;

constexpr const char* kSource = "kernel_pytorch/ops/attention/cuda_mma/backward.cuh";
constexpr const char* kScoresSource = "kernel_pytorch/ops/attention/cuda_mma/scores.cuh";
constexpr const char* kFunction = "mma_backward";
constexpr const char* kCapturedSource = "kernel_pytorch/ops/attention/cuda_mma/captured.cuh";

const char* name_of(Of of) {
  constexpr const char* kNames[] = {"kernel_pytorch::attention::Of::kQueries", "kernel_pytorch::attention::Of::kKeys",
                                    "kernel_pytorch::attention::Of::kValues",
                                    "kernel_pytorch::attention::Of::kKeysAndValues"};
  return kNames[static_cast<int>(of)];
}

registry::Support supports(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = mma_obstacle(problem.query, problem.key, problem.value, device)) {
    return registry::Support::no(obstacle);
  }
  const Tiles tiles = tiles_of(problem, device, false);
  const int bytes = std::max(backward_shared_bytes(tiles.keys), backward_shared_bytes(tiles.queries));
  if (bytes > device.cuda.shared_bytes_per_block) return registry::Support::no(kMmaSharedMemory);
  if (has_float_results(problem) && problem.scoring.is_packed() && !problem.accumulate) {
    return registry::Support::no(kFloatPacks);
  }
  if (const char* obstacle = part_obstacle(problem.scoring)) return registry::Support::no(obstacle);
  return registry::Support::unless(captured_obstacle(problem.scoring));
}

std::vector<std::string> configs(const BackwardProblem& problem, const DeviceInfo& device) {
  return {config_text(tiles_of(problem, device, is_heavy(features_of(problem.scoring), problem.query.dtype)))};
}

DeviceCode plain_code(std::string_view source, std::string_view function) {
  DeviceCode code;
  code.source = source;
  code.entry = concat("kernel_pytorch::attention::", function);
  return code;
}
DeviceCode statistics_code(DType dtype, bool vectors) {
  return plain_code(kScoresSource,
                    concat("query_statistics<", element_type_name(dtype), ", ", bool_name(vectors), ">"));
}

// One call: what its launches share.
class Call {
 public:
  Call(const BackwardProblem& problem, Context& context)
      : problem_(problem), context_(context), index_(tile_index(problem)), dtype_(problem.query.dtype) {
    for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.output, &problem.grad_output,
                                   &problem.grad_query, &problem.grad_key, &problem.grad_value}) {
      vectors_ = vectors_ && has_vector_rows(*view);
    }
    arguments_.scores = score_arguments_of(problem.scoring, problem.query, problem.key, context);
    arguments_.query = row_tensor_of(problem.query);
    arguments_.key = row_tensor_of(problem.key);
    arguments_.value = row_tensor_of(problem.value);
    arguments_.grad_output = row_tensor_of(problem.grad_output);
    arguments_.grad_query = row_tensor_of(problem.grad_query);
    arguments_.grad_key = row_tensor_of(problem.grad_key);
    arguments_.grad_value = row_tensor_of(problem.grad_value);
    arguments_.size = static_cast<int32_t>(problem.query.size(3));
    arguments_.value_size = static_cast<int32_t>(problem.value.size(3));
    arguments_.float_results = has_float_results(problem);
  }

  void run() {
    if (problem_.scoring.is_packed() && !problem_.accumulate) clear_rows();
    measure_queries();
    const ScoreArguments& scores = arguments_.scores;
    const int64_t heads = scores.heads;
    const Tiles tiles = tiles_of(problem_, *context_.info, is_heavy(features_of(problem_.scoring), dtype_));
    const int64_t key_heads = int64_t{scores.batches} * (heads / scores.group);
    if (has_own_values(tiles.keys)) {
      launch_large(Of::kValues, tiles.keys, scores.keys, key_heads);
      launch_large(Of::kKeys, tiles.keys, scores.keys, key_heads);
    } else {
      launch_large(Of::kKeysAndValues, tiles.keys, scores.keys, key_heads);
    }
    launch_large(Of::kQueries, tiles.queries, scores.queries, scores.batches * heads);
    if (problem_.grad_bias.is_present()) add_bias();
    if (problem_.grad_sinks.is_present()) add_sinks();
    if (std::ranges::any_of(problem_.grad_captured, &TensorView::is_present)) add_captured();
  }

 private:
  static constexpr uint32_t kBias = 4;  // a kernel more than those of Of

  Features features_for(const MmaTile& tile, bool rows_are_keys) const {
    const int64_t queries = rows_are_keys ? tile.columns : rows_of(tile);
    return mma_features_of(problem_.scoring, dtype_, queries, rows_are_keys ? rows_of(tile) : tile.columns);
  }
  void need_block_map(const Features& features) {
    if (features.block_map && arguments_.scores.block_map.states == nullptr) {
      add_block_map(problem_.scoring, arguments_.scores, context_);
    }
  }

  void clear_rows() {
    const Scoring& scoring = problem_.scoring;
    clear_rows_past_sequences(problem_.grad_query, {}, scoring.cu_seqlens_q, context_);
    clear_rows_past_sequences(problem_.grad_key, {}, scoring.cu_seqlens_k, context_);
    clear_rows_past_sequences(problem_.grad_value, {}, scoring.cu_seqlens_k, context_);
  }

  void measure_queries() {
    static const std::string kLabel = "attention_backward/cuda_mma query statistics";
    static KernelTable<6> table;
    const int64_t rows = problem_.query.size(0) * problem_.query.size(1) * problem_.query.size(2);
    if (rows == 0) return;
    auto* statistics =
        static_cast<QueryStatistics*>(context_.scratch->allocate(static_cast<size_t>(rows) * sizeof(QueryStatistics)));
    arguments_.statistics = statistics;
    StatisticsArguments arguments{.output = row_tensor_of(problem_.output),
                                  .grad_output = arguments_.grad_output,
                                  .lse = problem_.lse.as<const float>(),
                                  .grad_lse = problem_.grad_lse.is_present() ? problem_.grad_lse.as<float>() : nullptr,
                                  .statistics = statistics,
                                  .rows = rows,
                                  .heads = static_cast<int32_t>(problem_.query.size(1)),
                                  .queries = static_cast<int32_t>(problem_.query.size(2)),
                                  .value_size = arguments_.value_size};
    const int entry = cuda_type_index(dtype_) * 2 + (vectors_ ? 1 : 0);
    CUkern_st* kernel = table.get(entry, context_, [&] { return statistics_code(dtype_, vectors_); });
    launch(kernel, divide_up(rows, 32), 256, 0, &arguments, kLabel);
  }

  void launch_large(Of of, const MmaTile& tile, int64_t rows, int64_t heads) {
    static const std::string kLabel = "attention_backward/cuda_mma";
    static FeatureKernels kernels;
    const bool for_keys = of != Of::kQueries;
    const Features features = features_for(tile, for_keys);
    need_block_map(features);
    arguments_.accumulates = for_keys ? problem_.adds_to_keys() : problem_.accumulate;
    arguments_.tiles = static_cast<int32_t>(divide_up(rows, rows_of(tile)));
    const int widest = of == Of::kKeysAndValues ? std::max(tile.size, tile.value_size)
                       : of == Of::kValues      ? tile.value_size
                                                : tile.size;
    const int64_t blocks = arguments_.tiles * heads * slices_of(widest, tile.slice);
    if (blocks == 0) return;
    arguments_.places = order_lists(features, arguments_.scores, !for_keys, rows_of(tile), heads, context_);
    CUkern_st* kernel = kernels.get(features, variant_of(static_cast<uint32_t>(of)), context_, [&] {
      return mma_code(kSource, kFunction, {features, dtype_, tile, vectors_}, program_text(problem_.scoring),
                      name_of(of));
    });
    launch(kernel, blocks, tile.warps * 32, backward_shared_bytes(tile), &arguments_, kLabel);
  }

  void add_bias() {
    static const std::string kLabel = "attention_backward/cuda_mma bias";
    static FeatureKernels kernels;
    if (problem_.grad_bias.element_count() == 0) return;
    const MmaTile tile = tiles_of(problem_, *context_.info, false).queries;
    Features features = features_for(tile, false);
    features.block_map = features.block_map || features.blocks;  // tiles are not walked over here, each is asked
    features.blocks = false;
    need_block_map(features);
    MmaBiasArguments arguments{.backward = arguments_,
                               .grad_bias = problem_.grad_bias.as<float>(),
                               .batches = static_cast<int32_t>(problem_.grad_bias.size(0)),
                               .heads = static_cast<int32_t>(problem_.grad_bias.size(1)),
                               .queries = static_cast<int32_t>(problem_.grad_bias.size(2)),
                               .adds = false};
    const ScoreArguments& scores = arguments_.scores;
    const int64_t key_tiles = divide_up(scores.keys, tile.columns),
                  query_tiles = divide_up(scores.queries, rows_of(tile));
    const int64_t every = key_tiles * query_tiles * scores.batches * scores.heads;
    int64_t blocks = key_tiles * (arguments.queries == 1 ? 1 : query_tiles) * arguments.batches * arguments.heads;
    arguments.adds =
        !problem_.scoring.deterministic && blocks < every && blocks < 4 * context_.info->cuda.multiprocessors;
    if (arguments.adds) {
      blocks = every;
      cuda_device::fill_bytes(context_.info->device.index, arguments.grad_bias, 0,
                              static_cast<size_t>(problem_.grad_bias.byte_count()), context_.stream);
    }
    CUkern_st* kernel = kernels.get(features, variant_of(kBias), context_, [&] {
      return mma_code(kScoresSource, "mma_backward_bias", {features, dtype_, tile, vectors_},
                      program_text(problem_.scoring));
    });
    launch(kernel, blocks, tile.warps * 32, backward_shared_bytes(tile), &arguments, kLabel);
  }

  void add_sinks() {
    static const std::string kLabel = "attention_backward/cuda_mma sinks";
    static KernelTable<1> table;
    if (problem_.grad_sinks.element_count() == 0) return;
    SinksArguments arguments{.statistics = arguments_.statistics,
                             .sinks = arguments_.scores.sinks,
                             .sinks_stride = arguments_.scores.sinks_stride,
                             .query_offsets = arguments_.scores.query_offsets,
                             .grad_sinks = problem_.grad_sinks.as<float>(),
                             .grad_sinks_stride = problem_.grad_sinks.strides[0],
                             .batches = static_cast<int32_t>(problem_.query.size(0)),
                             .sequences = arguments_.scores.batches,
                             .heads = arguments_.scores.heads,
                             .queries = static_cast<int32_t>(problem_.query.size(2))};
    CUkern_st* kernel = table.get(0, context_, [] { return plain_code(kScoresSource, "grad_sinks"); });
    launch(kernel, arguments.heads, 1024, 0, &arguments, kLabel);
  }

  // Floats are added by atomics; whole numbers, where the sum must not depend on its order, take two rounds.
  void add_captured() {
    MmaCapturedArguments arguments{};
    set_captured_sums(arguments);
    if (problem_.scoring.score_mod.empty()) return;  // a mask has no gradient: zeros
    if (problem_.scoring.deterministic) {
      launch_captured(arguments, CapturedMode::kMeasure);
      launch_captured(arguments, CapturedMode::kWholeNumbers);
      convert_captured(arguments);
    } else {
      launch_captured(arguments, CapturedMode::kFloats);
    }
  }

  void set_captured_sums(MmaCapturedArguments& arguments) {
    const ScoreArguments& scores = arguments_.scores;
    arguments.backward = arguments_;
    arguments.addend_bits = std::bit_width(static_cast<uint64_t>(scores.batches) * static_cast<uint64_t>(scores.heads) *
                                           static_cast<uint64_t>(scores.queries) * static_cast<uint64_t>(scores.keys));
    arguments.largest = static_cast<int32_t*>(zeros(sizeof(int32_t) * kMaximumCaptured));
    for (size_t i = 0; i < problem_.grad_captured.size(); ++i) {
      const TensorView& grad = problem_.grad_captured[i];
      if (!grad.is_present() || grad.element_count() == 0) continue;
      arguments.backward.scores.captured[i].gradient = grad.as<float>();
      arguments.counts[i] = grad.element_count();
      const size_t bytes = static_cast<size_t>(grad.byte_count());
      cuda_device::fill_bytes(context_.info->device.index, grad.data, 0, bytes, context_.stream);
      if (problem_.scoring.deterministic) arguments.sums[i] = static_cast<int64_t*>(zeros(2 * bytes));
    }
  }
  void* zeros(size_t bytes) {
    void* memory = context_.scratch->allocate(bytes);
    cuda_device::fill_bytes(context_.info->device.index, memory, 0, bytes, context_.stream);
    return memory;
  }

  void launch_captured(MmaCapturedArguments& arguments, CapturedMode mode) {
    static const std::string kLabel = "attention_backward/cuda_mma captured";
    const MmaTile tile = tiles_of(problem_, *context_.info, false).queries;
    const Features features = features_for(tile, false);
    const ScoreArguments& scores = arguments_.scores;
    arguments.mode = mode;
    const int64_t blocks =
        divide_up(scores.queries, rows_of(tile)) * scores.batches * scores.heads * slices_of(tile.size, tile.slice);
    if (blocks == 0) return;
    CUkern_st* kernel = load_kernel(mma_code(kCapturedSource, "mma_backward_captured",
                                             {features, dtype_, tile, vectors_}, program_text(problem_.scoring)),
                                    context_);
    launch(kernel, blocks, tile.warps * 32, backward_shared_bytes(tile), &arguments, kLabel);
  }

  void convert_captured(MmaCapturedArguments& arguments) {
    static const std::string kLabel = "attention_backward/cuda_mma captured sums";
    CUkern_st* kernel = load_kernel(plain_code(kCapturedSource, "captured_sums"), context_);
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = 256;
    shape.grid_y = static_cast<unsigned>(problem_.grad_captured.size());
    shape.block_x = 128;
    cuda_device::launch(context_, kernel, shape, pointers, kLabel);
  }

  uint32_t variant_of(uint32_t kind) const {
    return kind << 8 | static_cast<uint32_t>(index_) << 3 | static_cast<uint32_t>(cuda_type_index(dtype_)) << 1 |
           (vectors_ ? 1u : 0u);
  }

  void launch(CUkern_st* kernel, int64_t blocks, int threads, int shared_bytes, void* arguments,
              const std::string& label) {
    KP_CHECK(blocks <= 0x7fffffff, "attention: ", blocks, " tiles are more than a launch can have");
    void* pointers[] = {arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(blocks);
    shape.block_x = static_cast<unsigned>(threads);
    shape.shared_bytes = static_cast<unsigned>(shared_bytes);
    cuda_device::launch(context_, kernel, shape, pointers, label);
  }

  const BackwardProblem& problem_;
  Context& context_;
  int index_;
  DType dtype_;
  bool vectors_ = true;
  MmaBackwardArguments arguments_{};
};

void run(const BackwardProblem& problem, int, Context& context) {
  Call(problem, context).run();
}

uint64_t source_hash() {
  return jit::source_hash(kScoresSource);
}

std::vector<DeviceCode> codes_on(const DeviceInfo& gpu) {
  const auto on_gpu = [&](std::span<const MmaTile> tiles) { return tiles_on(gpu, tiles, fit, backward_shared_bytes); };
  std::vector<DeviceCode> codes =
      mma_codes(kSource, kFunction, on_gpu(kKeyTiles), on_gpu(kHeavyKeyTiles), name_of(Of::kKeysAndValues));
  const auto add = [&](std::vector<DeviceCode> more) {
    for (DeviceCode& code : more) codes.push_back(std::move(code));
  };
  const std::vector<MmaTile> query_tiles = on_gpu(kQueryTiles), float_query_tiles = on_gpu(kFloatQueryTiles);
  add(mma_codes(kSource, kFunction, query_tiles, on_gpu(kHeavyQueryTiles), name_of(Of::kQueries)));
  const std::vector<MmaTile> tiles = on_gpu(kFloatKeyTiles), heavy_tiles = on_gpu(kHeavyFloatKeyTiles);
  const auto shared = static_cast<size_t>(std::ranges::find_if(tiles, has_own_values) - tiles.begin());
  const auto add_keys = [&](Of of, size_t first, size_t count, int size) {
    const auto part = [&](std::span<const MmaTile> list) { return list.subspan(first, count); };
    if (count > 0) add(mma_float_codes(kSource, kFunction, part(tiles), part(heavy_tiles), size, name_of(of)));
  };
  add_keys(Of::kKeysAndValues, 0, shared, 64);
  add_keys(Of::kKeys, shared, tiles.size() - shared, 128);
  add_keys(Of::kValues, shared, tiles.size() - shared, 128);
  add(mma_float_codes(kSource, kFunction, float_query_tiles, on_gpu(kHeavyFloatQueryTiles), 128,
                      name_of(Of::kQueries)));
  Features bias;
  bias.bias = bias.bias_pairs = true;
  codes.push_back(mma_code(kScoresSource, "mma_backward_bias", {bias, DType::kBFloat16, query_tiles[2], true}, {}));
  bias.float_bias = true;
  bias.bias = false;
  codes.push_back(
      mma_code(kScoresSource, "mma_backward_bias", {bias, DType::kFloat32, float_query_tiles[2], true}, {}));
  for (const NamedFeatures& named : compiled_features()) {
    if (!named.features.score_mod) continue;
    codes.push_back(mma_code(kCapturedSource, "mma_backward_captured",
                             {named.features, DType::kFloat32, float_query_tiles[2], true}, named.generated));
    codes.push_back(mma_code(kCapturedSource, "mma_backward_captured",
                             {named.features, DType::kBFloat16, query_tiles[0], true}, named.generated));
  }
  return codes;
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes = codes_by_shared_memory(codes_on);
  for (const bool vectors : {false, true}) {
    for (const DType dtype : kCudaTypes) codes.push_back(statistics_code(dtype, vectors));
  }
  codes.push_back(plain_code(kScoresSource, "grad_sinks"));
  codes.push_back(plain_code(kCapturedSource, "captured_sums"));
  return codes;
}

}  // namespace

constinit const registry::Kernel<BackwardProblem> kBackwardCudaMma{.name = "cuda_mma",
                                                                   .origin = registry::Origin::kOurs,
                                                                   .supports = supports,
                                                                   .configs = configs,
                                                                   .heuristic = nullptr,
                                                                   .run = run,
                                                                   .source_hash = source_hash,
                                                                   .device_code = device_code};

}  // namespace kernel_pytorch::attention
