// The backward's warpgroups for heads of more than 128 columns: accumulators of dK and dV for 64 keys fill two
// warpgroups, so each has its columns of both, and the work on scores is divided as well.
//
// The first computes S^T and the probabilities and sends them on; the second computes dP^T and dS, and stores dS for
// the first and for the reducer. The columns that the first has of dK trail by a step: their product of the step before
// is issued together with that of the next scores. sm_90a.
#pragma once

#include "kernel_pytorch/ops/attention/sm90/backward/keys.cuh"

namespace kernel_pytorch::attention {

// Columns of the first warpgroup: whole chunks, since a product cannot begin inside one.
KP_SHARED_CODE constexpr int first_columns(int columns) {
  return (columns / 64 + 1) / 2 * 64;
}

template <class T, Features kFeatures, BackwardTile kTile>
struct Wide {
  using Shared = BackwardShared<kTile>;
  using ScoreMma = ptx::Wgmma<64, kMmaType<T>>;
  using Keys = tile::AlongColumns<64>;
  using QueryRows = tile::AlongRows<64>;
  static constexpr int kScores = 32;
  static constexpr int kHeadFirst = first_columns(kTile.head), kValueFirst = first_columns(kTile.value);
  static constexpr int kChunkStep = 64 * 128;  // bytes of a chunk
  // The second warpgroup needs copies of the probabilities, and the operand too if it does not follow from them.
  static constexpr bool kSendsOperand = has_derivative(kFeatures) || kFeatures.dropout || kExponent<T> == 0;
  static constexpr int kSlots = kSendsOperand ? 1 : kExchangeSlots;
  static constexpr int kSlotBytes = exchange_bytes(kTile) / kSlots;

  static __device__ __forceinline__ uint32_t slot(uint32_t shared, int stage) {
    return shared + Shared::kExchange + stage * kSlotBytes + threadIdx.x % 128 * 16;
  }
  // Words of a thread, for the same thread of the other warpgroup.
  static __device__ __forceinline__ void send(uint32_t address, const uint32_t (&words)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      ptx::st_shared_v4(address + i * 2048, {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
    }
  }
  static __device__ __forceinline__ void receive(uint32_t (&words)[kScores / 2], uint32_t address) {
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      const ptx::Word4 four = ptx::ld_shared_v4(address + i * 2048);
      words[4 * i] = four.x;
      words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z;
      words[4 * i + 3] = four.w;
    }
  }
};

// Zeros the rows of other sequences; both warpgroups zero the same rows.
template <Features kFeatures, BackwardTile kTile, int kColumns>
__device__ __forceinline__ void zero_remains(uint32_t tile, const BackwardWork& work, const BackwardStep& step,
                                             int warpgroup) {
  if constexpr (kFeatures.packed) {
    const int first = work.head.queries - step.tile * kTile.queries;
    if (first < kTile.queries) zero_rows<kTile.queries, kColumns>(tile, first, kTile.queries, warpgroup);
  }
}
template <Features kFeatures, BackwardTile kTile, int kColumns>
__device__ __forceinline__ void zero_key_remains(uint32_t tile, const BackwardWork& work, int warpgroup) {
  if constexpr (kFeatures.packed || kFeatures.key_lengths) {
    const int first = work.head.keys - work.first_key;
    if (first < kTile.keys) zero_rows<kTile.keys, kColumns>(tile, first, kTile.keys, warpgroup);
  }
}

// The first warpgroup.
template <class T, class Result, Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void wide_probabilities(const BackwardArguments& arguments, const BackwardWork& work,
                                                   const char* shared_memory, BackwardBarriers<kTile>& barriers) {
  using W = Wide<T, kFeatures, kTile>;
  using Shared = typename W::Shared;
  using KeyMma = ptx::Wgmma<W::kHeadFirst, kMmaType<T>>;
  using ValueMma = ptx::Wgmma<W::kValueFirst, kMmaType<T>>;
  constexpr int kScores = W::kScores;
  const uint32_t shared = ptx::shared_address(shared_memory);
  const int lane = threadIdx.x % 32;
  const int row = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) * 16;
  const uint32_t keys = W::Keys::base(shared + Shared::kKey);
  float grad_key[W::kHeadFirst / 2], grad_value[W::kValueFirst / 2];
  float scores[kScores], bounds[kScores / 2];
  uint32_t operand[kScores / 2], copies[kScores / 2];
  tile::PipelineState now, ring, exchange{0, 1};

  const StepScores<T, kFeatures, kTile> step_scores{arguments, work, row, lane};
  const auto send_probabilities = [&](const BackwardStep& step, const Kept<kScores>& kept) {
    step_scores.operands(operand, copies, scores, step, kept);
    barriers.exchange_empty[exchange.stage].wait(exchange.parity);
    W::send(W::slot(shared, exchange.stage), copies);
    if constexpr (W::kSendsOperand) W::send(W::slot(shared, exchange.stage) + 8192, operand);
    __syncwarp();
    if (lane == 0) barriers.exchange_full[exchange.stage].arrive();
    exchange.advance(W::kSlots);
  };

