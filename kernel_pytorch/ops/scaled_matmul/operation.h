// The scaled product as the registry sees it, and the kernels that its list names. In a problem the scales have two
// dimensions, [rows or groups of 128 rows, blocks of k], with one element where one serves all.
#pragma once

#include "kernel_pytorch/ops/scaled_matmul/scaled_matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::scaled_matmul {

// Throws what multiply() throws; leaves the problem as described above.
void check(Product& problem, Device device);

extern const registry::Operation<Product> kProduct;
extern const registry::Kernel<Product> kSm90, kCublasLt, kCudaMma, kTile, kCpu, kReference;

inline constexpr int64_t kBlock = 128;

enum class Scaling : uint8_t { kTensor, kRow, k1x128, k128x128 };

// How a problem's scale is laid out over a matrix of `rows` and `k`. Where two layouts are one, the simpler is named.
inline Scaling scaling_of(const TensorView& scale, int64_t rows) {
  if (scale.sizes[0] == 1 && scale.sizes[1] == 1) return Scaling::kTensor;
  if (scale.sizes[0] != rows) return Scaling::k128x128;
  return scale.sizes[1] == 1 ? Scaling::kRow : Scaling::k1x128;
}
inline Scaling scaling_of_a(const Product& problem) {
  return scaling_of(problem.scale_a, problem.a.sizes[0]);
}
inline Scaling scaling_of_b(const Product& problem) {
  return scaling_of(problem.scale_b, problem.b.sizes[0]);
}
// Whether a scale changes along k, so that sums are scaled block by block.
inline bool is_blocked(const Product& problem) {
  return problem.scale_a.sizes[1] > 1 || problem.scale_b.sizes[1] > 1;
}

// Where the scale of a row and a block of k lies: data[row / rows_each * row_stride + block * block_stride].
struct ScaleLayout {
  const float* data = nullptr;
  int64_t rows_each = 1, row_stride = 0, block_stride = 0;

  ScaleLayout(const TensorView& scale, int64_t rows) : data(scale.as<const float>()) {
    const Scaling scaling = scaling_of(scale, rows);
    if (scaling != Scaling::kTensor) row_stride = scale.strides[0];
    if (scale.sizes[1] > 1) block_stride = scale.strides[1];
    if (scaling == Scaling::k128x128) rows_each = kBlock;
  }
  int64_t offset(int64_t row, int64_t block) const { return row / rows_each * row_stride + block * block_stride; }
};

}  // namespace kernel_pytorch::scaled_matmul
