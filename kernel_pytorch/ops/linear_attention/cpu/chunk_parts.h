// What the CPU kernel of one chunk is written with: its workspace, products of register tiles, rows in and out as
// floats. Only for *_isa.cpp.
#pragma once

#include <type_traits>

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/pair_product.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/ops/linear_attention/cpu/chunk.h"

namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::kTileRows;
using cpu::Vec;

KP_PRIMITIVE int64_t padded(int64_t count, int64_t to) {
  return (count + to - 1) / to * to;
}

// Sizes of one head; columns and values of workspaces are padded with zeros to whole vectors.
struct Extent {
  int64_t columns, values, wide_columns, wide_values;
};
Extent extent_of(int64_t columns, int64_t values) {
  return {columns, values, padded(columns, kLanes), padded(values, kLanes)};
}
int64_t state_floats(int64_t columns, int64_t values) {
  return padded(columns, kTileRows) * padded(values, kLanes);
}

// Places in a workspace.
struct Space {
  float *qa, *ka, *qi, *ki, *v, *d, *p, *dp, *turned, *turned_state, *wide, *result, *factors;
  float *sums, *middle, *last;      // of gates: of each token or of each token and column; of each column
  float *packed_a, *packed_b;       // operands as pairs of bf16
  float *low_sums, *into, *out_of;  // scalar gates: digits of G that fp32 has no place for; e^G; e^(G_last - G)
};
int64_t place(const Extent& e, float* base, Space* space) {
  int64_t used = 0;
  const auto take = [&](float*& part, int64_t count) {
    if (base != nullptr) part = base + used;
    used += padded(count + kTileRows, kLanes);  // tiles read up to five elements past transposed operands
  };
  Space unused{};
  Space& s = space != nullptr ? *space : unused;
  const int64_t c = kChunk, k = e.wide_columns, v = e.wide_values, most = k > v ? k : v;
  take(s.qa, c * k), take(s.ka, c * k), take(s.qi, c * k), take(s.ki, c * k);
  take(s.v, c * v), take(s.d, c * v), take(s.p, c * c), take(s.dp, c * c);
  take(s.turned, most * c), take(s.turned_state, k * padded(v, kTileRows)), take(s.wide, c * k), take(s.result, c * v);
  take(s.factors, c * k), take(s.sums, c * k), take(s.middle, k), take(s.last, k);
  take(s.low_sums, c), take(s.into, c), take(s.out_of, c);
#if defined(__AVX512BF16__)
  take(s.packed_a, c * padded(most, 2 * kLanes)), take(s.packed_b, padded(most, 2) * most / 2 + c * most);
#endif
  return used;
}
int64_t workspace_floats(int64_t columns, int64_t values) {
  return place(extent_of(columns, values), nullptr, nullptr);
}

// C[rows, columns] (+)= A[rows, steps] B[steps, columns]: rows are rounded up to tiles, columns are whole vectors.
// `steps_of(first_row)` says where the sum of a tile begins and ends.
struct Steps {
  int64_t begin, end;
};
template <class StepsOf>
KP_PRIMITIVE void exact_product(const cpu::ProductA& a, const cpu::ProductB& b, const cpu::ProductC& c, int64_t rows,
                                int64_t columns, bool add, const StepsOf& steps_of) {
  for (int64_t j = 0; j < columns; j += cpu::kTileColumns) {
    const int64_t left = columns - j;
    const int vectors = static_cast<int>((left < cpu::kTileColumns ? left : cpu::kTileColumns) / kLanes);
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const Steps steps = steps_of(i, j);
      cpu::multiply_tile(vectors,
                         {a.data + i * a.row_stride + steps.begin * a.step_stride, a.row_stride, a.step_stride},
                         {b.data + steps.begin * b.step_stride + j, b.step_stride}, steps.end - steps.begin,
                         {c.data + i * c.row_stride + j, c.row_stride}, add);
    }
  }
}

