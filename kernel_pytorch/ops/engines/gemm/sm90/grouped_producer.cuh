// The producer of grouped products. The copy engine brings what lies as a box: tiles of b, rows of a that are as they
// lie. Lines that are named by an index, and steps of k at a group's end, behind which the next group's lie, are copied
// by the four warps of the producer, 16 bytes per lane; what is not there becomes zeros. What the blocks of a cluster
// share, which is not gathered, each of them brings half of and sends to both. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/producer.cuh"

namespace kernel_pytorch::product {

// Whether threads copy; otherwise the copy engine does everything.
KP_SHARED_CODE constexpr bool copies_lines(Sm90Operands operands) {
  return operands.grouping == Sm90Grouping::kDepth || (operands.grouping == Sm90Grouping::kRows && operands.gathers_a);
}

template <Sm90Config kConfig, Sm90Operands kOperands, bool kThin>
class Sm90GroupedProducer {
  static constexpr bool kDepth = kOperands.grouping == Sm90Grouping::kDepth;
  static constexpr bool kCopies = copies_lines(kOperands), kCopiesFactors = kCopies && kConfig.factors;
  static constexpr bool kSharesA = sm90_across(kConfig) > 1, kSharesB = sm90_down(kConfig) > 1;
  static constexpr int kBytes = sm90_a_bytes(kConfig) + sm90_b_bytes(kConfig);
  static constexpr int kElementBytes = sm90_element_bytes(kOperands.a);
  static constexpr int kChunk = kSm90StageBytes / kElementBytes;  // elements
  static constexpr int kChunkBytes = 64 * kSm90StageBytes;
  static constexpr int kPass = 128 / 8;  // lines that the warps copy 128 bytes of at a time
  static constexpr int kLines = kDepth ? 64 / kPass : kConfig.tile_m / kPass;  // a thread's, of a tile of k or of rows
  static_assert(kConfig.cluster == 1 || kDepth);
  static_assert(!(kSharesA && kOperands.gathers_a) && !(kSharesB && kOperands.gathers_b));
  static_assert(!kDepth || (kOperands.a_rows && kOperands.b_columns));
  static_assert(kElementBytes == 2 || !(kDepth || kOperands.b_columns || kOperands.b_halves));

 public:
  __device__ __forceinline__ Sm90GroupedProducer(const Sm90Arguments& arguments, Sm90Shared& shared, uint32_t tiles)
      : arguments_(arguments),
        shared_(shared),
        tiles_(tiles),
        rank_(block_rank<kConfig>()),
        thread_(static_cast<int32_t>(threadIdx.x)),
        line_(thread_ / 8),
        unit_(thread_ % 8),
        factors_(arguments, shared, tiles) {}

  // By all threads of the producer's warpgroup, or by one where none copies.
  __device__ __forceinline__ void run() {
    typename Sm90WalkOf<kConfig, kOperands.grouping>::Type walk(arguments_);
    for (; walk.has_tile(); walk.advance()) {
      const Sm90Place place = walk.place();
      int32_t lines[kLines];
      if constexpr (kCopies && !kDepth) find_rows(place, lines);
      if constexpr (kDepth) find_steps(place, 0, lines);
      if constexpr (kCopiesFactors) factors_.find_rows(place);
#pragma unroll 1
      for (int32_t k = 0; k < place.stages; ++k) {
        shared_.empty[state_.stage].wait(state_.parity ^ 1);
        const uint32_t target = tiles_ + state_.stage * kBytes;
        const bool is_tail = kDepth && place.begin + (k + 1) * kChunk > place.end;
        if (thread_ == 0) bring(place, k, target, is_tail);
        if constexpr (kDepth) {
          if (kOperands.gathers_a || is_tail) {
            copy_steps<kConfig.tile_m, kOperands.gathers_a>(arguments_.groups.a, arguments_.groups.a_stride,
                                                            arguments_.m, place, k, place.row, lines, target);
          }
          if (kOperands.gathers_b || is_tail) {
            copy_steps<kConfig.tile_n, kOperands.gathers_b>(arguments_.groups.b, arguments_.groups.b_stride,
                                                            arguments_.n, place, k, place.column, lines,
                                                            target + sm90_a_bytes(kConfig));
          }
          find_steps(place, k + 1, lines);
        } else if constexpr (kCopies) {
          copy_rows(k, lines, target);
          if constexpr (kCopiesFactors) {
            if (thread_ / 32 == 1) factors_.copy(place, k, state_.stage);
          }
        }
        // Every thread arrives when its copies are there, and goes on at once.
        if constexpr (kCopies) ptx::cp_async_mbarrier_arrive_noinc(shared_.full[state_.stage].address());
        state_.advance(kConfig.stages);
      }
    }
    if constexpr (kCopies) {  // no thread ends before its copies
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
    }
  }

 private:
  // Memory lines of the tile's rows; -1 behind the group's end, where sums are not stored.
  __device__ __forceinline__ void find_rows(const Sm90Place& place, int32_t (&lines)[kLines]) const {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int32_t row = place.row + line_ + i * kPass;
      lines[i] = row < place.end ? arguments_.groups.gather_a[row] : -1;
    }
  }
  // Memory lines of a stage's steps, one stage ahead of their use; at most one operand has an index, or both the same.
  __device__ __forceinline__ void find_steps(const Sm90Place& place, int32_t k, int32_t (&lines)[kLines]) const {
    if constexpr (kOperands.gathers_a || kOperands.gathers_b) {
      const int32_t* gather = kOperands.gathers_a ? arguments_.groups.gather_a : arguments_.groups.gather_b;
#pragma unroll
      for (int i = 0; i < kLines; ++i) {
        const int32_t step = place.begin + k * kChunk + line_ + i * kPass;
        lines[i] = step < place.end ? gather[step] : 0;
      }
    }
  }

