#include "kernel_pytorch/ops/attention/cpu/plan.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/attention/cuda/dropout_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::attention {
namespace {

int64_t blocks_of(int64_t count, int64_t block) {
  return (count + block - 1) / block;
}

const char* address(const TensorView& view, int64_t first, int64_t second) {
  return static_cast<const char*>(view.data) +
         (first * view.strides[0] + second * view.strides[1]) * size_of(view.dtype);
}

// Where the last packed sequence ends; rows without offsets all belong to one.
int64_t end_of(const TensorView& offsets, int64_t rows) {
  if (!offsets.is_present()) return rows;
  return std::clamp<int64_t>(offsets.as<const int32_t>()[offsets.sizes[0] - 1], 0, rows);
}

void add_spans(const TensorView& counts, const TensorView& blocks, int64_t batch, int64_t head, int64_t row,
               int64_t key_block, bool is_full, std::vector<KeySpan>& spans) {
  if (!counts.is_present() || row >= counts.sizes[2]) return;
  const int64_t list =
      ((counts.sizes[0] == 1 ? 0 : batch) * counts.sizes[1] + (counts.sizes[1] == 1 ? 0 : head)) * counts.sizes[2] +
      row;
  const int32_t* indices = blocks.as<const int32_t>() + list * blocks.sizes[3];
  const int64_t count = std::min<int64_t>(counts.as<const int32_t>()[list], blocks.sizes[3]);
  for (int64_t i = 0; i < count; ++i) spans.push_back({indices[i] * key_block, (indices[i] + 1) * key_block, is_full});
}

}  // namespace

CpuPlan::CpuPlan(const TensorView& query, const TensorView& key, const TensorView& value, const Scoring& scoring,
                 int64_t query_tile, const TilePrograms* programs)
    : query_(query),
      key_(key),
      value_(value),
      scoring_(scoring),
      sequences_(sequences_of(sizes_of(query, key, value, scoring), scoring)),
      query_tile_(query_tile),
      programs_(programs),
      queries_end_(end_of(scoring.cu_seqlens_q, query.sizes[2])),
      keys_end_(end_of(scoring.cu_seqlens_k, key.sizes[2])) {}

ScoreRules CpuPlan::rules_of(const Sequence& sequence, int64_t head) const {
  ScoreRules rules;
  rules.dtype = query_.dtype;
  rules.queries = sequence.queries;
  rules.keys = sequence.keys;
  rules.size = query_.sizes[3];
  rules.value_size = value_.sizes[3];
  rules.scale = static_cast<float>(*scoring_.scale);
  rules.offset = sequence.offset;
  if (scoring_.window_left >= 0) rules.left = scoring_.window_left;
  if (scoring_.window_right >= 0) rules.right = scoring_.window_right;
  if (scoring_.causal) rules.right = std::min<int64_t>(rules.right, 0);
  rules.softcap = static_cast<float>(scoring_.softcap);
  rules.softcap_after_bias = scoring_.softcap_after_bias;
  if (scoring_.alibi_slopes.is_present()) {
    rules.slope = *reinterpret_cast<const float*>(address(scoring_.alibi_slopes, sequence.index, head));
  }
  if (scoring_.bias.is_present()) {
    rules.bias = address(scoring_.bias, sequence.index, head);
    rules.bias_dtype = scoring_.bias.dtype;
    rules.bias_row_stride = scoring_.bias.strides[2];
  }
  if (scoring_.mask.is_present()) {
    rules.mask = reinterpret_cast<const uint8_t*>(address(scoring_.mask, sequence.index, head));
    rules.mask_row_stride = scoring_.mask.strides[2];
    rules.mask_key_stride = scoring_.mask.strides[3];
  }
  if (scoring_.query_segment_ids.is_present()) {
    rules.query_segments =
        reinterpret_cast<const int32_t*>(address(scoring_.query_segment_ids, sequence.batch, sequence.first_query));
    rules.key_segments =
        reinterpret_cast<const int32_t*>(address(scoring_.key_segment_ids, sequence.batch, sequence.first_key));
  }
  rules.has_sink = scoring_.sinks.is_present();
  if (rules.has_sink) rules.sink = scoring_.sinks.as<const float>()[head];
  if (scoring_.dropout_p > 0) {
    rules.dropout_threshold = dropout_byte_threshold(scoring_.dropout_p);
    rules.dropout_scale = dropout_byte_scale(scoring_.dropout_p);
    const int64_t* seed = scoring_.seed.as<const int64_t>();
    rules.seed = static_cast<uint64_t>(seed[0]);
    const uint64_t counted = static_cast<uint32_t>(sequence.index * heads() + head);
    rules.seed_offset = static_cast<uint64_t>(seed[1]) + (counted << 32);
  }
  rules.part_query = scoring_.first_query;
  rules.part_key = scoring_.first_key;
  rules.sequence = sequence.index;
  rules.head = head;
  rules.programs = programs_;
  rules.adjusts = programs_ != nullptr || rules.softcap > 0 || rules.slope != 0 || rules.bias != nullptr ||
                  rules.mask != nullptr || rules.query_segments != nullptr;
  return rules;
}