// The same of a chunk whose tensors are T: of bf16 operands are rounded to bf16, where the machine multiplies that
// faster. `steps` are all that there are; sums of tiles begin at even ones.
template <class T, class StepsOf>
void product([[maybe_unused]] const Space& s, const cpu::ProductA& a, const cpu::ProductB& b, const cpu::ProductC& c,
             int64_t rows, int64_t columns, [[maybe_unused]] int64_t steps, bool add, const StepsOf& steps_of) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    auto *a_words = reinterpret_cast<uint32_t*>(s.packed_a), *b_words = reinterpret_cast<uint32_t*>(s.packed_b);
    const bool by_rows = a.step_stride == 1;  // else rows are neighbours
    const int64_t tiled_rows = padded(rows, kTileRows),
                  pitch = by_rows ? cpu::pairs_pitch(steps) : padded(rows, kLanes);
    if (by_rows) {
      cpu::pack_row_pairs(a.data, a.row_stride, tiled_rows, steps, a_words);
    } else {
      cpu::pack_step_pairs(a.data, a.step_stride, steps, pitch, a_words);
    }
    cpu::pack_step_pairs(b.data, b.step_stride, steps, columns, b_words);
    for (int64_t j = 0; j < columns; j += cpu::kTileColumns) {
      const int64_t left = columns - j;
      const int64_t vectors = (left < cpu::kTileColumns ? left : cpu::kTileColumns) / kLanes;
      for (int64_t i = 0; i < rows; i += kTileRows) {
        const Steps of = steps_of(i, j);
        const int64_t first = of.begin / 2, pairs = (of.end + 1) / 2 - first;
        const cpu::PairsOfA tile{a_words + (by_rows ? i * pitch + first : first * pitch + i), by_rows ? pitch : 1,
                                 by_rows ? 1 : pitch};
        cpu::with_vectors(vectors, [&]<int kVectors>() {
          cpu::multiply_pair_tile<kVectors>(tile, b_words + first * columns + j, columns, pairs,
                                            {c.data + i * c.row_stride + j, c.row_stride}, add);
        });
      }
    }
    return;
  }
#endif
  exact_product(a, b, c, rows, columns, add, steps_of);
}
template <class T>
void product(const Space& s, const cpu::ProductA& a, const cpu::ProductB& b, const cpu::ProductC& c, int64_t rows,
             int64_t columns, int64_t steps, bool add) {
  product<T>(s, a, b, c, rows, columns, steps, add, [=](int64_t, int64_t) { return Steps{0, steps}; });
}

// to[columns, rows] = from[rows, columns]^T, both multiples of the lanes or zero-padded by the caller.
void transpose_into(const float* from, int64_t rows, int64_t columns, int64_t from_stride, float* to,
                    int64_t to_stride) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      Vec block[kLanes];
      for (int64_t k = 0; k < kLanes; ++k)
        block[k] = i + k < rows ? cpu::load(from + (i + k) * from_stride + j) : Vec{};
      cpu::transpose(block);
      for (int64_t k = 0; k < kLanes; ++k) cpu::store(to + (j + k) * to_stride + i, block[k]);
    }
  }
}

constexpr int64_t kAhead = 8;  // tokens

// Rows of a tensor as floats, `wide` apart; columns beyond the last are zero, as are rows up to a chunk's end.
template <class T>
void read_rows(const T* from, int64_t stride, int64_t rows, int64_t columns, int64_t wide, float factor, float* to) {
  for (int64_t t = 0; t < rows; ++t) {
    const T* row = from + t * stride;
    if (t + kAhead < rows) {  // rows of a head lie too far apart for the machine to foresee
      for (int64_t j = 0; j < columns; j += 64 / static_cast<int64_t>(sizeof(T))) {
        __builtin_prefetch(row + kAhead * stride + j);
      }
    }
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) cpu::store(to + t * wide + j, cpu::load(row + j) * factor);
    if (j < columns) cpu::store(to + t * wide + j, cpu::load_partial(row + j, columns - j) * factor);
  }
  for (int64_t i = rows * wide; i < kChunk * wide; i += kLanes) cpu::store(to + i, Vec{});
}
template <class T>
void write_rows(const float* from, int64_t wide, int64_t rows, int64_t columns, T* to, int64_t stride, float factor) {
  for (int64_t t = 0; t < rows; ++t) {
    T* row = to + t * stride;
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) cpu::store(row + j, cpu::load(from + t * wide + j) * factor);
    if (j < columns) cpu::store_partial(row + j, cpu::load(from + t * wide + j) * factor, columns - j);
  }
}
template <class T>
KP_PRIMITIVE T* row_at(const Rows& rows, int64_t token) {
  return static_cast<T*>(rows.data) + token * rows.stride;
}
template <class T>
KP_PRIMITIVE float element_at(const Rows& rows, int64_t token) {
  return rows.is_float ? *row_at<float>(rows, token) : to_float(*row_at<T>(rows, token));
}
template <class T>
KP_PRIMITIVE float scalar_gate(const Head& head, int64_t token) {
  const float gate = (head.gate.data != nullptr ? element_at<T>(head.gate, token) : 0.0f) + head.decay;
  return gate < kLeastGate ? kLeastGate : gate;
}
template <class T>
KP_PRIMITIVE void read_any(const Rows& rows, int64_t token, int64_t count, int64_t columns, int64_t wide, float* to) {
  if (rows.is_float) {
    read_rows(row_at<const float>(rows, token), rows.stride, count, columns, wide, 1.0f, to);
  } else {
    read_rows(row_at<const T>(rows, token), rows.stride, count, columns, wide, 1.0f, to);
  }
}

}  // namespace
}  // namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE
