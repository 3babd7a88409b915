// What the host sides of the kernels on mma share: which problems they take, the tile of a problem, and launches.
#pragma once

#include <string>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/native_sparse_attention/cuda/arguments.h"
#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/arguments_mma_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr DType kMmaTypes[] = {DType::kBFloat16, DType::kFloat16};
inline constexpr int kMmaSizes[] = {64, 128};  // columns of rows in shared memory: real ones are filled up with zeros
inline constexpr int64_t kMmaLeastBlock = 16;  // keys of a chosen block: a step has keys of one
inline constexpr int64_t kMmaReserve = 1024;   // of shared memory, for what kernels declare themselves

inline int mma_size(const Arguments& a) {
  return std::max(a.size, a.value_size) <= kMmaSizes[0] ? kMmaSizes[0] : kMmaSizes[1];
}

// Of the tiles whose shared memory is there that with the fewest rows for a token, or else that with the most.
inline MmaArguments mma_arguments(const Arguments& all, int64_t shared_bytes, bool is_backward, int row_blocks = 1) {
  MmaArguments a{};
  a.all = all;
  a.row_blocks = row_blocks;
  while (a.head_shift < kMostShift && 1 << a.head_shift < all.group) ++a.head_shift;
  while (a.head_shift < kMostShift && mma_shared_bytes(a, mma_size(all), is_backward) + kMmaReserve > shared_bytes) {
    ++a.head_shift;
  }
  a.tiles = static_cast<int32_t>(divide_up(all.queries, tile_tokens(a)));
  return a;
}

inline bool has_wide_rows(const Rows& rows, int32_t columns) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.batch % 8 == 0 && rows.token % 8 == 0 &&
         rows.head % 8 == 0 && columns % 8 == 0;
}

// Null, or why the kernels on mma do not take the problem.
inline const char* mma_obstacle(const Arguments& a, DType dtype, const DeviceInfo& device, bool is_backward) {
  if (const char* obstacle = cuda_obstacle(device)) return obstacle;
  if (device.is_amd()) return "is for NVIDIA's GPUs, and this is AMD's";
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) return "takes bf16 and fp16";
  if (std::max(a.size, a.value_size) > kMmaSizes[1]) return "takes heads of up to 128 columns";
  if (a.group > 1 << kMostShift) return "takes groups of up to 16 heads";
  if (!(a.scale > 0)) return "takes positive scales";
  if (a.gates[1].data != nullptr && a.block_size < kMmaLeastBlock) return "takes chosen blocks of 16 keys or more";
  if (!has_wide_rows(a.query, a.size) || !has_wide_rows(a.key, a.size) || !has_wide_rows(a.value, a.value_size) ||
      !has_wide_rows(a.compressed_key, a.size) || !has_wide_rows(a.compressed_value, a.value_size) ||
      !has_wide_rows(a.grad_output, a.value_size)) {
    return "needs rows that begin at multiples of 16 bytes";
  }
  const MmaArguments tile = mma_arguments(a, device.cuda.shared_bytes_per_block, is_backward);
  if (mma_shared_bytes(tile, mma_size(a), is_backward) + kMmaReserve > device.cuda.shared_bytes_per_block) {
    return "the tile, its lists and the blocks of keys do not fit into shared memory";
  }
  return nullptr;
}

template <class T>
inline T* scratch_of(Context& context, int64_t count) {
  return static_cast<T*>(context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)));
}

inline void start_mma(Context& context, CUkern_st* kernel, int64_t blocks, int64_t shared_bytes,
                      MmaArguments& arguments) {
  static const std::string kLabel = "native_sparse_attention/cuda_mma";
  if (blocks == 0) return;
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kMmaThreads;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

}  // namespace kernel_pytorch::native_sparse_attention
