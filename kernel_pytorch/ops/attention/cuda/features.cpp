#include "kernel_pytorch/ops/attention/cuda/features.h"

#include <algorithm>
#include <bit>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/expression/mods.h"
#include "kernel_pytorch/ops/attention/cuda/dropout_cuda.h"
#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kPrepareSource = "kernel_pytorch/ops/attention/cuda/prepare.cuh";

constexpr const char* kOddQueryBlocks = "the block list's query blocks are no multiple of this kernel's tiles";
constexpr const char* kOddKeyBlocks = "the block list's key blocks are no multiple of this kernel's tiles";
constexpr const char* kOddPart = "dropout of a part needs its first query and key to be multiples of 16";
constexpr const char* kDoubleCaptured = "a captured tensor is fp64; fp64 runs on the CPU";
constexpr const char* kManyCaptured = "more than 8 captured tensors";

// No key lies after its query + offset.
bool looks_back_only(const Scoring& scoring) {
  return scoring.causal || scoring.window_right == 0;
}

bool adds_to_score(const Scoring& scoring) {
  const expression::Mods& mods = expression::mods_of(scoring.score_mod, scoring.mask_mod, "attention");
  return expression::adds_to_score(*mods.score_mod_gradient);
}

// Two neighbouring keys of the bias begin at a multiple of their size in every row.
bool has_pairs(const TensorView& bias) {
  if (bias.size(3) % 2 != 0 || bias.size(3) == 0 || bias.stride(3) != 1) return false;
  return has_aligned_rows(bias, 2 * size_of(bias.dtype));
}

ScoreTensor score_tensor_of(const TensorView& view) {
  if (!view.is_present()) return {};
  const bool has_scores = view.rank == 4;
  return {.data = view.data,
          .batch = view.strides[0],
          .head = view.strides[1],
          .query = has_scores ? view.strides[2] : 0,
          .key = has_scores ? view.strides[3] : 0};
}

// Ids, and of each 64 rows their range. Packed sequences begin anywhere: no ranges.
SegmentIds segment_ids_of(const TensorView& ids, bool is_packed, Context& context) {
  if (!ids.is_present()) return {};
  SegmentIds segments{};
  segments.ids = ids.as<const int32_t>();
  segments.batch = ids.strides[0];
  segments.row = ids.strides[1];
  if (is_packed || ids.element_count() == 0) return segments;
  static const std::string kLabel = "attention segment ranges";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, [] { return prepare_code("segment_ranges"); });
  int32_t rows = static_cast<int32_t>(ids.size(1));
  const int64_t blocks = divide_up(rows, kSegmentRangeRows);
  auto* ranges = static_cast<SegmentRange*>(
      context.scratch->allocate(static_cast<size_t>(ids.size(0) * blocks) * sizeof(SegmentRange)));
  segments.ranges = ranges;
  segments.ranges_batch = blocks;
  void* pointers[] = {&segments, &ranges, &rows};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks * ids.size(0));
  shape.block_x = 32;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  return segments;
}

bool is_same(const TensorView& a, const TensorView& b) {
  return a.rank == b.rank && a.data == b.data && a.sizes == b.sizes && a.strides == b.strides;
}

}  // namespace

DeviceCode prepare_code(std::string_view function) {
  DeviceCode code;
  code.source = kPrepareSource;
  code.entry = concat("kernel_pytorch::attention::", function);
  return code;
}

Features features_of(const Scoring& scoring) {
  const TensorView& bias = scoring.bias;
  Features features{};
  features.right_bound = scoring.causal || scoring.window_right >= 0;
  features.left_bound = scoring.window_left >= 0;
  features.key_lengths = scoring.key_lengths.is_present();
  features.packed = scoring.is_packed();
  features.segments = scoring.query_segment_ids.is_present();
  features.mask = scoring.mask.is_present();
  features.mask_mod = !scoring.mask_mod.empty();
  features.blocks = scoring.block_list.is_present();
  features.alibi = scoring.alibi_slopes.is_present();
  features.alibi_is_one_sided = features.alibi && looks_back_only(scoring);
  features.float_bias = bias.is_present() && bias.dtype == DType::kFloat32;
  features.bias = bias.is_present() && !features.float_bias;
  features.bias_pairs = bias.is_present() && has_pairs(bias);
  features.softcap = scoring.softcap > 0 && !scoring.softcap_after_bias;
  features.softcap_after = scoring.softcap > 0 && scoring.softcap_after_bias;
  features.score_mod = !scoring.score_mod.empty();
  features.score_mod_adds = features.score_mod && adds_to_score(scoring);
  features.scaled = !(*scoring.scale > 0);
  features.sinks = scoring.sinks.is_present();
  features.dropout = scoring.dropout_p > 0;
  // Without a bias both orders of softcap are one.
  if (features.softcap_after && !bias.is_present() && !features.alibi) {
    features.softcap = true;
    features.softcap_after = false;
  }
  return features;
}

