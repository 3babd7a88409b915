// A task of paged attention on the CPU: its keys tile by tile, each tile head by head, so that a run of memory is read
// once; the rows of the next step are known, and fetched, while one computes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "kernel_pytorch/ops/paged_attention/cpu/tasks.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::paged_attention {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t columns) {
  return (columns + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

inline int type_index(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return 3;
  return dtype == DType::kInt8 ? 4 : cpu_type_index(dtype);
}

inline bool is_of_tokens(const TensorView& scale) {
  return scale.is_present() && scale.rank == 3;
}
// What all keys of a head are multiplied with.
inline float scale_of_head(const TensorView& scale, int64_t head) {
  return is_of_tokens(scale) ? 1 : scale_at(scale, 0, 0, head);
}

// The distance at which ALiBi takes least off: scores are kept relative to it, since differences of large numbers that
// are rounded to fp32 would be off by more than all else.
inline float alibi_base(const Attend& problem, const Request& request, int64_t position, float slope) {
  const KeyRange range = keys_seen(problem, request, position);
  if (range.last <= range.first) return 0;
  const int64_t before = std::abs(range.first - position), behind = std::abs(range.last - 1 - position);
  if (slope < 0) return static_cast<float>(std::max(before, behind));
  const bool is_inside = position >= range.first && position < range.last;
  return is_inside ? 0 : static_cast<float>(std::min(before, behind));
}

// The state of a task's rows: outputs [heads][rows][pitch], largest and sums [heads][rows].
struct State {
  float* outputs;
  float* largest;
  float* sums;
};

// The rows of a tile's keys in both caches, for key head 0; null where no page is, and for keys that no row sees:
// what lies there may be no number.
struct TileKeys {
  int64_t first = 0, count = 0;
  const char *keys[kTileKeys], *values[kTileKeys];
  int64_t pages[kTileKeys], rows[kTileKeys];
  bool has_keeps = false;
  uint8_t keeps[kTileRows * kTileKeys] = {};  // [rows][kTileKeys], the same for all heads; where has_keeps
};
// The same of one key head, where nothing is null.
struct HeadKeys {
  const void *keys[kTileKeys], *values[kTileKeys];
};

class Tile {
 public:
  Tile(const Attend& problem, const TileKernels& kernels, const Task& task, State state)
      : problem_(problem),
        kernels_(kernels),
        task_(task),
        state_(state),
        group_(problem.query.sizes[1] / problem.key_cache.sizes[2]),
        rows_(task.padded_rows()),
        pitch_(padded(problem.query.sizes[2])),
        value_pitch_(padded(problem.value_cache.sizes[3])),
        type_(type_index(problem.key_cache.dtype)),
        copies_(rows_ > kDirectRows),
        queries_(static_cast<size_t>(task.heads * rows_ * pitch_)),
        zeros_(static_cast<size_t>(std::max(pitch_, value_pitch_))) {
    if (!copies_) return;
    key_copies_.resize(static_cast<size_t>(kTileKeys * pitch_));
    value_copies_.resize(static_cast<size_t>(kTileKeys * value_pitch_));
  }

  void run() {
    load_queries();
    TileKeys tiles[2];
    HeadKeys rows[2];
    if (task_.keys.first >= task_.keys.last) return;
    find(task_.keys.first, tiles[0]);
    point(tiles[0], 0, rows[0]);
    int now = 0, now_tile = 0;
    for (int64_t first = task_.keys.first; first < task_.keys.last; first += kTileKeys) {
      const TileKeys& tile = tiles[now_tile];
      TileKeys& next_tile = tiles[1 - now_tile];
      const bool is_last = first + kTileKeys >= task_.keys.last;
      if (!is_last) find(first + kTileKeys, next_tile);
      for (int64_t head = 0; head < task_.heads; ++head, now = 1 - now) {
        const bool is_last_head = head + 1 == task_.heads;
        if (!is_last_head) point(tile, head + 1, rows[1 - now]);
        if (is_last_head && !is_last) point(next_tile, 0, rows[1 - now]);
        step(tile, head, rows[now], is_last && is_last_head ? nullptr : &rows[1 - now]);
      }
      now_tile = 1 - now_tile;
    }
  }

 private:
  int64_t query_of(int64_t row) const { return (task_.first_row + row) / group_; }
  int64_t head_of(int64_t head, int64_t row) const {
    return (task_.first_head + head) * group_ + (task_.first_row + row) % group_;
  }

  void load_queries() {
    for (int64_t row = 0; row < task_.rows; ++row) {
      positions_[row] = task_.request.position(query_of(row));
      ranges_[row] = keys_seen(problem_, task_.request, positions_[row]);
    }
    for (int64_t head = 0; head < task_.heads; ++head) {
      const void* rows[kTileRows];
      for (int64_t row = 0; row < task_.rows; ++row) {
        const int64_t token = task_.request.first_query + query_of(row);
        const int64_t offset = token * problem_.query.strides[0] + head_of(head, row) * problem_.query.strides[1];
        rows[row] = problem_.query.as<const char>() + offset * size_of(problem_.query.dtype);
        if (!problem_.alibi_slopes.is_present()) continue;
        float& slope = slopes_[head * rows_ + row];
        slope = problem_.alibi_slopes.as<const float>()[head_of(head, row)];
        bases_[head * rows_ + row] = alibi_base(problem_, task_.request, positions_[row], slope);
      }
      kernels_.copy[type_index(problem_.query.dtype)](
          {rows, task_.rows, problem_.query.sizes[2], pitch_, queries_.data() + head * rows_ * pitch_});
    }
  }

  // Where the keys from `first` on lie, and who sees them.
  void find(int64_t first, TileKeys& tile) const {
    const TensorView &keys = problem_.key_cache, &values = problem_.value_cache;
    const int64_t page_size = keys.sizes[1], bytes = size_of(keys.dtype);
    tile.first = first;
    tile.count = std::min(kTileKeys, task_.keys.last - first);
    bool is_whole = tile.count == kTileKeys;
    int64_t row = first % page_size, page = page_of(problem_, task_.index, first);
    for (int64_t i = 0; i < tile.count; ++i, ++row) {
      if (row == page_size) {
        row = 0;
        page = page_of(problem_, task_.index, first + i);
      }
      tile.pages[i] = page;
      tile.rows[i] = row;
      is_whole = is_whole && page >= 0;
      const int64_t in_keys = (page * keys.strides[0] + row * keys.strides[1]) * bytes,
                    in_values = (page * values.strides[0] + row * values.strides[1]) * bytes;
      tile.keys[i] = page >= 0 ? keys.as<const char>() + in_keys : nullptr;
      tile.values[i] = page >= 0 ? values.as<const char>() + in_values : nullptr;
    }
    for (int64_t i = tile.count; i < kTileKeys; ++i) tile.keys[i] = tile.values[i] = nullptr;
    tile.has_keeps = !is_whole || !all_see(first);
    if (!tile.has_keeps) return;
    for (int64_t i = 0; i < kTileKeys; ++i) {
      bool is_seen = false;
      for (int64_t query_row = 0; query_row < task_.rows; ++query_row) {
        const bool keeps = tile.keys[i] != nullptr && sees(query_row, first + i);
        tile.keeps[query_row * kTileKeys + i] = keeps;
        is_seen = is_seen || keeps;
      }
      if (!is_seen) tile.keys[i] = tile.values[i] = nullptr;
    }
  }

  void point(const TileKeys& tile, int64_t head, HeadKeys& rows) const {
    const int64_t bytes = size_of(problem_.key_cache.dtype), key_head = task_.first_head + head;
    const int64_t keys = key_head * problem_.key_cache.strides[2] * bytes,
                  values = key_head * problem_.value_cache.strides[2] * bytes;
    for (int64_t i = 0; i < kTileKeys; ++i) {
      const bool is_there = tile.keys[i] != nullptr;
      rows.keys[i] = is_there ? tile.keys[i] + keys : static_cast<const void*>(zeros_.data());
      rows.values[i] = is_there ? tile.values[i] + values : static_cast<const void*>(zeros_.data());
    }
  }

  void scale_of_tokens(const TensorView& scale, const TileKeys& tile, int64_t head, float* scales) const {
    for (int64_t i = 0; i < kTileKeys; ++i) {
      const bool is_there = tile.keys[i] != nullptr;
      scales[i] = is_there ? scale_at(scale, tile.pages[i], tile.rows[i], task_.first_head + head) : 0;
    }
  }

  void step(const TileKeys& tile, int64_t head, const HeadKeys& rows, const HeadKeys* next) {
    const int64_t key_head = task_.first_head + head;
    StepArguments arguments{.queries = queries_.data() + head * rows_ * pitch_,
                            .rows = rows_,
                            .count = tile.count,
                            .keys = rows.keys,
                            .values = rows.values,
                            .columns = problem_.query.sizes[2],
                            .value_columns = problem_.value_cache.sizes[3],
                            .pitch = pitch_,
                            .value_pitch = value_pitch_,
                            .scale = static_cast<float>(problem_.scale.value_or(
                                         1 / std::sqrt(std::max(static_cast<double>(problem_.query.sizes[2]), 1.0)))) *
                                     scale_of_head(problem_.key_scale, key_head),
                            .value_scale = scale_of_head(problem_.value_scale, key_head),
                            .softcap = static_cast<float>(problem_.softcap),
                            .keeps = tile.has_keeps ? tile.keeps : nullptr,
                            .largest = state_.largest + head * rows_,
                            .sums = state_.sums + head * rows_,
                            .outputs = state_.outputs + head * rows_ * value_pitch_};
    float key_scales[kTileKeys], value_scales[kTileKeys];
    if (is_of_tokens(problem_.key_scale)) {
      scale_of_tokens(problem_.key_scale, tile, head, key_scales);
      arguments.key_scales = key_scales;
    }
    if (is_of_tokens(problem_.value_scale)) {
      scale_of_tokens(problem_.value_scale, tile, head, value_scales);
      arguments.value_scales = value_scales;
    }
    float distances[kTileRows] = {};
    if (problem_.alibi_slopes.is_present()) {
      for (int64_t row = 0; row < task_.rows; ++row) distances[row] = static_cast<float>(tile.first - positions_[row]);
      arguments.slopes = slopes_ + head * rows_;
      arguments.distances = distances;
      arguments.bases = bases_ + head * rows_;
    }
    if (!copies_) {
      if (next != nullptr) {
        arguments.next_keys = next->keys;
        arguments.next_values = next->values;
      }
      return kernels_.step[type_](arguments);
    }
    kernels_.copy[type_]({rows.keys, kTileKeys, arguments.columns, pitch_, key_copies_.data()});
    kernels_.copy[type_]({rows.values, kTileKeys, arguments.value_columns, value_pitch_, value_copies_.data()});
    HeadKeys copies;
    for (int64_t i = 0; i < kTileKeys; ++i) {
      copies.keys[i] = key_copies_.data() + i * pitch_;
      copies.values[i] = value_copies_.data() + i * value_pitch_;
    }
    arguments.keys = copies.keys;
    arguments.values = copies.values;
    kernels_.step[type_index(DType::kFloat32)](arguments);
  }

  // Whether every row sees the whole tile: then nothing is hidden.
  bool all_see(int64_t first) const {
    if (problem_.mask.is_present() && first + kTileKeys > task_.request.keys - task_.request.queries) return false;
    for (int64_t row = 0; row < task_.rows; ++row) {
      if (first < ranges_[row].first || first + kTileKeys > ranges_[row].last) return false;
    }
    return true;
  }
  bool sees(int64_t row, int64_t key) const {
    if (key < ranges_[row].first || key >= ranges_[row].last) return false;
    const int64_t new_key = key - (task_.request.keys - task_.request.queries);
    if (!problem_.mask.is_present() || new_key < 0) return true;
    const TensorView& mask = problem_.mask;
    return mask
        .as<const bool>()[task_.index * mask.strides[0] + query_of(row) * mask.strides[1] + new_key * mask.strides[2]];
  }

  const Attend& problem_;
  const TileKernels& kernels_;
  const Task& task_;
  State state_;
  int64_t group_, rows_, pitch_, value_pitch_;
  int type_;
  bool copies_;
  std::vector<float> queries_, zeros_, key_copies_, value_copies_;
  int64_t positions_[kTileRows];
  KeyRange ranges_[kTileRows];
  float slopes_[kTileRows] = {}, bases_[kTileRows] = {};  // of all heads
};

}  // namespace kernel_pytorch::paged_attention
