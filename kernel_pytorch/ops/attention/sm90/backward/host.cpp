// The backward of attention on sm_90: three launches (see tile_cuda.h), scratch of O(queries * size).
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/attention/sm90/backward/config.h"

namespace kernel_pytorch::attention {
namespace {

using namespace sm90_backward;

constexpr const char* kMainSource = "kernel_pytorch/ops/attention/sm90/backward/kernel.cuh";
constexpr const char* kRowsSource = "kernel_pytorch/ops/attention/sm90/backward/rows.cuh";
constexpr int64_t kLongest = int64_t{1} << 30;
constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16};

std::vector<std::string> configs(const BackwardProblem& problem, const DeviceInfo&) {
  std::vector<std::string> texts{config_text(variant_of(problem, 0).tile)};
  if (!needs_heavy_tile(problem)) texts.push_back(config_text(variant_of(problem, 1).tile));
  return texts;
}

// The types of operands and of results, which may be fp32.
struct Types {
  DType operand, result;
  explicit Types(DType type) : operand(type), result(type) {}
  Types(DType operand, DType result) : operand(operand), result(result) {}
  std::string text() const { return concat(element_type_name(operand), ", ", element_type_name(result)); }
};
DeviceCode main_code(const Features& features, const BackwardTile& tile, Types types, const std::string& generated) {
  return {.source = kMainSource,
          .entry = concat("kernel_pytorch::attention::backward_keys<", types.text(), ", ", device_text(features), ", ",
                          device_text(tile), ">"),
          .minimum_capability = 90,
          .architecture_specific = true,
          .generated = generated};
}
DeviceCode rows_code(std::string_view function, std::string_view arguments) {
  return {.source = kRowsSource,
          .entry = concat("kernel_pytorch::attention::", function, arguments),
          .minimum_capability = 90};
}
DeviceCode prepare_code(const BackwardTile& tile, DType dtype, bool is_packed) {
  const int vectors = tile.value > 128 ? 2 : 1;
  return rows_code("backward_prepare", concat("<", element_type_name(dtype), ", ", tile.queries, ", ", vectors, ", ",
                                              bool_name(is_packed), ">"));
}
DeviceCode finish_code(const BackwardTile& tile, Types types, bool is_packed) {
  return rows_code("backward_finish",
                   concat("<", types.text(), ", ", tile.queries, ", ", tile.head, ", ", bool_name(is_packed), ">"));
}

WalkTiles walk_tiles(const BackwardTile& tile) {
  return {.over_keys = false, .rows = tile.keys, .columns = tile.queries};
}

template <class T>
T* allocate(Context& context, int64_t count) {
  return static_cast<T*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(T)));
}

// Keys at the end of a window's sequence are seen by fewer queries than the window has. (Lengths of a batch are not
// known here; any number is right.)
BackwardOrder order_of(const BackwardProblem& problem, const Features& features, const BackwardTile& tile,
                       const ScoreArguments& score) {
  const int64_t blocks =
      features.packed ? score.key_tokens / tile.keys + score.batches : divide_up(problem.key.size(2), tile.keys);
  const int64_t units = problem.key.size(1) * (features.packed ? 1 : problem.key.size(0));
  int64_t full = blocks;
  if (features.left_bound && features.right_bound && !features.packed && !features.blocks && !tile.in_turns) {
    const int64_t offset = score.has_offset ? score.offset : int64_t{score.keys} - score.queries;
    const int64_t ending = (score.queries + offset + score.left) / tile.keys;
    if (ending > 0 && ending < blocks) full = ending;
  }
  return {.key_blocks = static_cast<int32_t>(blocks),
          .full_blocks = static_cast<int32_t>(std::max<int64_t>(full, 1)),
          .units = static_cast<int32_t>(units),
          .places = nullptr};
}
// Lists are sorted in two sections: with more the longest begin late, with one prepare has all sums to zero.
int32_t list_section(int32_t units) {
  return units % 2 == 0 ? std::max(units / 2, 1) : units;
}
// Two blocks for each multiprocessor are under way or about to be. In turns blocks come from the other end: all.
ZeroedSums zeroed_of(const BackwardOrder& order, const BackwardTile& tile, Context& context) {
  const int32_t units = order.places == nullptr ? 1 : list_section(order.units), sections = order.units / units;
  const int64_t ahead =
      divide_up(2 * std::max(context.info->cuda.multiprocessors, 1), int64_t{units} * order.full_blocks);
  return {.section_units = units,
          .sections = sections,
          .sections_ahead = tile.in_turns ? sections : static_cast<int32_t>(std::min<int64_t>(ahead, sections)),
          .counts = allocate<uint32_t>(context, sections)};
}