int64_t CpuPlan::blocks_per_row(const Sequence& sequence) const {
  if (!scoring_.block_list.is_present()) return 1;
  return blocks_of(std::min(scoring_.block_list.query_block, sequence.queries), query_tile_);
}

int64_t CpuPlan::query_blocks(const Sequence& sequence) const {
  if (!scoring_.block_list.is_present()) return blocks_of(sequence.queries, query_tile_);
  return blocks_of(sequence.queries, scoring_.block_list.query_block) * blocks_per_row(sequence);
}

CpuPlan::QueryBlock CpuPlan::query_block(const Sequence& sequence, int64_t block) const {
  const int64_t row_queries = scoring_.block_list.is_present() ? scoring_.block_list.query_block : query_tile_;
  const int64_t per_row = blocks_per_row(sequence);
  const int64_t row_end = std::min((block / per_row + 1) * row_queries, sequence.queries);
  const int64_t first = block / per_row * row_queries + block % per_row * query_tile_;
  return {first, std::clamp<int64_t>(row_end - first, 0, query_tile_)};
}

void CpuPlan::find_spans(const Sequence& sequence, int64_t head, int64_t first_query,
                         std::vector<KeySpan>& spans) const {
  spans.clear();
  const BlockList& list = scoring_.block_list;
  if (!list.is_present()) {
    spans.push_back({0, sequence.keys, false});
    return;
  }
  const int64_t row = first_query / list.query_block;
  const bool full_is_less = !scoring_.mask_mod.empty();  // otherwise full and partial tiles are the same
  add_spans(list.key_counts, list.key_blocks, sequence.index, head, row, list.key_block, false, spans);
  add_spans(list.full_key_counts, list.full_key_blocks, sequence.index, head, row, list.key_block, full_is_less, spans);
  std::erase_if(spans, [&](const KeySpan& span) { return span.begin >= sequence.keys; });
  std::ranges::sort(spans, {}, &KeySpan::begin);
  size_t kept = 0;
  for (const KeySpan& span : spans) {
    if (kept > 0 && spans[kept - 1].end == span.begin && spans[kept - 1].is_full == span.is_full) {
      spans[kept - 1].end = span.end;
    } else {
      spans[kept++] = span;
    }
  }
  spans.resize(kept);
}

HeadRows head_rows(const TensorView& view, int64_t batch, int64_t head, int64_t first_row) {
  const int64_t offset = batch * view.strides[0] + head * view.strides[1] + first_row * view.strides[2];
  return {static_cast<const char*>(view.data) + offset * size_of(view.dtype), view.strides[2]};
}

const char* amx_obstacle(const TensorView& query, const DeviceInfo& device) {
  if (query.dtype != DType::kBFloat16) return "takes bf16";
  return device.cpu.isa == CpuIsa::kX86V4Amx ? nullptr : "needs a CPU with AMX";
}

const TileKernels& tile_kernels(const DeviceInfo& device) {
  return KP_AT_CPU_LEVEL(device.cpu.isa, kTileKernels);
}

const TileKernels& amx_kernels() {
#if defined(__aarch64__)
  fail(ErrorCode::kInternal, "attention: this CPU has no AMX");
#else
  return isa_v4amx::kAmxKernels;
#endif
}

}  // namespace kernel_pytorch::attention
