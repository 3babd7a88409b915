// What both directions of the CPU kernels share: means of blocks as floats, tiles of tokens of one key head, and the
// rows that each branch of a token sees.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/native_sparse_attention/choose_blocks.h"
#include "kernel_pytorch/ops/native_sparse_attention/cpu/branch.h"
#include "kernel_pytorch/ops/native_sparse_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::native_sparse_attention {

inline constexpr int64_t kTileTokens = 32, kTileMeans = 64;
inline constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline const BranchKernels& kernels_of(CpuIsa isa, DType dtype) {
  return KP_AT_CPU_LEVEL(isa, kBranchKernels)[cpu_type_index(dtype)];
}
template <class Problem>
registry::Support supports_cpu(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.query.dtype, device));
}

inline char* at(const TensorView& x, int64_t batch, int64_t token, int64_t head) {
  return x.as<char>() + (batch * x.strides[0] + token * x.strides[1] + head * x.strides[2]) * size_of(x.dtype);
}
inline float gate_at(const TensorView& gate, int64_t batch, int64_t token, int64_t head) {
  return static_cast<float>(
      load_element(gate.data, gate.dtype, batch * gate.strides[0] + token * gate.strides[1] + head * gate.strides[2]));
}

// Some neighbouring tokens of one key head.
struct Tile {
  Sequence sequence;
  int64_t key_head, begin, end;  // queries of the sequence
};

// What both directions need of a problem.
template <class Problem>
struct Work {
  const Problem& problem;
  Context& context;
  const Sizes sizes;
  const BranchKernels &kernels, &float_kernels;
  const int64_t size, value_size;  // padded
  bool needs_means;
  std::vector<float> mean_keys, mean_values;  // [batch][key_heads][compressed][padded size]
  std::vector<int32_t> places;                // 0, 1, 2 ...: the rows of a range

  Work(const Problem& of, Context& in)
      : problem(of),
        context(in),
        sizes(of),
        kernels(kernels_of(in.info->cpu.isa, of.query.dtype)),
        float_kernels(kernels_of(in.info->cpu.isa, DType::kFloat32)),
        size(padded(sizes.size)),
        value_size(padded(sizes.value_size)) {
    bool reads_compressed = problem.gate_compressed.is_present();
    if constexpr (requires { problem.output; }) reads_compressed = reads_compressed || chooses(problem);
    needs_means = reads_compressed && !problem.compressed_key.is_present();
    if (needs_means) compute_means();
    places.resize(static_cast<size_t>(std::max(std::min(sizes.numbers.window, sizes.keys), sizes.compressed)));
    std::iota(places.begin(), places.end(), 0);
  }

  // Where a sequence's compressed rows of one key head begin in an array of so many floats a row.
  int64_t compressed_row(const Sequence& sequence, int64_t key_head) const {
    return (sequence.batch * sizes.key_heads + key_head) * sizes.compressed + sequence.compressed_begin;
  }
  void compute_means() {
    const int64_t rows = sizes.batch * sizes.key_heads * sizes.compressed;
    mean_keys.resize(static_cast<size_t>(rows * size));
    mean_values.resize(static_cast<size_t>(rows * value_size));
    const int64_t tiles = (sizes.compressed + kTileMeans - 1) / kTileMeans;
    parallel_for(context.threads, sizes.sequences * sizes.key_heads * tiles, [&](int64_t task) {
      const Sequence sequence = sequence_of(problem, sizes, task / tiles / sizes.key_heads);
      const int64_t head = task / tiles % sizes.key_heads, begin = task % tiles * kTileMeans;
      const int64_t end = std::min(begin + kTileMeans, sizes.numbers.compressed(sequence.keys));
      for (int64_t c = begin; c < end; ++c) {
        const int64_t row = compressed_row(sequence, head) + c;
        const int64_t token = sequence.key_begin + c * sizes.numbers.compress_stride;
        const auto mean = [&](const TensorView& x, int64_t columns, float* to) {
          kernels.mean(at(x, sequence.batch, token, head), x.strides[1], sizes.numbers.compress_block, columns, to);
        };
        mean(problem.key, sizes.size, &mean_keys[row * size]);
        mean(problem.value, sizes.value_size, &mean_values[row * value_size]);
      }
    });
  }