// One call: what its launches share.
class Run {
 public:
  Run(const BackwardProblem& problem, const Variant& variant, Context& context)
      : problem_(problem), context_(context), variant_(variant) {
    const BackwardTile& tile = variant_.tile;
    features_ = features_of(problem.scoring, tile.queries, tile.keys);
    score_ = score_arguments_of(problem.scoring, problem.query, problem.key, context);
    if (features_.block_map) add_block_map(problem.scoring, score_, context);
    plan_segments(features_, walk_tiles(tile), score_, context);
    const int64_t tiles = features_.packed ? score_.query_tokens / tile.queries + score_.batches
                                           : divide_up(problem.query.size(2), tile.queries);
    const int64_t tile_count = tiles * score_.heads * (features_.packed ? 1 : score_.batches);
    KP_CHECK(tile_count <= 0x3fffffff, "attention_backward: ", tile_count,
             " tiles of queries are more than a launch can have");
    tiles_ = {static_cast<int32_t>(tiles), static_cast<int32_t>(tile_count)};
    records_ = allocate<float>(context, tile_count * tile.queries * 2);
    sums_ = allocate<float>(context, tile_count * tile.queries * tile.head);
    if (tile.in_turns) turns_ = allocate<uint32_t>(context, tile_count);
    if (problem.grad_sinks.is_present()) sink_sums_ = allocate<float>(context, tile_count);
    order_ = order_of(problem, features_, tile, score_);
    order_.places = order_lists(features_, score_, false, tile.keys, list_section(order_.units), context);
    zeroed_ = zeroed_of(order_, tile, context);
  }

  void prepare() const {
    static const std::string kLabel = "attention_backward/sm90 prepare";
    PrepareArguments arguments{
        .score = score_,
        .output = row_tensor_of(problem_.output),
        .grad_output = row_tensor_of(problem_.grad_output),
        .lse = problem_.lse.as<const float>(),
        .grad_lse = problem_.grad_lse.is_present() ? problem_.grad_lse.as<const float>() : nullptr,
        .records = records_,
        .grad_query_sums = sums_,
        .sink_sums = sink_sums_,
        .turns = turns_,
        .tiles = tiles_,
        .zeroed = zeroed_,
        .columns = static_cast<int32_t>(problem_.value.size(3)),
        .sum_columns = variant_.tile.head};
    launch(0, arguments, tiles_.tile_count, kPrepareThreads, 0, false, kLabel);
  }

  void main() const {
    static const std::string kLabel = "attention_backward/sm90";
    BackwardArguments arguments{};
    arguments.score = score_;
    arguments.grad_key = row_tensor_of(problem_.grad_key);
    arguments.grad_value = row_tensor_of(problem_.grad_value);
    arguments.records = records_;
    arguments.grad_query_sums = sums_;
    arguments.turns = turns_;
    arguments.tiles = tiles_;
    arguments.head_columns = static_cast<int32_t>(problem_.query.size(3));
    arguments.value_columns = static_cast<int32_t>(problem_.value.size(3));
    arguments.order = order_;
    arguments.zeroed = zeroed_;
    arguments.accumulates = problem_.adds_to_keys();
    if (problem_.query.element_count() > 0 && problem_.key.element_count() > 0) {
      const cuda_device::CurrentDevice current(context_.info->device.index);
      cuda_device::encode_tensor_map(problem_.query, 64, arguments.query.words);
      cuda_device::encode_tensor_map(problem_.key, 64, arguments.key.words);
      cuda_device::encode_tensor_map(problem_.value, 64, arguments.value.words);
      cuda_device::encode_tensor_map(problem_.grad_output, 64, arguments.grad_output.words);
    }
    launch(1, arguments, int64_t{order_.key_blocks} * order_.units, kBackwardThreads,
           backward_shared_bytes(variant_.tile), true, kLabel);
  }

  void finish() const {
    static const std::string kLabel = "attention_backward/sm90 finish";
    FinishArguments arguments{.score = score_,
                              .grad_query = row_tensor_of(problem_.grad_query),
                              .grad_query_sums = sums_,
                              .tiles = tiles_,
                              .columns = static_cast<int32_t>(problem_.query.size(3)),
                              .accumulates = problem_.accumulate};
    launch(2, arguments, int64_t{tiles_.tile_count} * (variant_.tile.queries / 64), kFinishThreads, 0, true, kLabel);
  }

