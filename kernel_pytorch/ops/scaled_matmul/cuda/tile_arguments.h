// What the kernels by mma and by fp32 FMA are given: operands, scales, bias and output as they lie.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"

namespace kernel_pytorch::scaled_matmul {

inline product::TileScale tile_scale(const TensorView& scale, int64_t rows) {
  const ScaleLayout layout(scale, rows);
  return {.data = layout.data,
          .row = layout.row_stride,
          .block = layout.block_stride,
          .rows_each = static_cast<int32_t>(layout.rows_each)};
}

inline product::TileArguments tile_arguments(const Product& problem) {
  const int64_t m = problem.a.sizes[0], n = problem.b.sizes[0];
  product::TileArguments arguments{};
  arguments.a = {.data = problem.a.data, .batch = 0, .outer = problem.a.strides[0], .inner = 1, .pair = 0};
  arguments.b = {.data = problem.b.data, .batch = 0, .outer = problem.b.strides[0], .inner = 1, .pair = 0};
  arguments.scale_a = tile_scale(problem.scale_a, m);
  arguments.scale_b = tile_scale(problem.scale_b, n);
  arguments.m = static_cast<int32_t>(m);
  arguments.n = static_cast<int32_t>(n);
  arguments.k = static_cast<int32_t>(problem.a.sizes[1]);
  arguments.alpha = 1;
  arguments.kind = pointwise::Kind::kIdentity;
  arguments.bias = product::tile_matrix(problem.bias);
  arguments.output = product::tile_matrix(problem.output);
  arguments.output_scale = problem.output_scale.is_present() ? problem.output_scale.as<const float>() : nullptr;
  arguments.amax = problem.amax.is_present() ? problem.amax.as<float>() : nullptr;
  return arguments;
}

}  // namespace kernel_pytorch::scaled_matmul