  std::vector<Tile> tiles() const {
    std::vector<Tile> tiles;
    int64_t covered = 0;
    const auto append = [&](const Sequence& sequence) {
      for (int64_t head = 0; head < sizes.key_heads; ++head) {
        for (int64_t begin = 0; begin < sequence.queries; begin += kTileTokens) {
          tiles.push_back({sequence, head, begin, std::min(begin + kTileTokens, sequence.queries)});
        }
      }
      covered = sequence.query_begin + sequence.queries;
    };
    for (int64_t s = 0; s < sizes.sequences; ++s) append(sequence_of(problem, sizes, s));
    // Tokens in no sequence: they see nothing.
    if (sizes.is_packed && covered < sizes.queries) {
      append({0, covered, sizes.queries - covered, 0, 0, -sizes.queries, 0});
    }
    return tiles;
  }

  KeyRows compressed_rows(const Sequence& sequence, int64_t key_head, int64_t place) const {
    const int64_t count = sizes.numbers.compressed(place + 1), row = compressed_row(sequence, key_head);
    if (needs_means) {
      return {
          mean_keys.data() + row * size, mean_values.data() + row * value_size, size, value_size, places.data(), count};
    }
    return {at(problem.compressed_key, sequence.batch, 0, key_head),
            at(problem.compressed_value, sequence.batch, 0, key_head),
            problem.compressed_key.strides[1],
            problem.compressed_value.strides[1],
            places.data(),
            count};
  }
  const BranchKernels& compressed_kernels() const { return needs_means ? float_kernels : kernels; }
  KeyRows rows_from(const Sequence& sequence, int64_t key_head, int64_t first, const int32_t* rows,
                    int64_t count) const {
    return {at(problem.key, sequence.batch, sequence.key_begin + first, key_head),
            at(problem.value, sequence.batch, sequence.key_begin + first, key_head),
            problem.key.strides[1],
            problem.value.strides[1],
            rows,
            count};
  }
  int64_t window_begin(int64_t place) const { return std::max<int64_t>(place - sizes.numbers.window + 1, 0); }
  KeyRows window_rows(const Sequence& sequence, int64_t key_head, int64_t place) const {
    const int64_t first = window_begin(place);
    return rows_from(sequence, key_head, first, places.data(), place + 1 - first);
  }
  // The keys of a list's blocks up to `place`.
  void list_rows(const int32_t* list, int64_t place, std::vector<int32_t>& rows) const {
    rows.clear();
    for (int64_t i = 0; i < sizes.list; ++i) {
      if (list[i] < 0 || list[i] > place / sizes.numbers.block_size) continue;
      const int64_t begin = list[i] * sizes.numbers.block_size;
      const int64_t count = std::min(sizes.numbers.block_size, place + 1 - begin);
      const size_t had = rows.size();
      rows.resize(had + static_cast<size_t>(count));
      std::iota(rows.begin() + static_cast<int64_t>(had), rows.end(), static_cast<int32_t>(begin));
    }
  }
  int64_t list_at(const Sequence& sequence, int64_t token, int64_t key_head) const {
    return ((sequence.batch * sizes.queries + token) * sizes.key_heads + key_head) * sizes.list;
  }
  int64_t row_at(const Sequence& sequence, int64_t token, int64_t head) const {
    return (sequence.batch * sizes.queries + token) * sizes.heads + head;
  }
  void load_heads(const TensorView& x, const Sequence& sequence, int64_t token, int64_t key_head, int64_t columns,
                  double scale, std::vector<float>& to) const {
    for (int64_t h = 0; h < sizes.group; ++h) {
      kernels.load(at(x, sequence.batch, token, key_head * sizes.group + h), columns, static_cast<float>(scale),
                   &to[h * padded(columns)]);
    }
  }
  void load_gates(const TensorView& gate, const Sequence& sequence, int64_t token, int64_t key_head,
                  std::vector<float>& to) const {
    for (int64_t h = 0; h < sizes.group; ++h) {
      to[h] = gate_at(gate, sequence.batch, token, key_head * sizes.group + h);
    }
  }
};

inline std::vector<float> floats(int64_t count) {
  return std::vector<float>(static_cast<size_t>(count));
}

}  // namespace kernel_pytorch::native_sparse_attention
