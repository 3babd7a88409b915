// What happens to a warp's finished sums: scale, bias, activation, residual in registers, then box by box on their way
// out (engines/gemm/sm90/boxes.cuh). Rows and columns beyond the matrix are computed and not written. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/auxiliary.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/boxes.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/pairs.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"

namespace kernel_pytorch::product {

template <Sm90Config kConfig, Sm90Epilogue kEpilogue, class Out>
class Sm90Finish {
  static constexpr bool kHalves = kEpilogue.form == Sm90Form::kGatedHalves;
  static constexpr bool kGated = kEpilogue.form == Sm90Form::kGated || kHalves;
  static constexpr bool kSpread = kEpilogue.form == Sm90Form::kGatedGradient;
  static constexpr bool kAccurate = sizeof(Out) == 4;
  static constexpr bool kScalesRows = kEpilogue.scaling == Sm90Scaling::kRows;
  static constexpr int kBoxColumns = 128 / static_cast<int>(sizeof(Out));
  static constexpr int kValues = kBoxColumns / 2;  // of a box, a thread's share
  static constexpr int kSums = kGated ? 2 * kValues : kSpread ? kValues / 2 : kValues;
  static constexpr int kPerOutput = kGated ? 2 : 1;  // columns of sums for one of the output
  using Saved = typename AuxiliaryType<kEpilogue.float_saved, Out>::Type;
  using Residual = typename AuxiliaryType<kEpilogue.float_residual, Out>::Type;

  // The epilogue prefetches the next boxes of one 16-bit auxiliary matrix into registers that are free while the
  // products run: all boxes (64 registers) if the epilogue does little else, otherwise two.
  static constexpr bool kWhole = kEpilogue.whole_vectors;
  static constexpr int kRowBlocks = kConfig.tile_m / (64 * kSm90Warpgroups);
  static constexpr bool kSavedAhead =
      kWhole && kEpilogue.form == Sm90Form::kGradient && sizeof(Saved) == 2 && kValues % 16 == 0;
  static constexpr bool kPairsAhead = kWhole && kSpread && kRowBlocks == 1 && sizeof(Saved) == 2 && sizeof(Out) == 2 &&
                                      !kEpilogue.residual && !kEpilogue.amax && !kEpilogue.grouped;
  static constexpr bool kResidualAhead = kWhole && kEpilogue.residual && kEpilogue.form != Sm90Form::kGradient &&
                                         !kSpread && sizeof(Residual) == 2 && kValues % 16 == 0;
  static constexpr int kTileBoxes = kConfig.tile_n / 2 / kSums;  // of 16 rows
  static constexpr bool kIsShort = kEpilogue.form == Sm90Form::kPlain && kEpilogue.kind == pointwise::Kind::kIdentity &&
                                   !kEpilogue.bias && !kEpilogue.preactivation && !kEpilogue.amax;
  static constexpr int kFetchedBoxes = kIsShort ? kRowBlocks * kTileBoxes : 2;
  // A box that lies behind the matrix's last column fetches nothing for a later one: what the next row block needs was
  // fetched by the boxes of the same columns.
  static_assert(kRowBlocks == 1 || kFetchedBoxes % kTileBoxes == 0 || !(kSavedAhead || kResidualAhead));
  static constexpr int kBoxVectors = kValues / 8;
  static constexpr bool kFetches = kSavedAhead || kResidualAhead || kPairsAhead;
  static constexpr int kFetchedVectors = kFetches ? kFetchedBoxes * kBoxVectors : 1;

 public:
  // A value for every column is read before the tile's product and handed over in shared memory after it: the factors
  // of b's rows, or the bias where there are none.
  static constexpr bool kSharesColumns = kScalesRows || kEpilogue.bias;

  // `boxes`: the warp's own; `columns`: its warpgroup's.
  __device__ __forceinline__ Sm90Finish(const Sm90Arguments& arguments, uint32_t boxes, uint32_t columns)
      : arguments_(arguments), boxes_(boxes), columns_(columns), lane_(static_cast<int32_t>(threadIdx.x % 32)) {}

