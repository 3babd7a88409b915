// One branch of one token on the lanes of the CPU, built once per instruction level. Scores: tiles of a few heads by
// four keys keep a vector of partial sums per pair, and four of them are folded at once. Weighted sums and gradients of
// keys: tiles of heads by vectors of a row, a key after the other. Rows are read where they lie, in any order.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/fold.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/native_sparse_attention/cpu/branch.h"

namespace kernel_pytorch::native_sparse_attention::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::Vec4;

constexpr int kKeys = 4;                          // of a tile of scores
constexpr int kTileHeads = kLanes == 16 ? 4 : 2;  // as many as the registers hold

// Of `kHeads` heads with every row; `to` has room for whole tiles of keys.
template <class T, int kHeads>
KP_PRIMITIVE void dot_rows(const float* query, int64_t query_stride, int64_t size, const T* base, int64_t stride,
                           const int32_t* rows, int64_t count, float* to, int64_t to_stride) {
  for (int64_t i = 0; i < count; i += kKeys) {
    const T* keys[kKeys];
    for (int k = 0; k < kKeys; ++k) keys[k] = base + rows[i + k < count ? i + k : count - 1] * stride;
    Vec sums[kHeads][kKeys] = {};
    int64_t d = 0;
    for (; d + kLanes <= size; d += kLanes) {
      Vec parts[kKeys];
      for (int k = 0; k < kKeys; ++k) parts[k] = cpu::load(keys[k] + d);
      for (int h = 0; h < kHeads; ++h) {
        const Vec own = cpu::load(query + h * query_stride + d);
        for (int k = 0; k < kKeys; ++k) sums[h][k] += own * parts[k];
      }
    }
    if (d < size) {
      Vec parts[kKeys];
      for (int k = 0; k < kKeys; ++k) parts[k] = cpu::load_partial(keys[k] + d, size - d);
      for (int h = 0; h < kHeads; ++h) {
        const Vec own = cpu::load(query + h * query_stride + d);
        for (int k = 0; k < kKeys; ++k) sums[h][k] += own * parts[k];
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      const Vec4 four = cpu::sums_of(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
      __builtin_memcpy(to + h * to_stride + i, &four, sizeof(four));
    }
  }
}
template <class T>
void dot_all(const float* query, int64_t heads, int64_t size, const void* base, int64_t stride, const KeyRows& keys,
             float* to) {
  const int64_t query_stride = padded(size), to_stride = padded(keys.count);
  const T* from = static_cast<const T*>(base);
  int64_t h = 0;
  for (; h + kTileHeads <= heads; h += kTileHeads) {
    dot_rows<T, kTileHeads>(query + h * query_stride, query_stride, size, from, stride, keys.rows, keys.count,
                            to + h * to_stride, to_stride);
  }
  for (; h < heads; ++h) {
    dot_rows<T, 1>(query + h * query_stride, query_stride, size, from, stride, keys.rows, keys.count,
                   to + h * to_stride, to_stride);
  }
}

// to[h] += sum over rows of weights[h][row] * row, of kVectors vectors of a row; kPartial: of its last `left` elements.
template <class T, int kHeads, int kVectors, bool kPartial>
KP_PRIMITIVE void add_rows(const float* weights, int64_t weight_stride, const T* base, int64_t stride,
                           const int32_t* rows, int64_t count, float* to, int64_t to_stride, int64_t left) {
  Vec sums[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) sums[h][v] = cpu::load(to + h * to_stride + v * kLanes);
  }
  for (int64_t i = 0; i < count; ++i) {
    const T* row = base + rows[i] * stride;
    Vec parts[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      parts[v] = kPartial ? cpu::load_partial(row + v * kLanes, left) : cpu::load(row + v * kLanes);
    }
    for (int h = 0; h < kHeads; ++h) {
      const Vec weight = cpu::broadcast(weights[h * weight_stride + i]);
      for (int v = 0; v < kVectors; ++v) sums[h][v] += weight * parts[v];
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) cpu::store(to + h * to_stride + v * kLanes, sums[h][v]);
  }
}
template <class T, int kHeads>
KP_PRIMITIVE void add_rows_of(const float* weights, int64_t weight_stride, const T* base, int64_t stride,
                              const int32_t* rows, int64_t count, int64_t size, float* to, int64_t to_stride) {
  constexpr int kVectors = kHeads == 1 ? 8 : 4;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= size; d += kVectors * kLanes) {
    add_rows<T, kHeads, kVectors, false>(weights, weight_stride, base + d, stride, rows, count, to + d, to_stride, 0);
  }
  for (; d + 2 * kLanes <= size; d += 2 * kLanes) {
    add_rows<T, kHeads, 2, false>(weights, weight_stride, base + d, stride, rows, count, to + d, to_stride, 0);
  }
  for (; d + kLanes <= size; d += kLanes) {
    add_rows<T, kHeads, 1, false>(weights, weight_stride, base + d, stride, rows, count, to + d, to_stride, 0);
  }
  if (d < size) {
    add_rows<T, kHeads, 1, true>(weights, weight_stride, base + d, stride, rows, count, to + d, to_stride, size - d);
  }
}
template <class T>
void add_all(const float* weights, int64_t heads, const void* base, int64_t stride, const KeyRows& keys, int64_t size,
             float* to) {
  const int64_t weight_stride = padded(keys.count), to_stride = padded(size);
  const T* from = static_cast<const T*>(base);
  int64_t h = 0;
  for (; h + kTileHeads <= heads; h += kTileHeads) {
    add_rows_of<T, kTileHeads>(weights + h * weight_stride, weight_stride, from, stride, keys.rows, keys.count, size,
                               to + h * to_stride, to_stride);
  }
  for (; h < heads; ++h) {
    add_rows_of<T, 1>(weights + h * weight_stride, weight_stride, from, stride, keys.rows, keys.count, size,
                      to + h * to_stride, to_stride);
  }
}

