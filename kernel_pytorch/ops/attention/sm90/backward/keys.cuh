// A warpgroup of the backward that owns 64 keys: their scores and gradients for one tile of queries after another.
//
// Per tile: dP^T = V dO^T with dV += P^T dO, dS while dV still runs; then S^T of the next tile with dK += dS^T Q, its
// exponentials while dK still runs. One array of scores and one of A operands serve all of it: with separate ones the
// registers would leave too few for the warpgroup that sums dQ. The product of a tile past the last (on old data)
// keeps branches away from wgmma. Waits on barriers stand between arithmetic and the wait for a product so that the
// assembler cannot swap the two. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/parts.cuh"
#include "kernel_pytorch/ops/attention/sm90/backward/scores.cuh"

namespace kernel_pytorch::attention {

// Zeros in rows [first, last) of a tile, by a warpgroup: what lies past a sequence's end in memory may be anything, and
// 0 times it not 0. Ends with the rows visible to products of all its warps.
template <int kRows, int kColumns>
__device__ __forceinline__ void zero_rows(uint32_t tile, int first, int last, int warpgroup) {
  constexpr int kUnits = (kColumns + 63) / 64 * 8;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < (last - first) * kUnits; i += 128) {
    const int row = first + i / kUnits, unit = i % kUnits;
    ptx::st_shared_v4(tile + unit / 8 * (kRows * 128) + row * 128 + unit % 8 * 16, {0, 0, 0, 0});
  }
  ptx::fence_proxy_async_shared_cta();
  ptx::barrier_sync(2 + warpgroup, 128);
}

// Accumulators of 64 keys, times `scale`, to rows of a gradient. Each warp turns its 16 rows round in shared memory, 64
// columns at a time, in a chunk of kRows rows that is its warpgroup's alone; kTogether vectors are read before they are
// written, where registers allow.
template <class T, int kTogether, int kCount>
__device__ __forceinline__ void store_gradient(const float (&values)[kCount], float scale, uint32_t chunk,
                                               const RowTensor& gradient, int64_t offset, int row, int rows,
                                               int columns, int lane) {
  T* data = static_cast<T*>(gradient.data) + offset;
#pragma unroll
  for (int first = 0; first < kCount; first += 32) {
    constexpr int kUnits = kCount % 32 == 0 ? 8 : 4;  // of 16 bytes a row; 96 columns end with a half chunk
    const int units = first + 32 <= kCount ? 8 : kUnits;
#pragma unroll
    for (int block = 0; block < units / 2; ++block) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = values + first + 8 * block + 2 * i;
        const float scaled[2] = {pair[0] * scale, pair[1] * scale};
        words[i] = tile::Word<T>::pack(scaled);
      }
      ptx::stmatrix_x4(chunk + tile::swizzled_offset(row + lane % 16, block * 2 + lane / 16), words);
    }
    __syncwarp();
#pragma unroll kTogether
    for (int i = lane; i < 16 * units; i += 32) {
      const int at = row + i / units, unit = i % units;
      if (at < rows && first * 2 + unit * 8 < columns) {
        const uint32_t source = chunk + tile::swizzled_offset(at, unit);
        tile::store(data + at * gradient.row + first * 2 + unit * 8, tile::load_from_shared<T>(source));
      }
    }
    __syncwarp();
  }
}

__device__ __forceinline__ int64_t gradient_offset(const RowTensor& gradient, const BackwardWork& work) {
  return work.memory_batch * gradient.batch + work.key_head * gradient.head +
         (work.head.first_key + work.first_key) * gradient.row;
}

// Stores the gradients of 64 keys, from column first_column on.
template <class Result, int kTogether = 1, int kCount>
__device__ __forceinline__ void store_key_gradient(const BackwardArguments& arguments, const BackwardWork& work,
                                                   const float (&values)[kCount], float scale, uint32_t chunk,
                                                   const RowTensor& gradient, int first_column, int columns, int row,
                                                   int lane) {
  const int64_t offset = gradient_offset(gradient, work) + first_column;
  if constexpr (sizeof(Result) == 4) {
    const GradientRows target{static_cast<float*>(gradient.data) + offset + row * gradient.row, gradient.row,
                              work.rows - row, columns - first_column, arguments.accumulates};
    store_float_gradient(values, scale, target, lane);
  } else {
    store_gradient<Result, kTogether>(values, scale, chunk, gradient, offset, row, work.rows, columns - first_column,
                                      lane);
  }
}

