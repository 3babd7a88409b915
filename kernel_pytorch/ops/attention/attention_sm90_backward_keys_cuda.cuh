// A warpgroup of the backward that owns 64 keys: their scores and gradients for one tile of queries after another.
//
// Per tile: dP^T = V dO^T with dV += P^T dO, dS while dV still runs; then S^T of the next tile with dK += dS^T Q, its
// exponentials while dK still runs. One array of scores and one of A operands serve all of it: with separate ones the
// registers would not leave room for the warpgroup that sums dQ. The product of a tile past the last (on old data)
// keeps branches away from wgmma. Waits on barriers stand between arithmetic and the wait for a product so that the
// assembler cannot swap the two. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/math.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/attention/attention_kept_cuda.cuh"
#include "kernel_pytorch/ops/attention/attention_sm90_backward_plan_cuda.cuh"

namespace kernel_pytorch::attention {

// What a lane needs of a record: for columns 8 j + 2 c + e the value 2 j + e.
template <int kCount>
__device__ __forceinline__ void load_record(float (&values)[kCount], uint32_t address, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const ptx::Word4 words = ptx::ld_shared_v4(address + (i * 4 + lane % 4) * 16);
    values[4 * i] = __uint_as_float(words.x);
    values[4 * i + 1] = __uint_as_float(words.y);
    values[4 * i + 2] = __uint_as_float(words.z);
    values[4 * i + 3] = __uint_as_float(words.w);
  }
}

// Scores of keys by queries, dS or P, as 16-bit pairs: word 2 j + h holds key row lane / 4 + 8 h, queries 8 j + 2 c
// and the next. Stored with the keys' rows 128 bytes apart and the lane's 16 queries side by side: a permutation of the
// tile's queries that its sums keep (sum_query).
template <int kWords>
__device__ __forceinline__ void store_scores(uint32_t destination, const uint32_t (&words)[kWords], int row, int lane) {
#pragma unroll
  for (int chunk = 0; chunk < kWords / 16; ++chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int unit = 0; unit < 2; ++unit) {
        const uint32_t* first = words + chunk * 16 + unit * 8 + half;
        const uint32_t offset = tile::swizzled_offset(row + 8 * half, lane % 4 * 2 + unit);
        ptx::st_shared_v4(destination + chunk * (kBackwardKeys * 128) + offset,
                          {first[0], first[2], first[4], first[6]});
      }
    }
  }
}

// Probabilities as dS wants them: more precise than the operand of dV, in as many registers. For bf16 a second copy in
// fp16, whose range the scale fills; for fp16, where dS could overflow by a scale, what rounding lost.
template <class T>
struct Copy;
template <>
struct Copy<tile::BFloat16> {
  static __device__ __forceinline__ uint32_t of(const float* values, uint32_t) {
    return tile::Word<tile::Float16>::pack(values);
  }
  static __device__ __forceinline__ void restore(float (&values)[2], uint32_t, uint32_t copy) {
    tile::Word<tile::Float16>::unpack(copy, values);
  }
};
template <>
struct Copy<tile::Float16> {
  static __device__ __forceinline__ uint32_t of(const float* values, uint32_t word) {
    float rounded[2];
    tile::Word<tile::Float16>::unpack(word, rounded);
    const float lost[2] = {values[0] - rounded[0], values[1] - rounded[1]};
    return tile::Word<tile::Float16>::pack(lost);
  }
  static __device__ __forceinline__ void restore(float (&values)[2], uint32_t word, uint32_t rest) {
    float lost[2];
    tile::Word<tile::Float16>::unpack(word, values);
    tile::Word<tile::Float16>::unpack(rest, lost);
    values[0] += lost[0];
    values[1] += lost[1];
  }
};

// Accumulators of 64 keys, times `scale`, to rows of a gradient. Each warp turns its 16 rows round in shared memory.
template <class T, int kCount>
__device__ __forceinline__ void store_gradient(const float (&values)[kCount], float scale, uint32_t shared,
                                               const RowTensor& gradient, int64_t offset, int row, int rows_left,
                                               int columns, int lane) {
  constexpr int kUnits = kCount / 4;  // of 16 bytes a row
#pragma unroll
  for (int block = 0; block < kCount / 8; ++block) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float pair[2] = {values[8 * block + 2 * i] * scale, values[8 * block + 2 * i + 1] * scale};
      words[i] = tile::Word<T>::pack(pair);
    }
    ptx::stmatrix_x4(tile::fragment_address<kBackwardKeys>(shared, row, block, lane), words);
  }
  __syncwarp();
  T* rows = static_cast<T*>(gradient.data) + offset;
#pragma unroll 1
  for (int i = lane; i < 16 * kUnits; i += 32) {
    const int at = i / kUnits, unit = i % kUnits;
    if (row + at < rows_left && unit * 8 < columns) {
      const uint32_t source = shared + unit / 8 * (kBackwardKeys * 128) + tile::swizzled_offset(row + at, unit % 8);
      tile::store(rows + (row + at) * gradient.row + unit * 8, tile::load_from_shared<T>(source));
    }
  }
  __syncwarp();
}

__device__ __forceinline__ int64_t gradient_offset(const RowTensor& gradient, const BackwardWork& work) {
  return work.memory_batch * gradient.batch + work.key_head * gradient.head +
         (work.head.first_key + work.first_key) * gradient.row;
}

