// Gradients of keys and values on mma, without atomics: a block of threads keeps 64 keys (of one chosen block, or
// means) and walks over the queries that may see one, in the order of their tokens: those that chose the block, by its
// map, then those whose window has it. Keys that very many queries see are shared by several blocks of threads, each
// with a part of the tokens; their sums are added in order at the end. sm_80.
#pragma once

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/means.cuh"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/products.cuh"

namespace kernel_pytorch::native_sparse_attention {

// Tokens one after another, a step's worth at once, -1 behind the last: by the first warp.
class TokenRange {
 public:
  __device__ __forceinline__ TokenRange(int32_t first, int32_t end) : first_(first), end_(end) {}
  __device__ __forceinline__ void next(int32_t* slots, int32_t tokens) {
    for (auto slot = static_cast<int32_t>(threadIdx.x % 32); slot < tokens; slot += 32) {
      slots[slot] = first_ + slot < end_ ? first_ + slot : -1;
    }
    first_ += tokens;
  }

 private:
  int32_t first_, end_;
};

// The tokens of a map between two multiples of 32.
class MappedTokens {
 public:
  __device__ __forceinline__ MappedTokens(const uint32_t* map, int32_t first, int32_t end)
      : map_(map), chunk_(first / 32 - 32), end_((end + 31) / 32) {}
  __device__ __forceinline__ void next(int32_t* slots, int32_t tokens) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    int32_t mine[kMmaRows / 32];
#pragma unroll
    for (int i = 0; i < kMmaRows / 32; ++i) {
      mine[i] = -1;
      for (int32_t slot = 0; slot < 32 && i * 32 + slot < tokens; ++slot) {
        if (word_ == 0 && !find_word()) break;
        const int32_t token = base_ + __ffs(static_cast<int>(word_)) - 1;
        word_ &= word_ - 1;
        if (lane == slot) mine[i] = token;
      }
      if (i * 32 + lane < tokens) slots[i * 32 + lane] = mine[i];
    }
  }

 private:
  __device__ __forceinline__ bool find_word() {
    while (found_ == 0) {
      if (chunk_ + 32 >= end_) return false;
      chunk_ += 32;
      const int32_t at = chunk_ + static_cast<int32_t>(threadIdx.x % 32);
      own_ = at < end_ ? map_[at] : 0;
      found_ = __ballot_sync(0xffffffffu, own_ != 0);
    }
    const int source = __ffs(static_cast<int>(found_)) - 1;
    found_ &= found_ - 1;
    word_ = __shfl_sync(0xffffffffu, own_, source);
    base_ = (chunk_ + source) * 32;
    return true;
  }

  const uint32_t* map_;
  int32_t chunk_, end_, base_ = 0;
  uint32_t own_ = 0, found_ = 0, word_ = 0;
};

template <class Element, int kSize, bool kCompressed>
class MmaBackwardKeys {
  static constexpr int kPitch = row_pitch(kSize), kStageBytes = 2 * kMmaRows * kPitch;

 public:
  __device__ __forceinline__ MmaBackwardKeys(const MmaArguments& arguments, char* shared)
      : arguments_(arguments),
        all_(arguments.all),
        keys_(ptx::shared_address(shared)),
        tokens_(tile_tokens(arguments)),
        offset_(arguments.all.keys - arguments.all.queries),
        scale_(arguments.all.scale * kLog2e) {
    statistics_ = reinterpret_cast<Statistics*>(shared + (2 * kMmaKeys + 2 * kMmaStages * kMmaRows) * kPitch);
    slots_ = reinterpret_cast<int32_t*>(statistics_ + kMmaStages * kMmaRows);
    times_ = reinterpret_cast<float*>(slots_ + 3 * kMmaRows);
  }