// Zeros the gradients of keys that no query sees; 256 threads.
template <class Result>
__device__ __forceinline__ void zero_key_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                                   int thread) {
  constexpr int kUnit = 16 / sizeof(Result);
  if (sizeof(Result) == 4 && arguments.accumulates) return;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const RowTensor& gradient = i == 0 ? arguments.grad_key : arguments.grad_value;
    const int units = (i == 0 ? arguments.head_columns : arguments.value_columns) / kUnit;
    Result* data = static_cast<Result*>(gradient.data) + gradient_offset(gradient, work);
#pragma unroll 1
    for (int at = thread; at < work.rows * units; at += 256) {
      tile::store(data + at / units * gradient.row + at % units * kUnit, tile::Vector<Result>::zero());
    }
  }
}

template <class T, class Result, Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void key_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                              const char* shared_memory, BackwardBarriers<kTile>& barriers,
                                              int warpgroup) {
  using Shared = BackwardShared<kTile>;
  using ScoreMma = ptx::Wgmma<kTile.queries, kMmaType<T>>;
  using KeyMma = ptx::Wgmma<kTile.head, kMmaType<T>>;
  using ValueMma = ptx::Wgmma<kTile.value, kMmaType<T>>;
  using Keys = tile::AlongColumns<kTile.keys>;
  using Queries = tile::AlongColumns<kTile.queries>;
  using QueryRows = tile::AlongRows<kTile.queries>;
  constexpr int kScores = kTile.queries / 2;
  constexpr bool kMayHaveRemains =
      kFeatures.packed || kFeatures.key_lengths;  // a tile may contain another sequence's rows
  const uint32_t shared = ptx::shared_address(shared_memory);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const int row = warpgroup * 64 + warp * 16;  // of the warp, in the block
  const uint32_t keys = Keys::base(shared + Shared::kKey + warpgroup * 64 * 128);
  const uint32_t values = Keys::base(shared + Shared::kValue + warpgroup * 64 * 128);

  float grad_key[kTile.head / 2], grad_value[kTile.value / 2];
  float scores[kScores], bounds[kScores / 2];
  uint32_t operand[kScores / 2], copies[kScores / 2];
  tile::PipelineState now, ring{0, 1};

  const StepScores<T, kFeatures, kTile> step_scores{arguments, work, row, lane};
  // Queries of the next sequence in a sequence's last tile.
  const auto remains_from = [&](const BackwardStep& step) {
    return least(kTile.queries, work.head.queries - step.tile * kTile.queries);
  };

  barriers.key->wait(0);
  if (kMayHaveRemains && work.first_key + kTile.keys > work.head.keys) {
    const int first = greatest(warpgroup * 64, work.head.keys - work.first_key);
    barriers.value->wait(0);
    zero_rows<kTile.keys, kTile.head>(shared + Shared::kKey, first, warpgroup * 64 + 64, warpgroup);
    zero_rows<kTile.keys, kTile.value>(shared + Shared::kValue, first, warpgroup * 64 + 64, warpgroup);
  }
  barriers.query_full[0].wait(0);
  if (kFeatures.packed && remains_from(work.ring[0]) < kTile.queries) {
    zero_rows<kTile.queries, kTile.head>(shared + Shared::kQuery, remains_from(work.ring[0]), kTile.queries, warpgroup);
  }
  load_record(bounds, shared + Shared::kRecord, lane);
  ptx::wgmma_fence();
  tile::multiply<ScoreMma, Keys, Queries, kTile.head / 16>(scores, keys, Queries::base(shared + Shared::kQuery), false);
  ptx::wgmma_commit_group();
  const Kept<kScores> first_kept = step_scores.kept_early(work.ring[0]);
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(scores);
  step_scores.exponentials(scores, copies, bounds, work.ring[0]);
  step_scores.operands(operand, copies, scores, work.ring[0], first_kept);
  // Values and the output's gradient may arrive while the first scores are computed.
  barriers.value->wait(0);
  barriers.grad_full[0].wait(0);
  if (kFeatures.packed && remains_from(work.ring[0]) < kTile.queries) {
    zero_rows<kTile.queries, kTile.value>(shared + Shared::kGrad, remains_from(work.ring[0]), kTile.queries, warpgroup);
  }
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    tile::PipelineState next = now;
    if (step + 1 < work.steps) next.advance(kTile.stages);
    const BackwardStep& next_step = work.ring[least(step + 1, work.steps - 1) % kBackwardSteps];
    const uint32_t query = shared + Shared::kQuery + now.stage * Shared::kQueryBytes;
    const uint32_t grad = shared + Shared::kGrad + now.stage * Shared::kGradBytes;
    const uint32_t next_query = shared + Shared::kQuery + next.stage * Shared::kQueryBytes;
    const uint32_t deltas = shared + Shared::kRecord + now.stage * Shared::kRecordBytes + kTile.queries * 4;
    if constexpr (!kFeatures.dropout) {
      load_record(bounds, deltas, lane);
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = bounds[i / 4 * 2 + i % 2];
    }
    ptx::wgmma_fence();
    tile::multiply<ScoreMma, Keys, Queries, kTile.value / 16>(scores, values, Queries::base(grad), !kFeatures.dropout);
    ptx::wgmma_commit_group();
    tile::multiply<ValueMma, QueryRows, kTile.queries / 16>(grad_value, operand, QueryRows::base(grad), step > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
    if constexpr (kFeatures.dropout) load_record(bounds, deltas, lane);
    differentiate<T, kFeatures>(scores, operand, copies, bounds, arguments.score);
    barriers.query_full[next.stage].wait(next.parity);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad_value);
    if (lane == 0) barriers.grad_empty[now.stage].arrive();
    tile::pack_fragment<T>(operand, scores);
    barriers.score_empty[ring.stage].wait(ring.parity);
    store_scores(shared + Shared::kScore + ring.stage * Shared::kScoreBytes, operand, row + lane / 4, lane);
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane == 0) barriers.score_full[ring.stage].arrive();
    ring.advance(kTile.score_stages);
    if (kFeatures.packed && remains_from(next_step) < kTile.queries) {
      zero_rows<kTile.queries, kTile.head>(next_query, remains_from(next_step), kTile.queries, warpgroup);
    }
    load_record(bounds, shared + Shared::kRecord + next.stage * Shared::kRecordBytes, lane);
    ptx::wgmma_fence();
    tile::multiply<ScoreMma, Keys, Queries, kTile.head / 16>(scores, keys, Queries::base(next_query), false);
    ptx::wgmma_commit_group();
    tile::multiply<KeyMma, QueryRows, kTile.queries / 16>(grad_key, operand, QueryRows::base(query), step > 0);
    ptx::wgmma_commit_group();
    const Kept<kScores> kept = step_scores.kept_early(next_step);
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
    step_scores.exponentials(scores, copies, bounds, next_step);
    barriers.grad_full[next.stage].wait(next.parity);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad_key);
    if (lane == 0) barriers.query_empty[now.stage].arrive();
    if (kFeatures.packed && remains_from(next_step) < kTile.queries) {
      zero_rows<kTile.queries, kTile.value>(shared + Shared::kGrad + next.stage * Shared::kGradBytes,
                                            remains_from(next_step), kTile.queries, warpgroup);
    }
    step_scores.operands(operand, copies, scores, next_step, kept);
    now = next;
  }
  const uint32_t stage = shared + Shared::kValue;
  constexpr int kTogether = kTile.head > 64 ? 4 : 1;
  const float value_scale = kUnscale<T> * (kFeatures.dropout ? arguments.score.dropout_scale : 1.0f);
  store_key_gradient<Result, kTogether>(arguments, work, grad_value, value_scale, stage, arguments.grad_value, 0,
                                        arguments.value_columns, row, lane);
  store_key_gradient<Result, kTogether>(arguments, work, grad_key, arguments.score.scale * kUnscale<T>, stage,
                                        arguments.grad_key, 0, arguments.head_columns, row, lane);
}

}  // namespace kernel_pytorch::attention
