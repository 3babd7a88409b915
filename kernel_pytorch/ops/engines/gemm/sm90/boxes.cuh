// How a warp's finished values leave: 16 rows of 128 bytes at a time through boxes of shared memory of the warp's own,
// from which the copy engine writes them while the warp goes on. Rows and columns beyond the matrix are not written.
// sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/bulk_copy.cuh"
#include "kernel_pytorch/cuda/ptx/fence.cuh"
#include "kernel_pytorch/cuda/ptx/matrix_move.cuh"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/ptx/tensor_copy.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"
#include "kernel_pytorch/cuda/tile/fragment.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/tile_cuda.h"

namespace kernel_pytorch::product {

// A box's first column and row, and where the matrix's rows end.
struct BoxPlace {
  int32_t column, row, batch, rows;
  // Where rows may end within the matrix: its memory and columns, for a box that the copy engine cannot cut.
  void* data = nullptr;
  int64_t stride = 0;
  int32_t columns = 0;
};

template <Sm90Config kConfig, class Out, bool kGrouped = false>
class Sm90Boxes {
  static constexpr int kBoxes = sm90_boxes(kConfig);
  static constexpr int kValues = 64 / static_cast<int>(sizeof(Out));  // of a box, a thread's share

 public:
  explicit __device__ __forceinline__ Sm90Boxes(uint32_t boxes)
      : boxes_(boxes), lane_(static_cast<int32_t>(threadIdx.x % 32)) {}

  // kValues values as wgmma leaves sums.
  __device__ __forceinline__ void put(const tile::TensorMap& map, const float* values, const BoxPlace& place) {
    if constexpr (sizeof(Out) == 2) {
      uint32_t words[kValues / 2];
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) words[i] = tile::Word<Out>::pack(values + 2 * i);
      put_words(map, words, place);
    } else {
      const uint32_t box = free_box();
#pragma unroll
      for (int i = 0; i < kValues; i += 2) put_pair(box, values + i, i);
      send(map, box, place);
    }
  }

  // The same, packed two by two: 16-bit types.
  __device__ __forceinline__ void put_words(const tile::TensorMap& map, const uint32_t (&words)[kValues / 2],
                                            const BoxPlace& place) {
    const uint32_t box = free_box();
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const uint32_t four[4] = {words[4 * block], words[4 * block + 1], words[4 * block + 2], words[4 * block + 3]};
      ptx::stmatrix_x4(tile::fragment_address<kSm90BoxRows>(box, 0, block, lane_), four);
    }
    send(map, box, place);
  }

  // Words of neighbours: of each 16 columns a lane has two of its first row, then two of its second.
  __device__ __forceinline__ void put_pairs(const tile::TensorMap& map, const uint32_t (&words)[kValues / 2],
                                            const BoxPlace& place) {
    const uint32_t box = free_box();
#pragma unroll
    for (int i = 0; i < kValues / 2; i += 2) {
      const int row = lane_ / 4 + i % 4 / 2 * 8, byte = i / 4 * 32 + lane_ % 4 * 8;
      const uint32_t address = box + tile::swizzled_offset(row, byte / 16) + byte % 16;
      ptx::st_shared_v2_f32(address, __uint_as_float(words[i]), __uint_as_float(words[i + 1]));
    }
    send(map, box, place);
  }

  // Before the block ends.
  __device__ __forceinline__ void drain() const {
    if (lane_ == 0) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  __device__ __forceinline__ uint32_t free_box() {
    if (lane_ == 0) ptx::cp_async_bulk_wait_group_read<kBoxes - 1>();
    __syncwarp();
    const uint32_t box = boxes_ + box_ * kSm90BoxBytes;
    box_ = (box_ + 1) % kBoxes;
    return box;
  }

  __device__ __forceinline__ void send(const tile::TensorMap& map, uint32_t box, const BoxPlace& place) const {
    if constexpr (kGrouped) {
      if (place.row + kSm90BoxRows > place.rows) {
        __syncwarp();
        store_rows(box, place);
        if (lane_ == 0) ptx::cp_async_bulk_commit_group();  // empty: free_box counts groups
        return;
      }
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane_ == 0) {
      if (place.row < place.rows) {
        ptx::cp_async_bulk_tensor_3d_global_shared(&map, place.column, place.row, place.batch, box);
      }
      ptx::cp_async_bulk_commit_group();
    }
  }

  // The box's rows that there are, by the warp itself; columns come in whole vectors.
  __device__ __forceinline__ void store_rows(uint32_t box, const BoxPlace& place) const {
    constexpr int kPerVector = 16 / static_cast<int>(sizeof(Out));
#pragma unroll
    for (int i = 0; i < kSm90BoxRows * 8 / 32; ++i) {
      const int32_t row = (lane_ + 32 * i) / 8, unit = lane_ % 8, column = place.column + unit * kPerVector;
      if (place.row + row < place.rows && column < place.columns) {
        Out* target = static_cast<Out*>(place.data) + (place.row + row) * place.stride + column;
        ptx::st_global_v4(target, ptx::ld_shared_v4(box + tile::swizzled_offset(row, unit)));
      }
    }
  }

  __device__ __forceinline__ void put_pair(uint32_t box, const float* pair, int index) const {
    const int row = tile::fragment_row(lane_, index);
    const int byte = tile::fragment_column(lane_, index) * static_cast<int>(sizeof(Out));
    const uint32_t address = box + tile::swizzled_offset(row, byte / 16) + byte % 16;
    if constexpr (sizeof(Out) == 4) {
      ptx::st_shared_v2_f32(address, pair[0], pair[1]);
    } else {
      const float four[4] = {pair[0], pair[1], 0.0f, 0.0f};
      ptx::st_shared_u16(address, static_cast<uint16_t>(tile::Word<Out>::pack(four)));
    }
  }

  uint32_t boxes_;  // shared memory
  int32_t lane_;
  int32_t box_ = 0;
};

}  // namespace kernel_pytorch::product