  __device__ __forceinline__ void run() {
    find_item();
    const Rows &keys = kCompressed ? all_.compressed_key : all_.key,
               &values = kCompressed ? all_.compressed_value : all_.value;
    copy_rows<Element, kMmaKeys, kSize>(keys_, keys, batch_, key_head_, first_, rows_, all_.size);
    copy_rows<Element, kMmaKeys, kSize>(keys_ + kMmaKeys * kPitch, values, batch_, key_head_, first_, rows_,
                                        all_.value_size);
    grad_key_.clear();
    grad_value_.clear();
    if constexpr (kCompressed) {
      walk(TokenRange(begin_, end_), 0);
    } else {
      if (all_.gates[1].data != nullptr) {
        const int64_t head = static_cast<int64_t>(batch_) * all_.key_heads + key_head_;
        repeats_ = *arguments_.repeats != 0;
        walk(MappedTokens(arguments_.seen_by + (head * all_.key_blocks + block_) * arguments_.words, begin_, end_), 1);
      }
      if (all_.gates[2].data != nullptr) {
        const int32_t window = min(all_.window, all_.keys);
        walk(TokenRange(max(begin_, first_ - offset_), min(end_, first_ + rows_ - 1 - offset_ + window)), 2);
      }
    }
    store();
  }

 private:
  // Tiles that many queries see come first, in `splits` items each.
  __device__ __forceinline__ void find_item() {
    const auto items = static_cast<int32_t>(key_items(arguments_));
    const auto index = static_cast<int32_t>(blockIdx.x);
    const int32_t item = index % items, shared_items = arguments_.first_tiles * arguments_.splits;
    key_head_ = index / items % all_.key_heads, batch_ = index / items / all_.key_heads;
    const bool is_shared = item < shared_items;
    const int32_t tile = is_shared ? item / arguments_.splits : arguments_.first_tiles + item - shared_items;
    const int32_t split = is_shared ? item % arguments_.splits : 0, splits = is_shared ? arguments_.splits : 1;
    block_ = tile / arguments_.block_tiles;
    const int32_t inside = tile % arguments_.block_tiles * kMmaKeys,
                  all_rows = kCompressed ? all_.compressed : all_.keys;
    first_ = block_ * arguments_.tile_block + inside;
    rows_ = min(min(kMmaKeys, arguments_.tile_block - inside), all_rows - first_);
    // The first token that sees the first key, then even shares of what follows, cut between words of maps.
    const int32_t least = kCompressed ? first_ * all_.compress_stride + all_.compress_block - 1 : first_;
    const int32_t from = min(max(least - offset_, 0), all_.queries) / 32 * 32;
    const int32_t share = ((all_.queries - from + splits - 1) / splits + 31) / 32 * 32;
    begin_ = min(from + split * share, all_.queries), end_ = min(begin_ + share, all_.queries);
  }

  __device__ __forceinline__ uint32_t query_rows(int stage) const {
    return keys_ + 2 * kMmaKeys * kPitch + stage * kStageBytes;
  }
  __device__ __forceinline__ uint32_t grad_rows(int stage) const { return query_rows(stage) + kMmaRows * kPitch; }

  template <class Steps>
  __device__ __forceinline__ void walk(Steps steps, int branch) {
    const bool is_first_warp = threadIdx.x < 32;
    __syncthreads();  // everyone is done with the walk before
    if (is_first_warp) steps.next(slots_, tokens_);
    __syncthreads();
    int ring = 0, stage = 0;
    bool is_there = slots_[0] >= 0;
    if (is_there) load_step(branch, ring, stage);
    ptx::cp_async_commit_group();
    while (is_there) {
      const int following = ring == 2 ? 0 : ring + 1;
      if (is_first_warp) steps.next(slots_ + following * kMmaRows, tokens_);
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // the step has come, and everyone is done with the one before it
      is_there = slots_[following * kMmaRows] >= 0;
      if (is_there) load_step(branch, following, 1 - stage);
      ptx::cp_async_commit_group();
      add(branch, ring, stage);
      ring = following, stage = 1 - stage;
    }
    ptx::cp_async_wait_group<0>();
  }

