// Step 11: attention on Hopper, softmax(Q K^T / sqrt(128)) V for heads of 128, with and without overlap.
//
// Tensor cores multiply; exponentials run on another unit, and at head size 128 they take half as long as the products.
// `attention_in_turn` waits for one, then does the other. `attention_overlapped` queues the scores of the next block
// before the product with V, so that the tensor cores work while the warps compute exponentials. Softmax is the shipped
// one (SoftmaxRows), so are the primitives; the shipped kernel (kernel_pytorch/ops/attention/sm90/forward/kernel.cuh)
// adds persistent blocks, masks, and the two warpgroups in turns.
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/cuda/tile/tensor_map_cuda.h"
#include "kernel_pytorch/ops/attention/sm90/forward/softmax.cuh"

namespace ptx = kernel_pytorch::ptx;
namespace tile = kernel_pytorch::tile;
using kernel_pytorch::attention::SoftmaxRows;

constexpr int kHeadSize = 128, kQueries = 128, kKeys = 128, kStages = 2;  // kQueries: 64 per consumer warpgroup
constexpr int kChunkBytes = 128 * 128;                                    // 128 rows of 64 elements
constexpr int kTileBytes = 2 * kChunkBytes;                               // all 128 elements of a row

struct Barriers {
  tile::Barrier query_full, key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
};

// 128 rows of a head, as two chunks of 64 elements.
__device__ inline void fetch(uint32_t to, const tile::TensorMap& map, int row, int head, tile::Barrier& full) {
  full.arrive_expect_bytes(kTileBytes);
  for (int chunk = 0; chunk < 2; ++chunk) {
    ptx::cp_async_bulk_tensor_3d_shared_global(to + chunk * kChunkBytes, &map, chunk * 64, row, head, full.address());
  }
}

// Shared memory: Q, then the ring of K, then the ring of V, then the barriers.
__device__ inline uint32_t key_tile(uint32_t memory, int stage) {
  return memory + (1 + stage) * kTileBytes;
}
__device__ inline uint32_t value_tile(uint32_t memory, int stage) {
  return memory + (1 + kStages + stage) * kTileBytes;
}

class Consumer {
  using Mma = ptx::Wgmma<128, ptx::WgmmaType::kBf16>;
  using RowTile = tile::AlongColumns<128>;   // Q and K: the product sums along the head
  using ValueTile = tile::AlongRows<kKeys>;  // V: the product sums along the keys

 public:
  __device__ Consumer(Barriers& barriers, uint32_t memory, int warpgroup, float scale)
      : barriers_(barriers), memory_(memory), queries_(RowTile::base(memory + warpgroup * 64 * 128)), scale_(scale) {
    rows_.begin();
  }

  __device__ void run_in_turn(int blocks) {
    barriers_.query_full.wait(0);
    for (int block = 0; block < blocks; ++block, state_.advance(kStages)) {
      issue_scores(state_);
      ptx::wgmma_wait_group<0>();
      release(barriers_.key_empty[state_.stage]);
      soften(block == 0);
      issue_output(state_, block > 0);
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(output_);
      release(barriers_.value_empty[state_.stage]);
    }
  }

  __device__ void run_overlapped(int blocks) {
    barriers_.query_full.wait(0);
    issue_scores(state_);
    ptx::wgmma_wait_group<0>();
    release(barriers_.key_empty[state_.stage]);
    soften(true);
    for (int block = 1; block < blocks; ++block) {
      const tile::PipelineState values = state_;
      state_.advance(kStages);
      issue_scores(state_);             // of this block,
      issue_output(values, block > 1);  // and the product of the last one behind it
      ptx::wgmma_wait_group<1>();       // the scores are there; the product goes on
      release(barriers_.key_empty[state_.stage]);
      ptx::tie_registers(scores_);
      float factors[2];
      rows_.careful(scores_, scale_, factors);  // exponentials, while the tensor cores multiply
      ptx::wgmma_wait_group<0>();
      ptx::tie_registers(output_);
      release(barriers_.value_empty[values.stage]);
      rescale(factors);
      tile::pack_fragment<tile::BFloat16>(probabilities_, scores_);
    }
    issue_output(state_, blocks > 1);
    ptx::wgmma_wait_group<0>();
    ptx::tie_registers(output_);
  }