  __device__ __forceinline__ void copy_rows(int32_t k, const int32_t (&lines)[kLines], uint32_t target) const {
    const int32_t first = k * kSm90StageBytes + unit_ * 16;
    const int32_t left = min(max(arguments_.groups.depth * kElementBytes - first, 0), 16);
    const char* from = static_cast<const char*>(arguments_.groups.a) + (left > 0 ? first : 0);
    const uint32_t to = target + tile::swizzled_offset(line_, unit_);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const bool is_there = lines[i] >= 0;
      const int64_t at = is_there ? lines[i] * arguments_.groups.a_stride * kElementBytes : 0;
      ptx::cp_async_cg_shared_global_16_fill_l2_256(to + i * kPass * 128, from + at, is_there ? left : 0);
    }
  }

  // The steps of one stage of an operand of which rows are dense: kRows of them from `first` on.
  template <int kRows, bool kGathers>
  __device__ __forceinline__ void copy_steps(const void* data, int64_t stride, int32_t count, const Sm90Place& place,
                                             int32_t k, int32_t first, const int32_t (&lines)[kLines],
                                             uint32_t target) const {
    constexpr int kUnrolled = kGathers ? kLines : 1;  // else it is a tail, once a tile
#pragma unroll kUnrolled
    for (int i = 0; i < kLines; ++i) {
      const int32_t step = place.begin + k * kChunk + line_ + i * kPass;
      const bool is_there = step < place.end;
      const char* from = static_cast<const char*>(data) + (is_there ? (kGathers ? lines[i] : step) * stride * 2 : 0);
      const uint32_t to = target + tile::swizzled_offset(line_ + i * kPass, unit_);
#pragma unroll
      for (int chunk = 0; chunk < kRows / kChunk; ++chunk) {
        const int32_t row = first + chunk * kChunk + unit_ * 8;
        const int32_t bytes = is_there ? min(max((count - row) * 2, 0), 16) : 0;
        ptx::cp_async_cg_shared_global_16_fill(to + chunk * kChunkBytes, bytes > 0 ? from + row * 2 : from,
                                               static_cast<uint32_t>(bytes));
      }
    }
  }

  // What the copy engine brings of a stage, by one thread.
  __device__ __forceinline__ void bring(const Sm90Place& place, int32_t k, uint32_t target, bool is_tail) {
    const bool brings_a = !kOperands.gathers_a && !is_tail, brings_b = !kOperands.gathers_b && !is_tail;
    tile::Barrier& barrier = shared_.full[state_.stage];
    barrier.arrive_expect_bytes((brings_a ? sm90_a_bytes(kConfig) : 0) + (brings_b ? sm90_b_bytes(kConfig) : 0));
    const uint32_t full = barrier.address(), of_b = target + sm90_a_bytes(kConfig);
    if constexpr (kDepth) {
      const int32_t step = place.begin + k * kChunk;
      if (brings_a) bring_chunks<kConfig.tile_m, kSharesA>(arguments_.a, target, place.row, step, 0, full);
      if (brings_b) bring_chunks<kConfig.tile_n, kSharesB>(arguments_.b, of_b, place.column, step, 0, full);
    } else {
      if (brings_a) copy<false>(arguments_.a, target, k * kChunk, place.row, 0, full);
      constexpr int kColumns = kOperands.b_halves ? kConfig.tile_n / 2 : kConfig.tile_n;
      const int32_t column = kOperands.b_halves ? place.column / 2 : place.column;
      bring_b<kColumns>(of_b, column, k, place.matrix, full);
      if constexpr (kOperands.b_halves) {
        bring_b<kColumns>(of_b + kColumns * 128, arguments_.n / 2 + column, k, place.matrix, full);
      }
    }
  }
  template <int kColumns>
  __device__ __forceinline__ void bring_b(uint32_t target, int32_t column, int32_t k, int32_t matrix, uint32_t full) {
    if constexpr (kOperands.b_columns) {
      bring_chunks<kColumns, false>(arguments_.b, target, column, k * kChunk, matrix, full);
    } else {
      copy<false>(arguments_.b, target, k * kChunk, column, matrix, full);
    }
  }
  template <int kCount, bool kShared>
  __device__ __forceinline__ void bring_chunks(const tile::TensorMap& map, uint32_t target, int32_t first, int32_t step,
                                               int32_t matrix, uint32_t full) {
    constexpr int kOwn = kCount / kChunk / (kShared ? 2 : 1);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int32_t chunk = (kShared ? rank_ * kOwn : 0) + i;
      copy<kShared>(map, target + chunk * kChunkBytes, first + chunk * kChunk, step, matrix, full);
    }
  }
  template <bool kBoth>
  __device__ __forceinline__ void copy(const tile::TensorMap& map, uint32_t target, int32_t x0, int32_t x1, int32_t x2,
                                       uint32_t full) const {
    if constexpr (kBoth) {
      ptx::cp_async_bulk_tensor_3d_shared_global_multicast(target, &map, x0, x1, x2, full, 3);
    } else {
      ptx::cp_async_bulk_tensor_3d_shared_global(target, &map, x0, x1, x2, full);
    }
  }

  const Sm90Arguments& arguments_;
  Sm90Shared& shared_;
  uint32_t tiles_;  // shared memory
  int32_t rank_, thread_, line_, unit_;
  Sm90FactorProducer<kConfig, kOperands, kThin> factors_;
  tile::PipelineState state_;
};

}  // namespace kernel_pytorch::product
