// Native sparse attention as the registry sees it: its numbers, where sequences and compressed blocks lie, and the
// kernels that its lists name.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/ops/native_sparse_attention/native_sparse_attention.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::native_sparse_attention {

// The options with what a form fills in.
struct Numbers {
  int64_t block_size, blocks, window, compress_block, compress_stride, first_blocks, local_blocks;

  explicit Numbers(const Options& options)
      : block_size(options.block_size), blocks(options.blocks), window(options.window) {
    const bool is_paper = options.form == Form::kPaper;
    compress_block = options.compress_block.value_or(is_paper ? 32 : block_size);
    compress_stride = options.compress_stride.value_or(is_paper ? 16 : block_size);
    first_blocks = options.first_blocks.value_or(is_paper ? 1 : 0);
    local_blocks = options.local_blocks.value_or(is_paper ? 2 : 1);
  }
  // Compressed blocks that end before `tokens`.
  int64_t compressed(int64_t tokens) const {
    return tokens < compress_block ? 0 : (tokens - compress_block) / compress_stride + 1;
  }
};

struct Sizes {
  int64_t batch, queries, keys, heads, key_heads, group, size, value_size, list, sequences;
  Numbers numbers;
  int64_t compressed;  // rows of an entry of the batch that hold compressed keys, some unused with cu_seqlens
  bool is_packed;
  double scale;

  template <class Problem>
  explicit Sizes(const Problem& problem)
      : batch(problem.query.sizes[0]),
        queries(problem.query.sizes[1]),
        keys(problem.key.sizes[1]),
        heads(problem.query.sizes[2]),
        key_heads(problem.key.sizes[2]),
        group(key_heads == 0 ? 0 : heads / key_heads),
        size(problem.query.sizes[3]),
        value_size(problem.value.sizes[3]),
        list(problem.block_indices.is_present() ? problem.block_indices.sizes[3] : problem.options.blocks),
        sequences(problem.cu_seqlens.is_present() ? problem.cu_seqlens.sizes[0] - 1 : batch),
        numbers(problem.options),
        is_packed(problem.cu_seqlens.is_present()),
        scale(problem.options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(size, 1))))) {
    compressed = is_packed ? keys / numbers.compress_stride + 1 : numbers.compressed(keys);
  }
};

// Where a sequence lies. Query i of it is token `query_begin` + i and stands at key i + offset of it.
struct Sequence {
  int64_t batch, query_begin, queries, key_begin, keys, offset;
  int64_t compressed_begin;  // of its compressed keys in the entry's rows: rounded up, so that sequences never overlap
};
template <class Problem>
Sequence sequence_of(const Problem& problem, const Sizes& sizes, int64_t index) {
  if (!sizes.is_packed) return {index, 0, sizes.queries, 0, sizes.keys, sizes.keys - sizes.queries, 0};
  const TensorView& offsets = problem.cu_seqlens;
  const auto at = [&](int64_t i) { return index_at(offsets.data, offsets.dtype == DType::kInt64, i); };
  const int64_t begin = at(index), count = at(index + 1) - begin, stride = sizes.numbers.compress_stride;
  return {0, begin, count, begin, count, 0, (begin + stride - 1) / stride};
}

// Whether lists have to be chosen.
inline bool chooses(const Forward& problem) {
  return problem.gate_selected.is_present() && !problem.block_indices.is_present();
}

// The lists that a backward reads.
inline const TensorView& lists_of(const Backward& problem) {
  return problem.block_indices.is_present() ? problem.block_indices : problem.selected;
}

// Throw what the ops throw.
void check(const Forward& problem, Device device);
void check(const Backward& problem, Device device);

extern const registry::Operation<Forward> kForward;
extern const registry::Operation<Backward> kBackward;
extern const registry::Kernel<Forward> kForwardReference, kForwardCpu, kForwardCuda, kForwardMma;
extern const registry::Kernel<Backward> kBackwardReference, kBackwardCpu, kBackwardCuda, kBackwardMma;

}  // namespace kernel_pytorch::native_sparse_attention