// to[row] += sum over heads of weights[head][row] * from[head]
void add_to_rows(const float* weights, const float* from, int64_t heads, const KeyRows& keys, int64_t size, float* to) {
  const int64_t weight_stride = padded(keys.count), stride = padded(size);
  for (int64_t i = 0; i < keys.count; ++i) {
    float* row = to + keys.rows[i] * stride;
    for (int64_t d = 0; d < stride; d += kPadding) {
      constexpr int kVectors = kPadding / kLanes;
      Vec sums[kVectors];
      for (int v = 0; v < kVectors; ++v) sums[v] = cpu::load(row + d + v * kLanes);
      for (int64_t h = 0; h < heads; ++h) {
        const Vec weight = cpu::broadcast(weights[h * weight_stride + i]);
        for (int v = 0; v < kVectors; ++v) sums[v] += weight * cpu::load(from + h * stride + d + v * kLanes);
      }
      for (int v = 0; v < kVectors; ++v) cpu::store(row + d + v * kLanes, sums[v]);
    }
  }
}

// Scores to e^(score - most), zeros behind the last; their sum.
KP_PRIMITIVE float exponentials(float* scores, int64_t count, float most) {
  const float nothing = -__builtin_inff();
  for (int64_t i = count; i < padded(count); ++i) scores[i] = nothing;
  Vec sum{};
  for (int64_t i = 0; i < padded(count); i += kLanes) {
    const Vec power = cpu::exp(cpu::load(scores + i) - most);
    sum += power;
    cpu::store(scores + i, power);
  }
  return cpu::horizontal_sum(sum);
}

template <class T>
void attend(const ForwardTask& task) {
  const Heads& of = task.of;
  const KeyRows& keys = task.keys;
  const int64_t stride = padded(keys.count);
  const float nothing = -__builtin_inff();
  if (keys.count == 0) {
    for (int64_t h = 0; h < of.heads; ++h) task.lse[h] = nothing;
    return;
  }
  dot_all<T>(of.query, of.heads, of.size, keys.key, keys.key_stride, keys, task.scores);
  for (int64_t h = 0; h < of.heads; ++h) {
    float* scores = task.scores + h * stride;
    for (int64_t i = keys.count; i < stride; ++i) scores[i] = nothing;
    Vec largest = cpu::load(scores);
    for (int64_t i = kLanes; i < stride; i += kLanes) largest = cpu::max(cpu::load(scores + i), largest);
    const float most = cpu::horizontal_max(largest);
    const float sum = exponentials(scores, keys.count, most);
    task.lse[h] = most + cpu::log(cpu::broadcast(sum))[0];
    const float share = 1 / sum, gate = task.output == nullptr ? 0 : of.gates[h];
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Vec probability = cpu::load(scores + i) * share;
      if (task.importance != nullptr) {
        cpu::store(task.importance + i, cpu::load(task.importance + i) + probability);
      }
      cpu::store(scores + i, probability * gate);
    }
  }
  if (task.output == nullptr) return;
  add_all<T>(task.scores, of.heads, keys.value, keys.value_stride, keys, of.value_size, task.output);
}