  void sum_sinks() const {
    static const std::string kLabel = "attention_backward/sm90 sinks";
    SinkArguments arguments{.sums = sink_sums_,
                            .grad_sinks = problem_.grad_sinks.as<float>(),
                            .stride = problem_.grad_sinks.stride(0),
                            .tiles = tiles_.tiles,
                            .heads = score_.heads,
                            .batches = features_.packed ? 1 : score_.batches};
    launch(3, arguments, score_.heads, kSinkThreads, 0, false, kLabel);
  }

 private:
  template <class Arguments>
  void launch(int which, Arguments& arguments, int64_t blocks, int threads, int shared_bytes, bool follows_closely,
              const std::string& label) const {
    if (blocks == 0) return;
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(blocks);
    shape.block_x = static_cast<unsigned>(threads);
    shape.shared_bytes = static_cast<unsigned>(shared_bytes);
    shape.programmatic_dependent = follows_closely;
    cuda_device::launch(context_, kernel(which), shape, pointers, label);
  }

  CUkern_st* kernel(int which) const {
    static FeatureKernels kernels;
    Features relevant;
    relevant.packed = features_.packed;
    if (which == 1) relevant = features_;
    const uint32_t index = static_cast<uint32_t>((which * 64 + variant_.index) * 2 + has_float_results(problem_));
    return kernels.get(relevant, index, context_, [&] {
      const Types types(problem_.query.dtype, problem_.grad_query.dtype);
      return which == 0   ? prepare_code(variant_.tile, types.operand, features_.packed)
             : which == 1 ? main_code(features_, variant_.tile, types, program_text(problem_.scoring))
             : which == 2 ? finish_code(variant_.tile, types, features_.packed)
                          : rows_code("backward_sinks", "");
    });
  }

  const BackwardProblem& problem_;
  Context& context_;
  Variant variant_;
  Features features_;
  ScoreArguments score_;
  QueryTiles tiles_;
  BackwardOrder order_;
  ZeroedSums zeroed_;
  float* records_ = nullptr;
  float* sums_ = nullptr;
  uint32_t* turns_ = nullptr;
  float* sink_sums_ = nullptr;
};

// Null, or why the tensors cannot be described to the copy engine or written in vectors.
const char* tensor_obstacle(const BackwardProblem& problem) {
  if (problem.query.size(3) % 8 != 0 || problem.value.size(3) % 8 != 0)
    return "takes head sizes that are multiples of 8";
  if (problem.query.size(2) > kLongest || problem.key.size(2) > kLongest) return "takes sequences of up to 2^30 rows";
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.grad_output}) {
    if (const char* obstacle = cuda_device::tensor_map_obstacle(*view)) return obstacle;
    for (int i = 0; i < 3; ++i) {
      if (view->sizes[i] > 1 && view->strides[i] == 0) return "an expanded dimension is not for the copy engine";
    }
  }
  for (const TensorView* view : {&problem.output, &problem.grad_query, &problem.grad_key, &problem.grad_value}) {
    if (!has_aligned_rows(*view)) return "rows do not begin at multiples of 16 bytes";
  }
  return nullptr;
}

// Heads of more than 64 columns leave no registers for a bias with other costly options, and 256 columns fewer.
bool overfills_registers(const Features& features, int head) {
  if (head == 256 && (has_derivative(features) || features.dropout)) return true;
  return head > 64 && has_bias(features) && (features.softcap_after || features.dropout);
}

const char* scoring_obstacle(const BackwardProblem& problem) {
  const Scoring& scoring = problem.scoring;
  if (std::ranges::any_of(problem.grad_captured, &TensorView::is_present))
    return "gives no gradients of captured tensors";
  if (!scoring.score_mod.empty() && scoring.dropout_p > 0) return "takes no score_mod with dropout";
  if (has_float_results(problem) && scoring.is_packed() && !problem.accumulate) return kFloatPacks;
  if (const char* obstacle = part_obstacle(scoring)) return obstacle;
  if (const char* obstacle = captured_obstacle(scoring)) return obstacle;
  const Features features = features_of(scoring);
  if (overfills_registers(features, kTiles[tile_index(problem)].head))
    return "has too few registers for these options at this head size";
  if (problem.query.dtype == DType::kFloat16 && (has_derivative(features) || features.dropout))
    return "keeps too few bits of probabilities for fp16 with softcap, dropout or such a score_mod";
  if (problem.grad_bias.is_present()) return "gives no gradient of a bias";
  if (scoring.block_list.is_present() && !scoring.block_list.query_counts.is_present())
    return "needs the block list's transposed lists";
  const bool skips_tiles = scoring.block_list.is_present() || scoring.query_segment_ids.is_present();
  if (scoring.deterministic && skips_tiles) return "has no fixed order of sums where tiles are left out by their data";
  return nullptr;
}

