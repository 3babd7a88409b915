// A problem as the CUDA kernels take it, and their scratch memory.
#pragma once

#include <algorithm>

#include "kernel_pytorch/ops/native_sparse_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/native_sparse_attention/operation.h"

namespace kernel_pytorch::native_sparse_attention {

inline Rows strided_rows(const TensorView& view) {
  if (!view.is_present()) return {};
  return {.data = view.data, .batch = view.strides[0], .token = view.strides[1], .head = view.strides[2]};
}
inline Gate gate_of(const TensorView& view, DType dtype) {
  if (!view.is_present()) return {};
  return {.data = view.data,
          .batch = view.strides[0],
          .token = view.strides[1],
          .head = view.strides[2],
          .is_float = view.dtype == DType::kFloat32 && dtype != DType::kFloat32};
}

template <class Problem>
Arguments arguments_of(const Problem& problem) {
  const Sizes sizes(problem);
  const Numbers& numbers = sizes.numbers;
  const DType dtype = problem.query.dtype;
  Arguments a{};
  a.query = strided_rows(problem.query), a.key = strided_rows(problem.key), a.value = strided_rows(problem.value);
  a.compressed_key = strided_rows(problem.compressed_key), a.compressed_value = strided_rows(problem.compressed_value);
  a.gates[0] = gate_of(problem.gate_compressed, dtype), a.gates[1] = gate_of(problem.gate_selected, dtype);
  a.gates[2] = gate_of(problem.gate_window, dtype);
  a.offsets = problem.cu_seqlens.data;
  a.offsets_are_wide = problem.cu_seqlens.is_present() && problem.cu_seqlens.dtype == DType::kInt64;
  a.sequences = static_cast<int32_t>(sizes.sequences), a.batch = static_cast<int32_t>(sizes.batch);
  a.queries = static_cast<int32_t>(sizes.queries), a.keys = static_cast<int32_t>(sizes.keys);
  a.heads = static_cast<int32_t>(sizes.heads), a.key_heads = static_cast<int32_t>(sizes.key_heads);
  a.group = static_cast<int32_t>(sizes.group), a.size = static_cast<int32_t>(sizes.size);
  a.value_size = static_cast<int32_t>(sizes.value_size), a.compressed = static_cast<int32_t>(sizes.compressed);
  a.list_length = problem.gate_selected.is_present() ? static_cast<int32_t>(sizes.list) : 0;
  // A block longer than all keys is the keys; strides of a block count where blocks are chosen.
  const int64_t longest = (sizes.keys / numbers.compress_stride + 1) * numbers.compress_stride;
  a.block_size = static_cast<int32_t>(std::min(numbers.block_size, longest));
  a.window = static_cast<int32_t>(numbers.window);
  a.compress_block = static_cast<int32_t>(numbers.compress_block);
  a.compress_stride = static_cast<int32_t>(numbers.compress_stride);
  a.first_blocks = static_cast<int32_t>(numbers.first_blocks);
  a.local_blocks = static_cast<int32_t>(numbers.local_blocks);
  a.key_blocks = static_cast<int32_t>((sizes.keys + numbers.block_size - 1) / numbers.block_size);
  a.scale = static_cast<float>(sizes.scale);
  a.lse[0] = problem.compressed_lse.template as<float>(), a.lse[1] = problem.selected_lse.template as<float>();
  a.lse[2] = problem.window_lse.template as<float>();
  if constexpr (requires { problem.grad_output; }) {
    a.lists = lists_of(problem).template as<const int32_t>();
    a.grad_output = strided_rows(problem.grad_output);
    a.grad_query = strided_rows(problem.grad_query), a.grad_key = strided_rows(problem.grad_key);
    a.grad_value = strided_rows(problem.grad_value);
    a.grad_compressed_key = strided_rows(problem.grad_compressed_key);
    a.grad_compressed_value = strided_rows(problem.grad_compressed_value);
    a.grad_gates[0] = gate_of(problem.grad_gate_compressed, dtype);
    a.grad_gates[1] = gate_of(problem.grad_gate_selected, dtype);
    a.grad_gates[2] = gate_of(problem.grad_gate_window, dtype);
  } else {
    a.lists = problem.block_indices.template as<const int32_t>();
    a.chooses = chooses(problem);
    a.output = strided_rows(problem.output);
    a.selected = problem.selected.template as<int32_t>();
    a.selected_length = static_cast<int32_t>(numbers.blocks);
  }
  return a;
}

// Rows of elements [batch, key_heads, rows, size] in scratch memory.
inline Rows scratch_rows(Context& context, const Arguments& a, int64_t rows, int64_t size, int64_t element_bytes) {
  const int64_t elements = std::max<int64_t>(int64_t{a.batch} * a.key_heads * rows * size, 1);
  return {.data = context.scratch->allocate(static_cast<size_t>(elements * element_bytes)),
          .batch = a.key_heads * rows * size,
          .token = size,
          .head = rows * size};
}

// Sums of P * dP of each branch, head and query.
inline void allocate_deltas(Context& context, Arguments& a) {
  for (float*& deltas : a.deltas) {
    const int64_t floats = std::max<int64_t>(int64_t{a.batch} * a.heads * a.queries, 1);
    deltas = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(floats) * sizeof(float)));
  }
}

}  // namespace kernel_pytorch::native_sparse_attention