template <class T>
void differentiate(const BackwardTask& task) {
  const Heads& of = task.of;
  const KeyRows& keys = task.keys;
  const int64_t stride = padded(keys.count);
  for (int64_t h = 0; h < of.heads; ++h) task.grad_gates[h] = 0;
  if (keys.count == 0) return;
  dot_all<T>(of.query, of.heads, of.size, keys.key, keys.key_stride, keys, task.scores);
  dot_all<T>(task.grad_output, of.heads, of.value_size, keys.value, keys.value_stride, keys, task.differences);
  for (int64_t h = 0; h < of.heads; ++h) {
    float* scores = task.scores + h * stride;
    float* differences = task.differences + h * stride;
    exponentials(scores, keys.count, task.lse[h]);
    for (int64_t i = keys.count; i < stride; ++i) differences[i] = 0;
    Vec sum{};
    for (int64_t i = 0; i < stride; i += kLanes) sum += cpu::load(scores + i) * cpu::load(differences + i);
    const float delta = cpu::horizontal_sum(sum), gate = of.gates[h];
    task.grad_gates[h] = delta;
    for (int64_t i = 0; i < stride; i += kLanes) {
      const Vec share = cpu::load(scores + i) * gate;
      cpu::store(scores + i, share);
      cpu::store(differences + i, share * (cpu::load(differences + i) - delta));
    }
  }
  add_all<T>(task.differences, of.heads, keys.key, keys.key_stride, keys, of.size, task.grad_query);
  add_to_rows(task.differences, of.query, of.heads, keys, of.size, task.grad_keys);
  add_to_rows(task.scores, task.grad_output, of.heads, keys, of.value_size, task.grad_values);
}

template <class T>
void load(const void* from, int64_t count, float scale, float* to) {
  const T* row = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(to + i, cpu::load(row + i) * scale);
  if (i < count) cpu::store(to + i, cpu::load_partial(row + i, count - i) * scale);
  for (i = (count + kLanes - 1) / kLanes * kLanes; i < padded(count); i += kLanes) cpu::store(to + i, Vec{});
}
template <class T>
void store(const float* from, int64_t count, float scale, void* to) {
  T* row = static_cast<T*>(to);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(row + i, cpu::load(from + i) * scale);
  if (i < count) cpu::store_partial(row + i, cpu::load(from + i) * scale, count - i);
}
template <class T>
void mean(const void* first, int64_t stride, int64_t rows, int64_t count, float* to) {
  const T* base = static_cast<const T*>(first);
  const float share = 1.0f / static_cast<float>(rows);
  for (int64_t d = 0; d < padded(count); d += kLanes) {
    Vec sum{};
    const int64_t left = count - d;
    for (int64_t row = 0; row < rows && left > 0; ++row) {
      const T* from = base + row * stride + d;
      sum += left >= kLanes ? cpu::load(from) : cpu::load_partial(from, left);
    }
    cpu::store(to + d, sum * share);
  }
}
void add(const float* from, int64_t count, float scale, float* to) {
  for (int64_t i = 0; i < padded(count); i += kLanes) {
    cpu::store(to + i, cpu::load(to + i) + cpu::load(from + i) * scale);
  }
}

template <class T>
constexpr BranchKernels kKernels{attend<T>, differentiate<T>, load<T>, store<T>, mean<T>, add};

}  // namespace

extern const BranchKernels kBranchKernels[3] = {kKernels<float>, kKernels<BFloat16>, kKernels<Float16>};

}  // namespace kernel_pytorch::native_sparse_attention::KP_ISA_NAMESPACE