Features features_of(const Scoring& scoring, int64_t tile_queries, int64_t tile_keys) {
  Features features = features_of(scoring);
  const BlockList& list = scoring.block_list;
  features.block_map = features.blocks && (list.query_block % tile_queries != 0 || list.key_block % tile_keys != 0);
  if (features.block_map) features.blocks = false;
  return features;
}

uint32_t bits_of(const Features& features) {
  uint32_t bits = 0, bit = 1;
  for (bool flag : std::bit_cast<std::array<bool, sizeof(Features)>>(features)) {
    bits |= flag ? bit : 0;
    bit <<= 1;
  }
  return bits;
}

ScoreArguments score_arguments_of(const Scoring& scoring, const TensorView& query, const TensorView& key,
                                  Context& context) {
  const bool is_packed = scoring.is_packed();
  ScoreArguments arguments{};
  arguments.batches = static_cast<int32_t>(is_packed ? scoring.cu_seqlens_q.size(0) - 1 : query.size(0));
  arguments.heads = static_cast<int32_t>(query.size(1));
  arguments.group = static_cast<int32_t>(std::max<int64_t>(query.size(1), 1) / std::max<int64_t>(key.size(1), 1));
  arguments.queries = static_cast<int32_t>(is_packed ? scoring.max_seqlen_q : query.size(2));
  arguments.keys = static_cast<int32_t>(is_packed ? scoring.max_seqlen_k : key.size(2));
  arguments.query_tokens = query.size(2);
  arguments.key_tokens = key.size(2);
  arguments.left = static_cast<int32_t>(-scoring.window_left);
  arguments.right = scoring.causal ? 0 : static_cast<int32_t>(scoring.window_right);
  arguments.has_offset = scoring.causal_offset.has_value();
  arguments.offset = static_cast<int32_t>(scoring.offset().value_or(0));
  arguments.part_query = static_cast<int32_t>(scoring.first_query);
  arguments.part_key = static_cast<int32_t>(scoring.first_key);
  arguments.scale = static_cast<float>(*scoring.scale);
  arguments.softcap = static_cast<float>(scoring.softcap);
  arguments.softcap_reciprocal = scoring.softcap > 0 ? static_cast<float>(1 / scoring.softcap) : 0;
  arguments.bias = score_tensor_of(scoring.bias);
  arguments.mask = score_tensor_of(scoring.mask);
  arguments.alibi_slopes = score_tensor_of(scoring.alibi_slopes);
  if (scoring.sinks.is_present()) {
    arguments.sinks = scoring.sinks.as<const float>();
    arguments.sinks_stride = scoring.sinks.strides[0];
  }
  arguments.query_segments = segment_ids_of(scoring.query_segment_ids, is_packed, context);
  arguments.key_segments = is_same(scoring.query_segment_ids, scoring.key_segment_ids)
                               ? arguments.query_segments
                               : segment_ids_of(scoring.key_segment_ids, is_packed, context);
  if (scoring.key_lengths.is_present()) {
    arguments.key_lengths = scoring.key_lengths.as<const int32_t>();
    arguments.key_lengths_stride = scoring.key_lengths.strides[0];
  }
  if (is_packed) {
    arguments.query_offsets = scoring.cu_seqlens_q.as<const int32_t>();
    arguments.key_offsets = scoring.cu_seqlens_k.as<const int32_t>();
  }
  if (scoring.block_list.is_present()) add_lists(scoring, arguments, context);
  if (scoring.dropout_p > 0) {
    arguments.seed = scoring.seed.as<const int64_t>();
    arguments.dropout_threshold = dropout_byte_threshold(scoring.dropout_p);
    arguments.dropout_scale = dropout_byte_scale(scoring.dropout_p);
  }
  for (size_t i = 0; i < scoring.captured.size(); ++i) {
    const TensorView& view = scoring.captured[i];
    tile::CapturedTensor& captured = arguments.captured[i];
    captured.data = view.data;
    for (int j = 0; j < view.rank; ++j) {
      captured.strides[j] = view.strides[j];
      captured.sizes[j] = static_cast<int32_t>(view.sizes[j]);
    }
  }
  return arguments;
}

RowTensor row_tensor_of(const TensorView& view) {
  return {.data = view.data, .batch = view.strides[0], .head = view.strides[1], .row = view.strides[2]};
}

bool has_vector_rows(const TensorView& view) {
  return !view.is_present() || (has_aligned_rows(view) && view.size(3) % (16 / size_of(view.dtype)) == 0);
}

void clear_rows_past_sequences(const TensorView& rows, const TensorView& lse, const TensorView& offsets,
                               Context& context) {
  if (rows.element_count() == 0) return;
  static const std::string kLabel = "attention rows past the sequences";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, [] { return prepare_code("clear_rows_past_sequences"); });
  RowTensor target = row_tensor_of(rows);
  float* lse_data = lse.is_present() ? lse.as<float>() : nullptr;
  const int32_t* offset_data = offsets.as<const int32_t>();
  const int64_t words = size_of(rows.dtype) / 2;  // of 16 bits, in which the kernel counts
  target.head *= words;
  target.row *= words;
  int32_t sequences = static_cast<int32_t>(offsets.size(0) - 1), columns = static_cast<int32_t>(rows.size(3) * words);
  int64_t tokens = rows.size(2);
  void* pointers[] = {&target, &lse_data, &offset_data, &sequences, &tokens, &columns};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min<int64_t>(tokens, 64));
  shape.grid_y = static_cast<unsigned>(rows.size(1));
  shape.block_x = 128;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