  barriers.key->wait(0);
  zero_key_remains<kFeatures, kTile, kTile.head>(shared + Shared::kKey, work, 0);
  barriers.query_full[0].wait(0);
  zero_remains<kFeatures, kTile, kTile.head>(shared + Shared::kQuery, work, work.ring[0], 0);
  load_record(bounds, shared + Shared::kRecord, lane);
  ptx::wgmma_fence();
  tile::multiply<typename W::ScoreMma, typename W::Keys, typename W::Keys, kTile.head / 16>(
      scores, keys, W::Keys::base(shared + Shared::kQuery), false);
  ptx::wgmma_commit_group();
  const Kept<kScores> first_kept = step_scores.kept_early(work.ring[0]);
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(scores);
  step_scores.exponentials(scores, copies, bounds, work.ring[0]);
  send_probabilities(work.ring[0], first_kept);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    tile::PipelineState next = now;
    if (step + 1 < work.steps) next.advance(kTile.stages);
    const BackwardStep& next_step = work.ring[least(step + 1, work.steps - 1) % kBackwardSteps];
    const uint32_t query = shared + Shared::kQuery + now.stage * Shared::kQueryBytes;
    const uint32_t grad = shared + Shared::kGrad + now.stage * Shared::kGradBytes;
    const uint32_t next_query = shared + Shared::kQuery + next.stage * Shared::kQueryBytes;
    barriers.grad_full[now.stage].wait(now.parity);
    zero_remains<kFeatures, kTile, kTile.value>(grad, work, work.ring[step % kBackwardSteps], 0);
    ptx::wgmma_fence();
    tile::multiply<ValueMma, typename W::QueryRows, 4>(grad_value, operand, W::QueryRows::base(grad), step > 0);
    ptx::wgmma_commit_group();
    barriers.query_full[next.stage].wait(next.parity);
    zero_remains<kFeatures, kTile, kTile.head>(next_query, work, next_step, 0);
    load_record(bounds, shared + Shared::kRecord + next.stage * Shared::kRecordBytes, lane);
    barriers.score_full[ring.stage].wait(ring.parity);
    ptx::wgmma_fence();
    tile::multiply<typename W::ScoreMma, typename W::Keys, typename W::Keys, kTile.head / 16>(
        scores, keys, W::Keys::base(next_query), false);
    ptx::wgmma_commit_group();
    tile::multiply<KeyMma, typename W::Keys, typename W::QueryRows, 4>(
        grad_key, W::Keys::base(shared + Shared::kScore + ring.stage * Shared::kScoreBytes), W::QueryRows::base(query),
        step > 0);
    ptx::wgmma_commit_group();
    const Kept<kScores> kept = step_scores.kept_early(next_step);
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
    ptx::tie_registers(grad_value);
    if (lane == 0) barriers.grad_empty[now.stage].arrive();
    step_scores.exponentials(scores, copies, bounds, next_step);
    barriers.exchange_empty[exchange.stage].wait(exchange.parity);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad_key);
    if (lane == 0) {
      barriers.query_empty[now.stage].arrive();
      barriers.score_empty[ring.stage].arrive();
    }
    ring.advance(kTile.score_stages);
    if (step + 1 < work.steps) send_probabilities(next_step, kept);
    now = next;
  }
  // dP of the last step is done, or dS would not be there: the values' tile is free.
  const uint32_t chunk = shared + Shared::kValue;
  const float value_scale = kUnscale<T> * (kFeatures.dropout ? arguments.score.dropout_scale : 1.0f);
  store_key_gradient<Result>(arguments, work, grad_value, value_scale, chunk, arguments.grad_value, 0,
                             arguments.value_columns, row, lane);
  store_key_gradient<Result>(arguments, work, grad_key, arguments.score.scale * kUnscale<T>, chunk, arguments.grad_key,
                             0, arguments.head_columns, row, lane);
}

