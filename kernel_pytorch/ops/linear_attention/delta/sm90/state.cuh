// What passes over the chunks of a head share: the producer, and a warpgroup's state, fp32 in registers with a rounded
// copy in shared memory. sm_90a.
#pragma once

#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/ptx/control.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/named_barrier.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/barrier.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/cuda/tile/matrix_descriptor.cuh"
#include "kernel_pytorch/ops/linear_attention/delta/sm90/places.cuh"

namespace kernel_pytorch::linear_attention::delta {

template <class T>
inline constexpr ptx::WgmmaType kDeltaWgmma = ptx::WgmmaType::kBf16;
template <>
inline constexpr ptx::WgmmaType kDeltaWgmma<tile::Float16> = ptx::WgmmaType::kF16;

struct DeltaShared {
  tile::Barrier full[4], empty[4];
};

// The chunks of a block's sequence and head.
struct Course {
  Span span;
  int64_t sequence, slot;
  int32_t chunks;
  int head;
};
__device__ __forceinline__ Course course_of(const DeltaChunkArguments& arguments) {
  const int64_t sequence = blockIdx.x / arguments.heads;
  const Span span = span_of(arguments, sequence);
  return {span, sequence, first_slot(arguments, sequence, span),
          static_cast<int32_t>((span.end - span.begin + kChunkTokens - 1) / kChunkTokens),
          static_cast<int>(blockIdx.x % arguments.heads)};
}

// By one thread; a gradient goes from the last chunk to the first.
template <DeltaConfig kConfig>
__device__ __forceinline__ void produce(const DeltaChunkArguments& arguments, DeltaShared& shared, uint32_t tiles) {
  const Course course = course_of(arguments);
  const int32_t first_value = blockIdx.y * kConfig.warpgroups * kGroupValues;
  tile::PipelineState state;
#pragma unroll 1
  for (int32_t i = 0; i < course.chunks; ++i) {
    shared.empty[state.stage].wait(state.parity ^ 1);
    const uint32_t stage = tiles + state.stage * delta_stage_bytes(kConfig);
    const uint32_t full = shared.full[state.stage].address();
    shared.full[state.stage].arrive_expect_bytes(stage_loads(kConfig));
    const int32_t number = kConfig.pass == Pass::kGradient ? course.chunks - 1 - i : i;
    const int64_t chunk = (course.slot + number) * arguments.heads + course.head;  // of what was prepared
    const int32_t token = static_cast<int32_t>(course.span.begin) + number * kChunkTokens;
    const int32_t batch = static_cast<int32_t>(course.span.batch);
    const auto load = [&](const tile::TensorMap& map, int count, int32_t column, int32_t row, int32_t head,
                          int32_t tensor, uint32_t target) {
      for (int k = 0; k < count; ++k, target += kChunkTokens * tile::kChunkRowBytes) {
        ptx::cp_async_bulk_tensor_4d_shared_global(target, &map, column + k * tile::kChunkColumns, row, head, tensor,
                                                   full);
      }
    };
    constexpr int kBlocks = kConfig.columns / 64;
    if constexpr (kConfig.by_channel) {
      const int32_t row = static_cast<int32_t>(chunk) * kChunkTokens;
      load(arguments.key, kBlocks, 0, row, 0, 0, stage);
      load(arguments.query, kBlocks, 0, row, 0, 0, stage + queries_at(kConfig));
      load(arguments.written_key, kBlocks, 0, row, 0, 0, stage + written_at(kConfig));
    } else {
      load(arguments.key, kBlocks, 0, token, course.head / arguments.key_group, batch, stage);
      if constexpr (kConfig.pass != Pass::kStates) {
        load(arguments.query, kBlocks, 0, token, course.head / arguments.query_group, batch,
             stage + queries_at(kConfig));
      }
    }
    load(arguments.value, kConfig.warpgroups, first_value, token, course.head, batch, stage + values_at(kConfig));
    const auto copy = [&](const void* from, int bytes, int place) {
      ptx::cp_async_bulk_shared_global(stage + place, static_cast<const unsigned char*>(from) + chunk * bytes, bytes,
                                       full);
    };
    copy(arguments.matrices, kMatrixBytes, matrix_at(kConfig));
    if constexpr (kConfig.pass != Pass::kStates) copy(arguments.weights, kMatrixBytes, weights_at(kConfig));
    copy(arguments.factors, kFactorBytes, factors_at(kConfig));
    state.advance(delta_stages(kConfig));
  }
}

template <class T, DeltaConfig kConfig>
class DeltaState {
 public:
  using Mma = ptx::Wgmma<64, kDeltaWgmma<T>>;
  using RowTile = tile::AlongColumns<kChunkTokens>;     // queries and keys, summed along columns
  using ValueTile = tile::AlongRows<kChunkTokens>;      // values, summed along tokens
  using StateTile = tile::AlongRows<kConfig.columns>;   // summed along columns
  static constexpr int kBlocks = kConfig.columns / 64;  // of 64 columns of the state
  static constexpr int kSteps = kConfig.columns / tile::kProductDepth;
  static constexpr int kTokenSteps = kChunkTokens / tile::kProductDepth;