  template <int kColumns>
  __device__ __forceinline__ void prefetch_columns(const Sm90Place& place) {
    if constexpr (kSharesColumns) {
      int64_t first = 0;  // of the scales
      if constexpr (kEpilogue.grouped) {
        bias_first_ = place.matrix * arguments_.groups.bias_stride;
        first = place.matrix * arguments_.groups.scale_b_stride;
      }
#pragma unroll
      for (int i = 0; i < (kColumns + 127) / 128; ++i) {
        const int32_t within = i * 128 + static_cast<int32_t>(threadIdx.x % 128);
        const int32_t at = min(column_at<kColumns>(place.column, within), arguments_.n - 1);
        ahead_[i] = kScalesRows ? __ldg(arguments_.scale_b + first + at * arguments_.scale_b_row) : bias_at(at);
      }
    }
  }
  // By the whole warpgroup.
  template <int kColumns>
  __device__ __forceinline__ void publish_columns(int32_t warpgroup) {
    if constexpr (kSharesColumns) {
#pragma unroll
      for (int i = 0; i < (kColumns + 127) / 128; ++i) {
        ptx::st_shared_f32(columns_ + (i * 128 + threadIdx.x % 128) * 4, ahead_[i]);
      }
      ptx::barrier_sync_aligned(1 + warpgroup, 128);
    }
  }

  // The first boxes, while the tile's first products run; `row` is the warp's first.
  __device__ __forceinline__ void fetch_first(int32_t row, const Sm90Place& at) {
#pragma unroll
    for (int box = 0; box < kFetchedBoxes; ++box) fetch(box, row, at);
  }

  // The warp's rows of row block `block`, of which the first begins at `row`; sums as wgmma leaves them, from the
  // place's column on.
  template <int kCount>
  __device__ __forceinline__ void store(const float (&sums)[kCount], int block, int32_t row, const Sm90Place& at) {
    row_ = row + 64 * block;
    batch_ = at.batch;
    if constexpr (kEpilogue.grouped) end_ = at.end;
    if constexpr (kHalves) return store_halves(sums, at);
    load_factors(at);
#pragma unroll
    for (int box = 0; box < kCount / kSums; ++box) {
      const int of_tile = block * kTileBoxes + box;
      const int32_t within = box * kSums * 2, first = at.column + within;
      if (first >= arguments_.n) break;
      float values[kSums];
#pragma unroll
      for (int i = 0; i < kSums; ++i) values[i] = sums[box * kSums + i];
      finish(values, first, within, fetched_ + of_tile % kFetchedBoxes * kBoxVectors);
      fetch(of_tile + kFetchedBoxes, row, at);
    }
  }

  // Rows behind the last group are zeros; by all threads of the consumers, of which this is one.
  __device__ __forceinline__ void clear_tail(int32_t thread) const {
    constexpr int32_t kPerVector = 16 / static_cast<int32_t>(sizeof(Out)), kThreads = 128 * kSm90Warpgroups;
    const Sm90Groups& groups = arguments_.groups;
    const int32_t end = groups.count == 0 ? 0 : group_end(groups, groups.count - 1);
    for (int32_t row = end + static_cast<int32_t>(blockIdx.x); row < groups.rows; row += gridDim.x) {
      for (int32_t column = thread * kPerVector; column < arguments_.n; column += kThreads * kPerVector) {
        if (column < arguments_.n / kPerOutput) {
          ptx::st_global_v4(static_cast<Out*>(groups.output) + row * groups.output_stride + column, {0, 0, 0, 0});
        }
        if constexpr (kEpilogue.preactivation) {
          Out* target = static_cast<Out*>(groups.preactivation) + row * groups.preactivation_stride + column;
          ptx::st_global_v4(target, {0, 0, 0, 0});
        }
      }
    }
  }

