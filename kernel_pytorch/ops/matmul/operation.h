// matmul as the registry sees it. In a checked problem every tensor has three dimensions [batch, rows, columns] (bias
// one, row_sums two), a and b are row-major (last stride 1) or column-major (the one before it is 1, the last is not),
// sizes of 1 have the stride that a dense tensor would have, residual is absent where beta is 0, and beta is 1 without
// one.
#pragma once

#include <cstdlib>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::matmul {

struct Sizes {
  int64_t batch, m, n, k;  // n of the sums: with kGatedTwice twice that of b
  int64_t output_columns;
};
inline Sizes sizes_of(const Product& problem) {
  const int64_t sums = problem.b.sizes[2] * (problem.form == Form::kGatedTwice ? 2 : 1);
  return {problem.a.sizes[0], problem.a.sizes[1], sums, problem.a.sizes[2], problem.output.sizes[2]};
}

inline bool is_row_major(const TensorView& matrix) {
  return matrix.strides[2] == 1;
}
inline bool is_gradient(Form form) {
  return form == Form::kGradient || form == Form::kGatedGradient;
}
// Whether two sums make one element of the output.
inline bool is_gated(Form form) {
  return form == Form::kGated || form == Form::kGatedTwice;
}
inline int64_t output_columns_of(Form form, int64_t n) {
  if (form == Form::kGated) return n / 2;
  return form == Form::kGatedGradient ? 2 * n : n;
}

inline constexpr const char* kOneMatrix = "takes gates and ups from one matrix";  // why most kernels refuse `up`
inline bool is_like_b(const TensorView& up, const Product& problem) {
  return up.strides == problem.b.strides;
}
// Elements from a column of b to the one of `up` that is gated by it.
inline int64_t up_distance(const Product& problem) {
  const auto bytes = reinterpret_cast<intptr_t>(problem.up.data) - reinterpret_cast<intptr_t>(problem.b.data);
  return bytes / size_of(problem.b.dtype);
}

// Farther apart than a stride of the copy engine can be.
inline bool is_far(const Product& problem) {
  return std::abs(up_distance(problem)) * size_of(problem.b.dtype) >= int64_t{1} << 40;
}

inline int dense_dimension(const TensorView& matrix) {
  return is_row_major(matrix) ? 2 : 1;
}
// Whether every row (of a column-major matrix: column) and matrix begins at a multiple of 16 bytes.
inline bool has_aligned_lines(const TensorView& matrix) {
  return has_aligned_rows(matrix, kVectorBytes, dense_dimension(matrix));
}
// Whether no two rows (of a column-major matrix: columns) share elements. An absent tensor's do not.
inline bool has_distinct_lines(const TensorView& matrix) {
  const int dense = dense_dimension(matrix);
  return !matrix.is_present() || matrix.strides[3 - dense] >= matrix.sizes[dense];
}

// Throws what multiply() throws; leaves the problem as described above.
void check(Product& problem, Device device);
void check(PairGradient& problem, Device device);

extern const registry::Operation<Product> kMultiply;
extern const registry::Kernel<Product> kRowSums, kSm90, kSm90Float, kMma, kMmaFloat, kMmaDouble, kTile, kThin,
    kCublasLt, kCpuThin, kCpuAmx, kCpuDots, kCpuRows, kCpu, kReference;

extern const registry::Operation<PairGradient> kPairGradient;
extern const registry::Kernel<PairGradient> kPairCuda, kPairCpu, kPairReference;

}  // namespace kernel_pytorch::matmul