  __device__ __forceinline__ void load_step(int branch, int ring, int stage) {
    constexpr int kUnits = kSize / 8;
    const int32_t* slots = slots_ + ring * kMmaRows;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t shift = arguments_.head_shift, mask = (1 << shift) - 1;
#pragma unroll 4
    for (int i = 0; i < kMmaRows * kUnits / kMmaThreads; ++i) {
      const int index = thread + i * kMmaThreads, row = index / kUnits, unit = index % kUnits;
      const int32_t token = slots[row >> shift], own = row & mask;
      const bool is_row = token >= 0 && own < all_.group;
      const int32_t head = key_head_ * all_.group + own;
      copy_unit<Element>(query_rows(stage) + row * kPitch,
                         is_row ? row_at<Element>(all_.query, batch_, token, head) : nullptr, unit, all_.size,
                         all_.query.data);
      copy_unit<Element>(grad_rows(stage) + row * kPitch,
                         is_row ? row_at<Element>(all_.grad_output, batch_, token, head) : nullptr, unit,
                         all_.value_size, all_.grad_output.data);
    }
    if (thread < kMmaRows) {
      const int32_t token = slots[thread >> shift], own = thread & mask;
      const bool is_row = token >= 0 && own < all_.group;
      const int64_t at =
          is_row ? (static_cast<int64_t>(batch_) * all_.queries + token) * all_.heads + key_head_ * all_.group + own
                 : 0;
      ptx::cp_async_cg_shared_global_16_fill(ptx::shared_address(statistics_ + stage * kMmaRows + thread),
                                             arguments_.statistics[branch] + at, is_row ? 16 : 0);
      if (!kCompressed && branch == 1 && repeats_) {
        const int64_t list =
            ((static_cast<int64_t>(batch_) * all_.queries + token) * all_.key_heads + key_head_) * all_.list_length;
        int32_t count = 0;
        for (int32_t i = 0; is_row && i < all_.list_length; ++i) count += all_.lists[list + i] == block_;
        times_[ring * kMmaRows + thread] = static_cast<float>(count);
      }
    }
  }

  // The rows are 16 keys of this warp, the columns a step's queries. Columns without a query have gate 0.
  __device__ __forceinline__ void add(int branch, int ring, int stage) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t* slots = slots_ + ring * kMmaRows;
    // Tokens ascend: where the first sees every key of the tile, all do, but for the end of a window.
    const int32_t place = slots[0] + offset_;
    const int32_t seen = kCompressed ? compressed_before(all_, place + 1) : place + 1;
    const bool hides = seen < first_ + rows_ || (!kCompressed && branch == 2);
    const bool has_times = !kCompressed && branch == 1 && repeats_;
    const uint32_t own_keys = keys_ + warp * 16 * kPitch;
#pragma unroll 1
    for (int32_t begin = 0; begin < kMmaRows; begin += kMmaPart) {
      Sums<kMmaPart> scores, differences;
      multiply_rows<Element, kMmaPart, kSize>(scores, own_keys, query_rows(stage) + begin * kPitch);
      multiply_rows<Element, kMmaPart, kSize>(differences, own_keys + kMmaKeys * kPitch,
                                              grad_rows(stage) + begin * kPitch);
      if (hides) hide(branch, slots, begin, scores);
#pragma unroll
      for (int i = 0; i < kMmaPart / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int32_t column = begin + tile::fragment_column(lane, i + j);
          const Statistics own = statistics_[stage * kMmaRows + column];
          const float gate = has_times ? own.gate * times_[ring * kMmaRows + column] : own.gate;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& score = scores.values[i + 2 * half + j];
            float& difference = differences.values[i + 2 * half + j];
            score = gate * ptx::ex2_approx_ftz_f32(score * scale_ - own.lse);
            difference = score * (difference - own.delta);
          }
        }
      }
      add_products<Element, kSize, kMmaPart>(grad_value_, scores, grad_rows(stage) + begin * kPitch);
      add_products<Element, kSize, kMmaPart>(grad_key_, differences, query_rows(stage) + begin * kPitch);
    }
  }

  __device__ __forceinline__ void hide(int branch, const int32_t* slots, int32_t begin, Sums<kMmaPart>& scores) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t key = first_ + static_cast<int32_t>(threadIdx.x / 32) * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kMmaPart / 2; ++i) {
      const int32_t column = begin + tile::fragment_column(lane, i);
      const int32_t place = slots[column >> arguments_.head_shift] + offset_;
      const int32_t own = key + i / 2 % 2 * 8;
      const int32_t end = kCompressed ? compressed_before(all_, place + 1) : place + 1;
      const bool is_near = kCompressed || branch == 1 || own > place - all_.window;
      if (own >= end || !is_near) scores.values[i] = tile::minus_infinity();
    }
  }

  __device__ __forceinline__ void store() {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), warp = static_cast<int32_t>(threadIdx.x / 32);
    float* item = arguments_.partial + static_cast<int64_t>(blockIdx.x) * kMmaKeys * 2 * kSize;