  // Before the block ends.
  __device__ __forceinline__ void drain() {
    boxes_.drain();
    if constexpr (kEpilogue.amax) publish_amax();
  }

 private:
  __device__ __forceinline__ float bias_at(int32_t column) const {
    return element<typename AuxiliaryType<kEpilogue.float_bias, Out>::Type>(arguments_.bias, bias_first_ + column);
  }

  // Where the output has what becomes of the sums from `column` on.
  static __device__ __forceinline__ int32_t output_column(int32_t column) {
    return kSpread ? 2 * column : column / kPerOutput;
  }

  // The column of b that column `within` of a tile is, whose first is `first` in the order of tiles.
  template <int kColumns>
  __device__ __forceinline__ int32_t column_at(int32_t first, int32_t within) const {
    if constexpr (!kHalves) return first + within;
    const int32_t half = within / (kColumns / 2);
    return half * (arguments_.n / 2) + first / 2 + within - half * (kColumns / 2);
  }

  // Gates are the first half of a thread's sums, their ups the second: nothing has to change lanes.
  template <int kCount>
  __device__ __forceinline__ void store_halves(const float (&sums)[kCount], const Sm90Place& at) {
    constexpr int kColumns = 2 * kCount;
    const int32_t half = arguments_.n / 2;
#pragma unroll
    for (int box = 0; box < kCount / 2 / kValues; ++box) {
      const int32_t within = box * kBoxColumns, first = at.column / 2 + within;
      if (first >= half) break;
      float gates[kValues], ups[kValues];
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        gates[i] = sums[box * kValues + i];
        ups[i] = sums[kCount / 2 + box * kValues + i];
      }
      if constexpr (kEpilogue.bias) {
        add_columns(gates, within);
        add_columns(ups, kColumns / 2 + within);
      }
      if constexpr (kEpilogue.preactivation) {
        put<true>(gates, first);
        put<true>(ups, half + first);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) gates[i] = gated(gates[i], ups[i]);
      put<false>(gates, first);
    }
  }
  // Values of columns that the warpgroup shares, from `within` of the tile on.
  __device__ __forceinline__ void add_columns(float (&values)[kValues], int32_t within) const {
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      float first, second;
      ptx::ld_shared_v2_f32(first, second, columns_ + (within + tile::fragment_column(lane_, i)) * 4);
      values[i] += first, values[i + 1] += second, values[i + 2] += first, values[i + 3] += second;
    }
  }

  // Box `index` of the tile, if there is one, into its place.
  __device__ __forceinline__ void fetch(int index, int32_t row, const Sm90Place& at) {
    if constexpr (kFetches) {
      using T = typename AuxiliaryType<kSavedAhead ? kEpilogue.float_saved : kEpilogue.float_residual, Out>::Type;
      if (index >= kRowBlocks * kTileBoxes) return;
      const AuxiliaryPlace box = {.lane = lane_,
                                  .row = row + index / kTileBoxes * 64,
                                  .rows = arguments_.m,
                                  .column = output_column(at.column) + index % kTileBoxes * kBoxColumns,
                                  .columns = output_column(arguments_.n),
                                  .batch = at.batch};
      ptx::Word4* target = fetched_ + index % kFetchedBoxes * kBoxVectors;
      if constexpr (kPairsAhead) {
        fetch_pairs<Saved, kBoxVectors>(arguments_.saved, box, target);
      } else {
        fetch_auxiliary<T, kBoxVectors, true>(kSavedAhead ? arguments_.saved : arguments_.residual, box, target);
      }
    }
  }

  __device__ __forceinline__ void load_factors(const Sm90Place& at) {
    factors_[0] = factors_[1] = arguments_.alpha;
    if constexpr (kEpilogue.scaling == Sm90Scaling::kTensor) {
      const float* of_b = arguments_.scale_b;
      if constexpr (kEpilogue.grouped) of_b += at.matrix * arguments_.groups.scale_b_stride;
      factors_[0] = factors_[1] = arguments_.alpha * __ldg(arguments_.scale_a) * __ldg(of_b);
    }
    if constexpr (kScalesRows) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int32_t row = min(row_ + tile::fragment_row(lane_, 2 * i), (kEpilogue.grouped ? at.end : arguments_.m) - 1);
        if constexpr (kEpilogue.grouped) {
          if (arguments_.groups.gather_a != nullptr) row = arguments_.groups.gather_a[row];
        }
        factors_[i] = arguments_.alpha * __ldg(arguments_.scale_a + row * arguments_.scale_a_row);
      }
    }
  }

  // From `first` of the matrix, `within` of the tile.
  __device__ __forceinline__ void finish(float (&values)[kSums], int32_t first, int32_t within,
                                         const ptx::Word4* fetched) {
    scale(values, first, within);
    if constexpr (kEpilogue.preactivation) {
#pragma unroll
      for (int part = 0; part < kSums / kValues; ++part) {
        put<true>(values + part * kValues, first + part * kBoxColumns);
      }
    }
    if constexpr (kGated) {
      float gated[kValues];
      gate(values, gated);
      end(gated, first / 2, arguments_.n / 2, fetched);
    } else if constexpr (kPairsAhead) {
      uint32_t words[kValues / 2];
      spread_in_place<kEpilogue.kind, Saved, Out, kBoxVectors>(values, fetched, words);
      boxes_.put_pairs(arguments_.output, words,
                       {.column = first * 2, .row = row_, .batch = batch_, .rows = arguments_.m});
    } else if constexpr (kSpread) {
      float spread[kValues];
      load_auxiliary<Saved, kWhole>(arguments_.saved, place(first * 2, arguments_.n * 2), spread);
      spread_pairs<kEpilogue.kind, kAccurate>(lane_, values, spread);
      end(spread, first * 2, arguments_.n * 2, fetched);
    } else {
      activate(values, first, fetched);
      end(values, first, arguments_.n, fetched);
    }
  }

  __device__ __forceinline__ void scale(float (&values)[kSums], int32_t first, int32_t within) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {  // eight columns of both rows
      const int32_t column = tile::fragment_column(lane_, i);
      float of_columns[2];
      if constexpr (kSharesColumns) {
        ptx::ld_shared_v2_f32(of_columns[0], of_columns[1], columns_ + (within + column) * 4);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& value = values[i + j];
        value *= kScalesRows ? factors_[j / 2] * of_columns[j % 2] : factors_[j / 2];
        if constexpr (kEpilogue.bias) {
          value += kScalesRows ? bias_at(min(first + column + j % 2, arguments_.n - 1)) : of_columns[j % 2];
        }
      }
    }
  }

  __device__ __forceinline__ void activate(float (&values)[kValues], int32_t first, const ptx::Word4* fetched) const {
    if constexpr (kEpilogue.form == Sm90Form::kGradient) {
      float saved[kValues];
      if constexpr (kSavedAhead) {
        unpack_auxiliary<Saved>(fetched, saved);
      } else {
        load_auxiliary<Saved, kWhole>(arguments_.saved, place(first, arguments_.n), saved);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] *= pointwise::slope<kEpilogue.kind, kAccurate>(saved[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = pointwise::function<kEpilogue.kind, kAccurate>(values[i]);
    }
  }

  __device__ __forceinline__ float gated_pair(const float* pair) const {
    const bool is_second = arguments_.gates_are_second != 0;
    return gated(is_second ? pair[1] : pair[0], is_second ? pair[0] : pair[1]);
  }
  __device__ __forceinline__ float gated(float gate, float up) const {
    if constexpr (kEpilogue.clamped) {
      const float limit = arguments_.groups.limit;
      gate = fminf(gate, limit);
      up = fminf(fmaxf(up, -limit), limit) + 1.0f;
      return gate * pointwise::sigmoid<kAccurate>(arguments_.groups.slope * gate) * up;
    }
    return pointwise::function<kEpilogue.kind, kAccurate>(gate) * up;
  }

  // Eight columns of the output are two groups of four pairs, one pair a lane; afterwards a lane holds two neighbours,
  // as it does of sums.
  __device__ __forceinline__ void gate(const float (&values)[kSums], float (&gated)[kValues]) const {
    const bool odd = lane_ % 2 != 0;
    const int source = (lane_ & ~3) | (lane_ % 4 == 1 ? 2 : lane_ % 4 == 2 ? 1 : lane_ % 4);
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {  // columns i / 4 * 8 and on, row i % 4 / 2
      const float* low = values + i / 4 * 8 + i % 4;
      const float* high = low + 4;
      const float first = gated_pair(low), second = gated_pair(high);
      const float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      gated[i] = __shfl_sync(0xffffffffu, odd ? other : first, source);
      gated[i + 1] = __shfl_sync(0xffffffffu, odd ? second : other, source);
    }
  }

  __device__ __forceinline__ AuxiliaryPlace place(int32_t first, int32_t columns) const {
    return {.lane = lane_, .row = row_, .rows = arguments_.m, .column = first, .columns = columns, .batch = batch_};
  }

  __device__ __forceinline__ void end(float (&values)[kValues], int32_t first, int32_t columns,
                                      const ptx::Word4* fetched) {
    if constexpr (kEpilogue.residual) {
      float auxiliary[kValues];
      if constexpr (kResidualAhead) {
        unpack_auxiliary<Residual>(fetched, auxiliary);
      } else {
        load_auxiliary<Residual, kWhole>(arguments_.residual, place(first, columns), auxiliary);
      }
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] += arguments_.beta * auxiliary[i];
    }
    if constexpr (kEpilogue.amax) note_amax(values, first, columns);
    if constexpr (sizeof(Out) == 1) {
      const float factor = arguments_.output_scale == nullptr ? 1.0f : __ldg(arguments_.output_scale);
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] *= factor;
    }
    put<false>(values, first);
  }

  __device__ __forceinline__ void note_amax(const float (&values)[kValues], int32_t first, int32_t columns) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const bool is_inside =
          row_ + tile::fragment_row(lane_, i) < arguments_.m && first + tile::fragment_column(lane_, i) < columns;
      if (is_inside) amax_ = fmaxf(amax_, fabsf(values[i]));
    }
  }
  // The bits of nonnegative floats have the same order as integers.
  __device__ __forceinline__ void publish_amax() const {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(amax_));
    if (lane_ == 0) atomicMax(reinterpret_cast<unsigned int*>(arguments_.amax), most);
  }

  template <bool kPreactivation>
  __device__ __forceinline__ void put(const float* values, int32_t column) {
    const tile::TensorMap& map = kPreactivation ? arguments_.preactivation : arguments_.output;
    if constexpr (kEpilogue.grouped) {
      const Sm90Groups& groups = arguments_.groups;
      boxes_.put(map, values,
                 {.column = column,
                  .row = row_,
                  .batch = 0,
                  .rows = end_,
                  .data = kPreactivation ? groups.preactivation : groups.output,
                  .stride = kPreactivation ? groups.preactivation_stride : groups.output_stride,
                  .columns = kPreactivation ? arguments_.n : arguments_.n / kPerOutput});
    } else {
      boxes_.put(map, values, {.column = column, .row = row_, .batch = batch_, .rows = arguments_.m});
    }
  }

  const Sm90Arguments& arguments_;
  Sm90Boxes<kConfig, Out, kEpilogue.grouped> boxes_;
  uint32_t columns_;
  int32_t lane_;
  int32_t row_ = 0, batch_ = 0, end_ = 0;
  int64_t bias_first_ = 0;  // of the group
  float factors_[2] = {1.0f, 1.0f};
  float ahead_[2] = {0.0f, 0.0f};
  float amax_ = 0.0f;
  ptx::Word4 fetched_[kFetchedVectors];
};

}  // namespace kernel_pytorch::product