  __device__ __forceinline__ DeltaState(const DeltaChunkArguments& arguments, DeltaShared& shared, uint32_t tiles,
                                        int warpgroup)
      : arguments_(arguments),
        shared_(shared),
        tiles_(tiles),
        warpgroup_(warpgroup),
        warp_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32 % 4), 0)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        first_value_(static_cast<int>(blockIdx.y) * kConfig.warpgroups * kGroupValues + warpgroup * kGroupValues) {}

  __device__ __forceinline__ void load_matrix(uint32_t from, uint32_t (&words)[4 * kTokenSteps]) const {
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      const ptx::Word4 four = ptx::ld_shared_v4(from + (step * 128 + threadIdx.x % 128) * 16);
      words[4 * step] = four.x, words[4 * step + 1] = four.y, words[4 * step + 2] = four.z,
                words[4 * step + 3] = four.w;
    }
  }

  __device__ __forceinline__ void decay_state(const float* factors) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int row = kKept + 64 * block + 16 * warp_ + lane_ / 4;
      const float own[2] = {factors[row], factors[row + 8]};
#pragma unroll
      for (int i = 0; i < Mma::kCount; ++i) state_[block][i] *= own[i % 4 / 2];
    }
  }

  // Fragments of (sign factors rows)^T of 64 columns, scaled in fp32. Keys that were prepared have their factors.
  __device__ __forceinline__ void turn_rows(uint32_t keys, const float* factors, float sign, int count,
                                            uint32_t (&turned)[4 * kTokenSteps]) {
    const int matrix = lane_ / 8, token = lane_ % 8 + matrix / 2 * 8, unit = 2 * warp_ + matrix % 2;
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      uint32_t words[4];
      ptx::ldmatrix_x4_trans(words, keys + tile::swizzled_offset(16 * step + token, unit));
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // tokens 16 step + 2 (lane % 4) and the next, then those 8 further
        const int at = step * 16 + lane_ % 4 * 2 + half * 8;
        // What lies behind the end of a sequence may be no number. No branch: products are under way.
        const uint32_t mask = (at < count ? 0xffffu : 0u) | (at + 1 < count ? 0xffff0000u : 0u);
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          if constexpr (kConfig.by_channel) {
            turned[4 * step + i] = words[i];
          } else {
            float pair[2];
            tile::Word<T>::unpack(words[i], pair);
            pair[0] *= sign * factors[at];
            pair[1] *= sign * factors[at + 1];
            turned[4 * step + i] = tile::Word<T>::pack(pair) & mask;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ unsigned char* memory_at(uint32_t address) {
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }
  __device__ __forceinline__ uint32_t state_address() const {
    return tiles_ + delta_states_at(kConfig) + warpgroup_ * delta_state_bytes(kConfig);
  }
  __device__ __forceinline__ uint32_t write_address() const {
    return tiles_ + delta_writes_at(kConfig) + warpgroup_ * kGroupBytes;
  }
  // What this warpgroup wrote to shared memory is there for its products.
  __device__ __forceinline__ void publish() {
    ptx::fence_proxy_async_shared_cta();
    ptx::barrier_sync_aligned(1 + warpgroup_, 128);
  }
  // Accumulators, rounded, into 64 rows of a tile.
  template <int kRows>
  __device__ __forceinline__ void store_tile(uint32_t to, int first_row, const float (&from)[Mma::kCount]) {
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = tile::Word<T>::pack(from + 8 * group + 2 * i);
      ptx::stmatrix_x4(tile::fragment_address<kRows>(to, first_row + 16 * warp_, group, lane_), words);
    }
  }
  __device__ __forceinline__ void store_tokens(uint32_t to, const float (&from)[Mma::kCount]) {
    store_tile<kChunkTokens>(to, 0, from);
  }
  __device__ __forceinline__ void publish_state() {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      store_tile<kConfig.columns>(state_address(), 64 * block, state_[block]);
    publish();
  }

  template <class Use>
  __device__ __forceinline__ void each_state_element(const Course& course, const Use& use) {
    int64_t slot = course.sequence;
    if (arguments_.state_index != nullptr) {
      slot = index_at(arguments_.state_index, arguments_.index_is_wide, slot);
      if (slot < 0 || slot >= arguments_.slots) return;
    }
    const int64_t index = slot * arguments_.heads + course.head;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Mma::kCount; ++i) {
        const int row = 64 * block + 16 * warp_ + tile::fragment_row(lane_, i);
        const int column = first_value_ + tile::fragment_column(lane_, i);
        const int64_t at = (index * arguments_.columns + row) * arguments_.values + column;
        if (row < arguments_.columns && column < arguments_.values) use(state_[block][i], at);
      }
    }
  }
  __device__ __forceinline__ void read_state(const Course& course) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (float& element : state_[block]) element = 0;
    }
    if (arguments_.initial == nullptr) return;
    each_state_element(course, [&](float& element, int64_t at) { element = arguments_.initial[at]; });
  }
  __device__ __forceinline__ void write_state(const Course& course) {
    if (arguments_.final == nullptr) return;
    each_state_element(course, [&](float& element, int64_t at) { arguments_.final[at] = element; });
  }

  // A warp's own 16 rows of a tile whose rows are `kRows`, to rows of 64 elements.
  __device__ __forceinline__ void copy_rows(uint32_t tile, int first_row, void* to) const {
    const unsigned char* rows = memory_at(tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + 16 * warp_ + i * 4 + lane_ / 8, unit = lane_ % 8;
      static_cast<ptx::Word4*>(to)[row * 8 + unit] =
          *reinterpret_cast<const ptx::Word4*>(rows + tile::swizzled_offset(row, unit));
    }
  }
  // The rounded state to memory, after it was published.
  __device__ __forceinline__ void keep_state(const Course& course, int32_t number) const {
    const int64_t place = kept_place(course, number) * kConfig.columns * kGroupValues * 2;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      copy_rows(state_address(), 64 * block, static_cast<unsigned char*>(arguments_.states) + place);
    }
  }
  // Of a chunk, head and 64 values.
  __device__ __forceinline__ int64_t kept_place(const Course& course, int32_t number) const {
    const int value_tiles = (arguments_.values + kGroupValues - 1) / kGroupValues;
    return ((course.slot + number) * arguments_.heads + course.head) * value_tiles + first_value_ / kGroupValues;
  }
  // Whether the warpgroup has values at all: the last block's second one may have none.
  __device__ __forceinline__ bool has_values() const {
    return first_value_ < arguments_.values;
  }

  // Through shared memory, a warp's own 16 rows, so that a row is written as one line. No product reads `tile` any
  // more.
  __device__ __forceinline__ void store_output(uint32_t tile, const ScanTensor& to, const Course& course, int64_t first,
                                               int count, const float (&output)[Mma::kCount]) {
    store_tile<kChunkTokens>(tile, 0, output);
    __syncwarp();
    const unsigned char* rows = memory_at(tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_ + i * 4 + lane_ / 8, unit = lane_ % 8;
      const int column = first_value_ + unit * 8;
      const auto words = *reinterpret_cast<const ptx::Word4*>(rows + tile::swizzled_offset(row, unit));
      if (row < count && column < arguments_.values) {
        *reinterpret_cast<ptx::Word4*>(row_of<T>(to, course.span.batch, first + row, course.head) + column) = words;
      }
    }
    ptx::fence_proxy_async_shared_cta();  // the copy engine writes here next
    __syncwarp();
  }

  const DeltaChunkArguments& arguments_;
  DeltaShared& shared_;
  uint32_t tiles_;
  int warpgroup_, warp_, lane_, first_value_;
  float state_[kBlocks][Mma::kCount];
};

// The body of a kernel: one thread produces, the warpgroups behind the first one are consumers.
template <class Consumer, DeltaConfig kConfig>
__device__ __forceinline__ void run_roles(const DeltaChunkArguments& arguments, unsigned char* memory) {
  DeltaShared& shared = *reinterpret_cast<DeltaShared*>(memory + delta_barriers_at(kConfig));
  static_assert(sizeof(DeltaShared) <= 64);
  if (threadIdx.x == 0) {
    for (int i = 0; i < delta_stages(kConfig); ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(4 * kConfig.warpgroups);
    }
  }
  ptx::fence_proxy_async_shared_cta();
  __syncthreads();
  const uint32_t tiles = ptx::shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    if constexpr (kConfig.warpgroups == 2) ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) produce<kConfig>(arguments, shared, tiles);
  } else {
    if constexpr (kConfig.warpgroups == 2) ptx::setmaxnreg_inc<232>();
    Consumer(arguments, shared, tiles, warpgroup - 1).run();
  }
}

}  // namespace kernel_pytorch::linear_attention::delta