// Of keys that no query sees.
template <class T>
__device__ __forceinline__ void zero_key_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                                   int thread) {
  const int rows = least(kBackwardKeys, work.head.keys - work.first_key);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const RowTensor& gradient = i == 0 ? arguments.grad_key : arguments.grad_value;
    const int units = (i == 0 ? arguments.head_columns : arguments.value_columns) / 8;
    T* data = static_cast<T*>(gradient.data) + gradient_offset(gradient, work);
#pragma unroll 1
    for (int at = thread; at < rows * units; at += 256) {
      tile::store(data + at / units * gradient.row + at % units * 8, tile::Vector<T>::zero());
    }
  }
}

template <class T, Features kFeatures, BackwardTile kTile>
__device__ __forceinline__ void key_gradients(const BackwardArguments& arguments, const BackwardWork& work,
                                              const char* shared_memory, BackwardBarriers& barriers, int warpgroup) {
  using Shared = BackwardShared<kTile>;
  using ScoreMma = ptx::Wgmma<kTile.queries, kMmaType<T>>;
  using KeyMma = ptx::Wgmma<kTile.head, kMmaType<T>>;
  using ValueMma = ptx::Wgmma<kTile.value, kMmaType<T>>;
  using Keys = tile::AlongColumns<kBackwardKeys>;
  using Queries = tile::AlongColumns<kTile.queries>;
  using QueryRows = tile::AlongRows<kTile.queries>;
  constexpr int kScores = kTile.queries / 2;
  const uint32_t shared = ptx::shared_address(shared_memory);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const uint32_t keys = Keys::base(shared + Shared::kKey + warpgroup * 64 * 128);
  const uint32_t values = Keys::base(shared + Shared::kValue + warpgroup * 64 * 128);
  const int row = warpgroup * 64 + warp * 16;  // of the warp, in the block
  const float scale = arguments.score.scale * kLog2e;

  float grad_key[kTile.head / 2], grad_value[kTile.value / 2];
  float scores[kScores], bounds[kScores / 2];
  uint32_t operand[kScores / 2], copies[kScores / 2];
  tile::PipelineState now, ring;
  ring.parity = 1;
  TileWalk walk(work);

  const auto exponentials = [&] {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = ptx::ex2_approx_ftz_f32(fmaf(scores[i], scale, bounds[i / 4 * 2 + i % 2]));
    }
  };
  const auto make_operand = [&] {
    if (walk.tile < work.whole_first || walk.tile >= work.whole_last) {
      const Place place{walk.tile * kTile.queries + lane % 4 * 2, work.first_key + row + lane / 4};
      hide(scores, kept_scores<kFeatures, Rows::kKeys, kScores>(arguments.score, work.head, place, false), 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      operand[i] = tile::Word<T>::pack(scores + 2 * i);
      copies[i] = Copy<T>::of(scores + 2 * i, operand[i]);
    }
  };
  barriers.key->wait(0);
  barriers.query_full[0].wait(0);
  load_record(bounds, shared + Shared::kRecord, lane);
  ptx::wgmma_fence();
  tile::multiply<ScoreMma, Keys, Queries, kTile.head / 16>(scores, keys, Queries::base(shared + Shared::kQuery), false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::tie_registers(scores);
  exponentials();
  make_operand();
  barriers.value->wait(0);
  barriers.grad_full[0].wait(0);
#pragma unroll 1
  for (int step = 0; step < work.steps; ++step) {
    tile::PipelineState next = now;
    if (step + 1 < work.steps) next.advance(kTile.stages);
    const uint32_t query = shared + Shared::kQuery + now.stage * Shared::kQueryBytes;
    const uint32_t grad = shared + Shared::kGrad + now.stage * Shared::kGradBytes;
    load_record(bounds, shared + Shared::kRecord + now.stage * Shared::kRecordBytes + kTile.queries * 4, lane);
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] = bounds[i / 4 * 2 + i % 2];
    ptx::wgmma_fence();
    tile::multiply<ScoreMma, Keys, Queries, kTile.value / 16>(scores, values, Queries::base(grad), true);
    ptx::wgmma_commit_group();
    tile::multiply<ValueMma, QueryRows, kTile.queries / 16>(grad_value, operand, QueryRows::base(grad), step > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      float probabilities[2];
      Copy<T>::restore(probabilities, operand[i], copies[i]);
      scores[2 * i] *= probabilities[0];
      scores[2 * i + 1] *= probabilities[1];
    }
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
    load_record(bounds, shared + Shared::kRecord + next.stage * Shared::kRecordBytes, lane);
    ptx::wgmma_fence();
    tile::multiply<ScoreMma, Keys, Queries, kTile.head / 16>(
        scores, keys, Queries::base(shared + Shared::kQuery + next.stage * Shared::kQueryBytes), false);
    ptx::wgmma_commit_group();
    tile::multiply<KeyMma, QueryRows, kTile.queries / 16>(grad_key, operand, QueryRows::base(query), step > 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    ptx::tie_registers(scores);
    exponentials();
    barriers.grad_full[next.stage].wait(next.parity);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(grad_key);
    if (lane == 0) barriers.query_empty[now.stage].arrive();
    walk.advance(work);
    make_operand();
    now = next;
  }
  const int rows_left = work.head.keys - work.first_key;
  const uint32_t stage = shared + Shared::kValue;
  store_gradient<T>(grad_value, kUnscale<T>, stage, arguments.grad_value, gradient_offset(arguments.grad_value, work),
                    row, rows_left, arguments.value_columns, lane);
  store_gradient<T>(grad_key, arguments.score.scale * kUnscale<T>, stage, arguments.grad_key,
                    gradient_offset(arguments.grad_key, work), row, rows_left, arguments.head_columns, lane);
}

}  // namespace kernel_pytorch::attention