registry::Support supports(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return registry::Support::no(missing);
  if (problem.query.dtype == DType::kFloat32) return registry::Support::no("takes bf16 and fp16");
  if (tile_index(problem) < 0) return registry::Support::no("takes heads of up to 256 columns");
  if (const char* obstacle = tensor_obstacle(problem)) return registry::Support::no(obstacle);
  return registry::Support::unless(scoring_obstacle(problem));
}

void run(const BackwardProblem& problem, int config, Context& context) {
  const Scoring& scoring = problem.scoring;
  if (scoring.is_packed() && !problem.accumulate) {
    clear_rows_past_sequences(problem.grad_query, {}, scoring.cu_seqlens_q, context);
    clear_rows_past_sequences(problem.grad_key, {}, scoring.cu_seqlens_k, context);
    clear_rows_past_sequences(problem.grad_value, {}, scoring.cu_seqlens_k, context);
  }
  if (scoring.is_packed() && scoring.cu_seqlens_q.size(0) <= 1) return;
  const Run call(problem, variant_of(problem, config), context);
  call.prepare();
  call.main();
  call.finish();
  if (problem.grad_sinks.is_present()) call.sum_sinks();
}

std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  const auto add = [&](DeviceCode code) {
    if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(std::move(code));
  };
  const Types kBf16(DType::kBFloat16), kParts(DType::kBFloat16, DType::kFloat32);
  const Features causal{.right_bound = true};
  for (size_t i = 0; i < std::size(kTiles); ++i) {
    for (DType dtype : kTypes) {
      const BackwardTile& tile = dtype == DType::kFloat16 ? kHeavyTiles[i] : kTiles[i];
      add(prepare_code(tile, dtype, false));
      add(finish_code(tile, Types(dtype), false));
      add(main_code(causal, tile, Types(dtype), {}));
    }
    add(main_code({}, kTiles[i], kBf16, {}));
    add(main_code(causal, kHeavyTiles[i], kBf16, {}));  // the second config
    add(main_code(causal, kTiles[i], kParts, {}));
    add(finish_code(kTiles[i], kParts, false));
  }
  for (size_t i = 0; i < kNarrowTiles; ++i) {
    add(prepare_code(kTiles[i], DType::kBFloat16, true));
    add(finish_code(kTiles[i], kBf16, true));
  }
  add(rows_code("backward_sinks", ""));
  add(segment_plan_code(causal, walk_tiles(kTiles[2])));
  BackwardTile in_turns = kTiles[2];
  in_turns.in_turns = true;
  add(main_code(causal, in_turns, kBf16, {}));
  add(main_code({.packed = true}, kTiles[2], kParts, {}));
  add(main_code({.dropout = true}, kHeavyTiles[2], kParts, {}));
  // Every feature that these kernels take, each with a head size in its turn.
  size_t turn = 0;
  for (const NamedFeatures& named : compiled_features()) {
    const Features& features = named.features;
    // Small heads leave registers for a bias or a program with other options, and wide ones take bounds alone.
    const bool is_small = (has_bias(features) && (features.softcap_after || features.dropout || features.alibi)) ||
                          features.score_mod || features.mask_mod;
    const size_t index = is_small ? 0 : turn++ % kNarrowTiles;
    const bool is_heavy = needs_registers(features) || features.segments;
    add(main_code(features, is_heavy ? kHeavyTiles[index] : kTiles[index], kBf16, named.generated));
  }
  return codes;
}

uint64_t source_hash() {
  return jit::source_hash(kMainSource) ^ jit::source_hash(kRowsSource);
}

}  // namespace

constinit const registry::Kernel<BackwardProblem> kBackwardSm90 = {.name = "sm90",
                                                                   .origin = registry::Origin::kOurs,
                                                                   .supports = supports,
                                                                   .configs = configs,
                                                                   .heuristic = nullptr,
                                                                   .run = run,
                                                                   .source_hash = source_hash,
                                                                   .device_code = device_code};

}  // namespace kernel_pytorch::attention