  __device__ void store(uint32_t* output, int row) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float inverse[2];
    for (int i = 0; i < 2; ++i) inverse[i] = 1.0f / kernel_pytorch::attention::quad_sum(rows_.sum[i]);
#pragma unroll
    for (int i = 0; i < Mma::kCount; i += 2) {
      const float pair[2] = {output_[i] * inverse[i / 2 % 2], output_[i + 1] * inverse[i / 2 % 2]};
      const int64_t at = static_cast<int64_t>(row + warp * 16 + tile::fragment_row(lane, i)) * kHeadSize;
      output[(at + tile::fragment_column(lane, i)) / 2] = tile::Word<tile::BFloat16>::pack(pair);
    }
  }

 private:
  __device__ void issue_scores(const tile::PipelineState& at) {
    barriers_.key_full[at.stage].wait(at.parity);
    ptx::wgmma_fence();
    tile::multiply<Mma, RowTile, RowTile, kHeadSize / 16>(scores_, queries_, RowTile::base(key_tile(memory_, at.stage)),
                                                          false);
    ptx::wgmma_commit_group();
  }
  __device__ void issue_output(const tile::PipelineState& at, bool accumulate) {
    barriers_.value_full[at.stage].wait(at.parity);
    ptx::wgmma_fence();
    tile::multiply<Mma, ValueTile, kKeys / 16>(output_, probabilities_, ValueTile::base(value_tile(memory_, at.stage)),
                                               accumulate);
    ptx::wgmma_commit_group();
  }
  __device__ void soften(bool is_first) {
    ptx::tie_registers(scores_);
    float factors[2];
    rows_.careful(scores_, scale_, factors);
    if (!is_first) rescale(factors);
    tile::pack_fragment<tile::BFloat16>(probabilities_, scores_);
  }
  __device__ void rescale(const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < Mma::kCount; ++i) output_[i] *= factors[i / 2 % 2];
  }
  __device__ void release(tile::Barrier& barrier) const {
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  Barriers& barriers_;
  uint32_t memory_, queries_;
  float scale_;
  SoftmaxRows rows_;
  tile::PipelineState state_;
  float scores_[Mma::kCount], output_[Mma::kCount];
  uint32_t probabilities_[Mma::kCount / 2];
};

template <bool kOverlaps>
__device__ inline void attend(const tile::TensorMap& q, const tile::TensorMap& k, const tile::TensorMap& v,
                              uint32_t* output, int length, float scale) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Barriers& barriers = *reinterpret_cast<Barriers*>(shared + (1 + 2 * kStages) * kTileBytes);
  if (threadIdx.x == 0) {
    barriers.query_full.init(1);
    for (int i = 0; i < kStages; ++i) {
      barriers.key_full[i].init(1);
      barriers.value_full[i].init(1);
      barriers.key_empty[i].init(8);
      barriers.value_empty[i].init(8);
    }
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const uint32_t memory = ptx::shared_address(shared);
  const int first = blockIdx.x * kQueries, head = blockIdx.y, blocks = length / kKeys;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      fetch(memory, q, first, head, barriers.query_full);
      tile::PipelineState state;
      for (int block = 0; block < blocks; ++block, state.advance(kStages)) {
        barriers.key_empty[state.stage].wait(state.parity ^ 1);
        fetch(key_tile(memory, state.stage), k, block * kKeys, head, barriers.key_full[state.stage]);
        barriers.value_empty[state.stage].wait(state.parity ^ 1);
        fetch(value_tile(memory, state.stage), v, block * kKeys, head, barriers.value_full[state.stage]);
      }
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    Consumer consumer(barriers, memory, warpgroup - 1, scale);
    if constexpr (kOverlaps) {
      consumer.run_overlapped(blocks);
    } else {
      consumer.run_in_turn(blocks);
    }
    consumer.store(output, head * length + first + (warpgroup - 1) * 64);
  }
}

// q, k, v, output: [heads][length][128], length a multiple of 128. scale: log2(e) / sqrt(128). Grid: [length / 128,
// heads].
extern "C" __global__ void __launch_bounds__(384, 1)
    attention_in_turn(const __grid_constant__ tile::TensorMap q, const __grid_constant__ tile::TensorMap k,
                      const __grid_constant__ tile::TensorMap v, uint32_t* output, int length, float scale) {
  attend<false>(q, k, v, output, length, scale);
}
extern "C" __global__ void __launch_bounds__(384, 1)
    attention_overlapped(const __grid_constant__ tile::TensorMap q, const __grid_constant__ tile::TensorMap k,
                         const __grid_constant__ tile::TensorMap v, uint32_t* output, int length, float scale) {
  attend<true>(q, k, v, output, length, scale);
}