#pragma unroll
    for (int i = 0; i < kSize / 2; i += 2) {
      float* row = item + (warp * 16 + tile::fragment_row(lane, i)) * 2 * kSize + tile::fragment_column(lane, i);
      *reinterpret_cast<float2*>(row) =
          make_float2(grad_key_.values[i] * all_.scale, grad_key_.values[i + 1] * all_.scale);
      *reinterpret_cast<float2*>(row + kSize) = make_float2(grad_value_.values[i], grad_value_.values[i + 1]);
    }
  }

  const MmaArguments& arguments_;
  const Arguments& all_;
  uint32_t keys_;
  int32_t tokens_, offset_;
  float scale_;
  Statistics* statistics_;
  int32_t* slots_;
  float* times_;
  bool repeats_ = false;
  int32_t batch_, key_head_, block_, first_, rows_, begin_, end_;
  Sums<kSize> grad_key_, grad_value_;
};

template <class Element, int kSize, bool kCompressed>
__global__ void __launch_bounds__(kMmaThreads, 2) mma_backward_keys(const __grid_constant__ MmaArguments arguments) {
  extern __shared__ __align__(16) char shared[];
  MmaBackwardKeys<Element, kSize, kCompressed>(arguments, shared).run();
}

// A row of keys or means: the sums of its tile's items in order and, of keys, what reached the means it is part of.
template <class Element, int kSize, bool kCompressed>
__global__ void __launch_bounds__(kMmaThreads) add_partial(const __grid_constant__ MmaArguments arguments) {
  const Arguments& a = arguments.all;
  const int32_t all_rows = kCompressed ? a.compressed : a.keys;
  const auto row = static_cast<int32_t>(blockIdx.x % all_rows);
  const auto head = static_cast<int32_t>(blockIdx.x / all_rows % a.key_heads);
  const auto batch = static_cast<int32_t>(blockIdx.x / all_rows / a.key_heads);
  const int32_t inside = row % arguments.tile_block;
  const int32_t tile = row / arguments.tile_block * arguments.block_tiles + inside / kMmaKeys;
  const bool is_shared = tile < arguments.first_tiles;
  const int64_t unit = static_cast<int64_t>(batch) * a.key_heads + head;
  const int64_t item =
      unit * key_items(arguments) +
      (is_shared ? tile * arguments.splits : arguments.first_tiles * arguments.splits + tile - arguments.first_tiles);
  const float* from = arguments.partial + (item * kMmaKeys + inside % kMmaKeys) * 2 * kSize;
  const int32_t splits = arguments.partial == nullptr ? 0 : is_shared ? arguments.splits : 1;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < a.size + a.value_size; i += kMmaThreads) {
    const bool is_key = i < a.size;
    const int32_t column = is_key ? i : i - a.size;
    float sum = 0;
    for (int32_t split = 0; split < splits; ++split) {
      sum += from[static_cast<int64_t>(split) * kMmaKeys * 2 * kSize + (is_key ? column : kSize + column)];
    }
    if constexpr (kCompressed) {
      const Rows& to = is_key ? a.grad_compressed_key : a.grad_compressed_value;
      if (a.adds_means) {
        result_at<float>(to, batch, row, head)[column] = sum;
      } else if (to.data != nullptr) {
        result_at<Element>(to, batch, row, head)[column] = tile::from_float<Element>(sum);
      }
      continue;
    }
    if (a.adds_means) {
      const Rows& means = is_key ? a.grad_compressed_key : a.grad_compressed_value;
      const int32_t last = row / a.compress_stride, end = compressed_before(a, a.keys);
      float from_means = 0;
      for (int32_t c = max(last - a.compress_block / a.compress_stride + 1, 0); c <= last && c < end; ++c) {
        from_means += row_at<float>(means, batch, c, head)[column];
      }
      sum += from_means / static_cast<float>(a.compress_block);
    }
    result_at<Element>(is_key ? a.grad_key : a.grad_value, batch, row, head)[column] = tile::from_float<Element>(sum);
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