const std::string& program_text(const Options& options) {
  static const std::string kNone;
  if (options.score_mod.empty() && options.mask_mod.empty()) return kNone;
  return expression::mods_of(options.score_mod, options.mask_mod, "attention").cuda_backward;
}

std::vector<DeviceCode> prepare_codes() {
  return {prepare_code("segment_ranges"), prepare_code("map_blocks"), prepare_code("trim_lists"),
          prepare_code("clear_rows_past_sequences")};
}

const char* scoring_obstacle(const Scoring& scoring, int64_t tile_queries, int64_t tile_keys) {
  if (scoring.block_list.is_present() && scoring.block_list.query_block % tile_queries != 0) return kOddQueryBlocks;
  if (scoring.block_list.is_present() && scoring.block_list.key_block % tile_keys != 0) return kOddKeyBlocks;
  return captured_obstacle(scoring);
}

const char* part_obstacle(const Scoring& scoring) {
  const bool has_squares = scoring.first_query % 16 == 0 && scoring.first_key % 16 == 0;
  return scoring.dropout_p > 0 && !has_squares ? kOddPart : nullptr;
}

bool has_float_results(const ForwardProblem& problem) {
  return problem.output.dtype != problem.query.dtype;
}
bool has_float_results(const BackwardProblem& problem) {
  return problem.grad_query.dtype != problem.query.dtype;
}

const char* captured_obstacle(const Scoring& scoring) {
  for (const TensorView& view : scoring.captured) {
    if (view.dtype == DType::kFloat64) return kDoubleCaptured;
  }
  return scoring.captured.size() > kMaximumCaptured ? kManyCaptured : nullptr;
}

std::vector<NamedFeatures> compiled_features() {
  // A bias for each head and distance; a prefix that all see.
  const std::string score_mod =
      "expression 1\ncapture fp32 2\n%0 = score\n%1 = head\n%2 = query\n%3 = key\n%4 = sub %2 %3\n%5 = load 0 %1 %4\n"
      "%6 = add %0 %5\nreturn %6\n";
  const std::string mask_mod =
      "expression 1\n%0 = query\n%1 = key\n%2 = le %1 %0\n%3 = int 128\n%4 = lt %1 %3\n%5 = or %2 %4\nreturn %5\n";
  std::vector<NamedFeatures> list{
      {"plain", {}},
      {"causal", {.right_bound = true}},
      {"window", {.right_bound = true, .left_bound = true}},
      {"key_lengths", {.key_lengths = true}},
      {"packed", {.packed = true}},
      {"segments", {.segments = true}},
      {"mask", {.mask = true}},
      {"blocks", {.blocks = true}},
      {"alibi", {.alibi = true}},
      {"bias", {.bias = true, .bias_pairs = true}},
      {"float_bias", {.float_bias = true}},
      {"softcap", {.softcap = true}},
      {"softcap_after", {.bias = true, .bias_pairs = true, .softcap_after = true}},
      {"scaled", {.scaled = true}},
      {"sinks", {.sinks = true}},
      {"dropout", {.dropout = true}},
      {"score_mod", {.score_mod = true}, program_text({.score_mod = score_mod})},
      {"mask_mod", {.mask_mod = true}, program_text({.mask_mod = mask_mod})},
      {"block_map", {.block_map = true}},
      // What models use.
      {"causal packed", {.right_bound = true, .packed = true}},
      {"causal lengths", {.right_bound = true, .key_lengths = true}},
      {"causal alibi", {.right_bound = true, .alibi = true, .alibi_is_one_sided = true}},
      {"causal softcap", {.right_bound = true, .softcap = true}},
      {"causal softcap window", {.right_bound = true, .left_bound = true, .softcap = true}},
      {"causal documents", {.right_bound = true, .segments = true}},
      {"causal sinks window", {.right_bound = true, .left_bound = true, .sinks = true}},
      {"causal packed window", {.right_bound = true, .left_bound = true, .packed = true}},
      {"causal packed blocks", {.right_bound = true, .packed = true, .blocks = true}},
      {"prefix", {.mask_mod = true, .blocks = true}, program_text({.mask_mod = mask_mod})},
      {"bias dropout", {.bias = true, .bias_pairs = true, .dropout = true}},
      {"everything",
       {.right_bound = true,
        .left_bound = true,
        .key_lengths = true,
        .segments = true,
        .mask = true,
        .blocks = true,
        .alibi = true,
        .float_bias = true,
        .softcap = true,
        .sinks = true,
        .dropout = true}},
      {"added score_mod", {.score_mod = true, .score_mod_adds = true}, program_text({.score_mod = score_mod})},
  };
  return list;
}

}  // namespace kernel_pytorch::attention