// The second.
template <class T, class Result, Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void wide_differences(const BackwardArguments& arguments, const BackwardWork& work,
                                                 const char* shared_memory, BackwardBarriers<kTile>& barriers) {
  using W = Wide<T, kFeatures, kTile>;
  using Shared = typename W::Shared;
  constexpr int kHeadColumns = kTile.head - W::kHeadFirst, kValueColumns = kTile.value - W::kValueFirst;
  using KeyMma = ptx::Wgmma<kHeadColumns, kMmaType<T>>;
  using ValueMma = ptx::Wgmma<kValueColumns, kMmaType<T>>;
  constexpr int kScores = W::kScores;
  const uint32_t shared = ptx::shared_address(shared_memory);
  const int lane = threadIdx.x % 32;
  const int row = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0) * 16;
  const uint32_t values = W::Keys::base(shared + Shared::kValue);
  float grad_key[kHeadColumns / 2], grad_value[kValueColumns / 2];
  float scores[kScores], bounds[kScores / 2];
  uint32_t operand[kScores / 2], copies[kScores / 2];
  tile::PipelineState now, ring{0, 1}, exchange;

  const auto begin_difference = [&](int stage) {
    if constexpr (!kFeatures.dropout) {
      load_record(bounds, shared + Shared::kRecord + stage * Shared::kRecordBytes + kTile.queries * 4, lane);
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = bounds[i / 4 * 2 + i % 2];
    }
    ptx::wgmma_fence();
    tile::multiply<typename W::ScoreMma, typename W::Keys, typename W::Keys, kTile.value / 16>(
        scores, values, W::Keys::base(shared + Shared::kGrad + stage * Shared::kGradBytes), !kFeatures.dropout);
    ptx::wgmma_commit_group();
  };
  const auto receive_probabilities = [&] {
    barriers.exchange_full[exchange.stage].wait(exchange.parity);
    W::receive(copies, W::slot(shared, exchange.stage));
    if constexpr (W::kSendsOperand) {
      W::receive(operand, W::slot(shared, exchange.stage) + 8192);
    } else {
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        float pair[2];
        ScoreCopy<T, kFeatures>::restore(pair, copies[i], 0);
        operand[i] = tile::Word<T>::pack(pair);
      }
    }
    __syncwarp();
    if (lane == 0) barriers.exchange_empty[exchange.stage].arrive();
    exchange.advance(W::kSlots);
  };

  barriers.value->wait(0);
  zero_key_remains<kFeatures, kTile, kTile.value>(shared + Shared::kValue, work, 1);
  barriers.query_full[0].wait(0);
  barriers.grad_full[0].wait(0);
  zero_remains<kFeatures, kTile, kTile.head>(shared + Shared::kQuery, work, work.ring[0], 1);
  zero_remains<kFeatures, kTile, kTile.value>(shared + Shared::kGrad, work, work.ring[0], 1);
  begin_difference(0);
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(scores);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    tile::PipelineState next = now;
    if (step + 1 < work.steps) next.advance(kTile.stages);
    const BackwardStep& next_step = work.ring[least(step + 1, work.steps - 1) % kBackwardSteps];
    const uint32_t query = shared + Shared::kQuery + now.stage * Shared::kQueryBytes;
    const uint32_t grad = shared + Shared::kGrad + now.stage * Shared::kGradBytes;
    receive_probabilities();
    ptx::wgmma_fence();
    tile::multiply<ValueMma, typename W::QueryRows, 4>(
        grad_value, operand, W::QueryRows::base(grad + W::kValueFirst / 64 * W::kChunkStep), step > 0);
    ptx::wgmma_commit_group();
    if constexpr (kFeatures.dropout) {
      load_record(bounds, shared + Shared::kRecord + now.stage * Shared::kRecordBytes + kTile.queries * 4, lane);
    }
    differentiate<T, kFeatures>(scores, operand, copies, bounds, arguments.score);
    barriers.score_empty[ring.stage].wait(ring.parity);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad_value);
    if (lane == 0) barriers.grad_empty[now.stage].arrive();
    tile::pack_fragment<T>(operand, scores);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const uint32_t words[4] = {operand[4 * block], operand[4 * block + 1], operand[4 * block + 2],
                                 operand[4 * block + 3]};
      ptx::stmatrix_x4(
          tile::fragment_address<64>(shared + Shared::kScore + ring.stage * Shared::kScoreBytes, row, block, lane),
          words);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane == 0) barriers.score_full[ring.stage].arrive();
    ring.advance(kTile.score_stages);
    barriers.query_full[next.stage].wait(next.parity);
    barriers.grad_full[next.stage].wait(next.parity);
    zero_remains<kFeatures, kTile, kTile.head>(shared + Shared::kQuery + next.stage * Shared::kQueryBytes, work,
                                               next_step, 1);
    zero_remains<kFeatures, kTile, kTile.value>(shared + Shared::kGrad + next.stage * Shared::kGradBytes, work,
                                                next_step, 1);
    begin_difference(next.stage);
    tile::multiply<KeyMma, typename W::QueryRows, 4>(
        grad_key, operand, W::QueryRows::base(query + W::kHeadFirst / 64 * W::kChunkStep), step > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(scores);
    ptx::tie_registers(grad_key);
    if (lane == 0) barriers.query_empty[now.stage].arrive();
    now = next;
  }
  const uint32_t chunk = shared + Shared::kValue + W::kChunkStep;
  const float value_scale = kUnscale<T> * (kFeatures.dropout ? arguments.score.dropout_scale : 1.0f);
  store_key_gradient<Result>(arguments, work, grad_value, value_scale, chunk, arguments.grad_value, W::kValueFirst,
                             arguments.value_columns, row, lane);
  store_key_gradient<Result>(arguments, work, grad_key, arguments.score.scale * kUnscale<T>, chunk, arguments.grad_key,
                             W::kHeadFirst, arguments.head_columns, row, lane);
}

}  // namespace kernel_pytorch::attention
