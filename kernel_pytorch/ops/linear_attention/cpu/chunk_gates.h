// What gates do to a chunk's queries, keys and scores, where a chunk ends, and the state's share. Only for *_isa.cpp.
#pragma once

#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/linear_attention/cpu/chunk_parts.h"

namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE {
namespace {

// One row as floats, zero beyond its columns.
template <class T>
KP_PRIMITIVE void read_row(const T* from, int64_t columns, int64_t wide, float factor, float* to) {
  for (int64_t i = 0; i < wide; i += kLanes) {
    const int64_t left = columns - i < kLanes ? columns - i : kLanes;
    cpu::store(to + i, cpu::load_partial(from + i, left) * factor);
  }
}

// sums[t, i] = the gates of tokens up to t, of column i.
template <class T>
void sum_column_gates(const Head& head, const Extent& e, int64_t begin, int64_t count, float* sums) {
  const int64_t wide = e.wide_columns;
  read_any<T>(head.channel_gate, begin, count, e.columns, wide, sums);
  for (int64_t t = 0; t < count; ++t) {
    const float scalar = head.has_scalar ? scalar_gate<T>(head, begin + t) : 0.0f;
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec before = t > 0 ? cpu::load(sums + (t - 1) * wide + i) : Vec{};
      const Vec gate = cpu::max(cpu::broadcast(kLeastGate), cpu::load(sums + t * wide + i) + scalar);  // keeps a NaN
      cpu::store(sums + t * wide + i, before + gate);
    }
  }
}

// G of each token, and behind the last one G_last. Of strong gates G is so large that fp32 has few digits behind the
// point, which a difference of two of them would need: the others are kept.
template <class T>
void sum_scalar_gates(const Head& head, int64_t begin, int64_t count, const Space& s) {
  double sum = 0;
  for (int64_t t = 0; t < kChunk; ++t) {
    if (head.has_scalar && t < count) sum += scalar_gate<T>(head, begin + t);
    s.sums[t] = static_cast<float>(sum);
    s.low_sums[t] = static_cast<float>(sum - s.sums[t]);
  }
  for (int64_t t = 0; t < kChunk; t += kLanes) {
    const Vec high = cpu::load(s.sums + t), low = cpu::load(s.low_sums + t);
    cpu::store(s.into + t, cpu::exp(high));
    cpu::store(s.out_of + t, cpu::exp((s.sums[kChunk - 1] - high) + (s.low_sums[kChunk - 1] - low)));
  }
}

// What one token's gates multiply each column's row of the state by.
template <class T>
KP_PRIMITIVE void read_factors(const Head& head, const Extent& e, int64_t token, float* factors) {
  const Vec scalar = cpu::broadcast(head.has_scalar ? scalar_gate<T>(head, token) : 0.0f);
  for (int64_t i = 0; i < e.wide_columns; i += kLanes) cpu::store(factors + i, Vec{});
  if (head.channel_gate.is_float) {
    read_row(row_at<const float>(head.channel_gate, token), e.columns, e.wide_columns, 1.0f, factors);
  } else if (head.channel_gate.data != nullptr) {
    read_row(row_at<const T>(head.channel_gate, token), e.columns, e.wide_columns, 1.0f, factors);
  }
  for (int64_t i = 0; i < e.wide_columns; i += kLanes) {
    const Vec gate = cpu::max(cpu::broadcast(kLeastGate), cpu::load(factors + i) + scalar);  // keeps a NaN
    cpu::store(factors + i, cpu::exp(gate));
  }
}

template <class T>
int64_t chunk_end(const Head& head, int64_t begin, int64_t end) {
  const int64_t most = end - begin < kChunk ? end : begin + kChunk;
  if (head.channel_gate.data == nullptr) return most;
  constexpr int64_t kColumns = 1024;  // of a stretch: sums on the stack
  int64_t found = most;
  for (int64_t first = 0; first < head.columns; first += kColumns) {
    const int64_t columns = head.columns - first < kColumns ? head.columns - first : kColumns;
    alignas(64) float sums[kColumns] = {}, gates[kColumns];
    for (int64_t token = begin; token < found; ++token) {
      if (head.channel_gate.is_float) {
        read_rows(row_at<const float>(head.channel_gate, token) + first, 0, 1, columns, 0, 1.0f, gates);
      } else {
        read_rows(row_at<const T>(head.channel_gate, token) + first, 0, 1, columns, 0, 1.0f, gates);
      }
      const float scalar = head.has_scalar ? scalar_gate<T>(head, token) : 0.0f;
      float most_size = 0;
      for (int64_t i = 0; i < columns; ++i) {
        sums[i] += gates[i] + scalar;
        const float size = sums[i] < 0 ? -sums[i] : sums[i];
        most_size = size > most_size ? size : most_size;
      }
      if (token > begin && most_size > kMostRange) found = token;
    }
  }
  return found;
}

// Qa, Ka, Qi, Ki of a chunk, of the queries and keys in the places of Qa and Ka, and what gates multiply: factors[t, i]
// = e^(G - m) with gates of columns; sums[t] = G with scalar ones. last = G_last of each column.
template <class T>
void apply_gates(const Head& head, const Extent& e, int64_t begin, int64_t count, const Space& s) {
  const int64_t wide = e.wide_columns;
  if (head.channel_gate.data != nullptr) {
    sum_column_gates<T>(head, e, begin, count, s.sums);
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec last = cpu::load(s.sums + (count - 1) * wide + i);
      // A chunk of one token may fall below the range: its own G is the reference then, and Qa, Ka are q, k.
      const Vec middle = count == 1 ? last : last * 0.5f;
      const Vec before = cpu::exp(middle), after = cpu::exp(last - middle);
      cpu::store(s.last + i, last);
      cpu::store(s.middle + i, middle);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = t * wide + i;
        const Vec factor = cpu::exp(cpu::load(s.sums + at) - middle);
        const Vec q = cpu::load(s.qa + at) * factor, k = cpu::load(s.ka + at) / factor;
        cpu::store(s.factors + at, factor);
        cpu::store(s.qa + at, q);
        cpu::store(s.ka + at, k);
        cpu::store(s.qi + at, q * before);
        cpu::store(s.ki + at, k * after);
      }
    }
  } else {
    sum_scalar_gates<T>(head, begin, count, s);
    for (int64_t i = 0; i < wide; i += kLanes) cpu::store(s.last + i, cpu::broadcast(s.sums[kChunk - 1]));
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
        cpu::store(s.qi + i, cpu::load(s.qa + i) * s.into[t]);
        cpu::store(s.ki + i, cpu::load(s.ka + i) * s.out_of[t]);
      }
    }
  }
  for (int64_t i = count * wide; i < kChunk * wide; i += kLanes) {
    cpu::store(s.qi + i, Vec{});
    cpu::store(s.ki + i, Vec{});
  }
}

// A product of rows and columns of tokens: only what is not above the diagonal, or `behind` of it, is kept, decayed by
// scalar gates.
KP_PRIMITIVE void mask(const Head& head, int64_t count, const Space& space, float* scores, int64_t behind = 0) {
  alignas(64) float numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
  const Vec lanes = cpu::load(numbers);
  const bool decays = head.has_scalar && head.channel_gate.data == nullptr;
  for (int64_t t = 0; t < padded(count, kTileRows); ++t) {
    for (int64_t s = 0; s < kChunk; s += kLanes) {
      Vec value = cpu::load(scores + t * kChunk + s);
      if (decays && s <= t) {
        const Vec low = cpu::broadcast(space.low_sums[t]) - cpu::load(space.low_sums + s);
        value = value * cpu::exp((cpu::broadcast(space.sums[t]) - cpu::load(space.sums + s)) + low);
      }
      const auto is_kept =
          lanes + static_cast<float>(s) <= cpu::broadcast(static_cast<float>(t < count ? t - behind : -1));
      cpu::store(scores + t * kChunk + s, cpu::select(is_kept, value, Vec{}));
    }
  }
}
// scores[t, s] = rows[t] . turned[:, s] for s up to t's tile.
template <class T>
void triangle(const Space& space, const float* rows, int64_t wide, const float* turned, int64_t steps, int64_t count,
              float* scores) {
  product<T>(space, {rows, wide, 1}, {turned, kChunk}, {scores, kChunk}, count, kChunk, steps, false,
             [=](int64_t i, int64_t j) {
               return Steps{0, j < i + kTileRows ? steps : 0};
             });
}

void scale_state(const float* last, const Extent& e, float* state) {
  for (int64_t i = 0; i < e.columns; ++i) {
    const Vec factor = cpu::exp(cpu::broadcast(last[i]));
    for (int64_t j = 0; j < e.wide_values; j += kLanes) {
      cpu::store(state + i * e.wide_values + j, cpu::load(state + i * e.wide_values + j) * factor);
    }
  }
}
// state (+)= A^T B over the tokens of a chunk.
void gather(const Space& space, const float* a, const float* b, const Extent& e, int64_t count, bool has_gates,
            float* state) {
  if (has_gates) scale_state(space.last, e, state);
  product<float>(space, {a, 1, e.wide_columns}, {b, e.wide_values}, {state, e.wide_values}, e.columns, e.wide_values,
                 count, true);
}
KP_PRIMITIVE bool has_gates(const Head& head) {
  return head.has_scalar || head.channel_gate.data != nullptr;
}

// part[t, i] *= what the state's share of a gradient is multiplied by: `of_columns[i]` with gates of columns, else
// of_tokens[t].
KP_PRIMITIVE void scale_share(const Head& head, const Extent& e, int64_t count, const float* of_columns,
                              const float* of_tokens, float* part) {
  if (!has_gates(head)) return;
  const bool by_column = head.channel_gate.data != nullptr;
  for (int64_t t = 0; t < count; ++t) {
    const Vec row = by_column ? Vec{} : cpu::broadcast(of_tokens[t]);
    for (int64_t i = 0; i < e.wide_columns; i += kLanes) {
      float* at = part + t * e.wide_columns + i;
      cpu::store(at, cpu::load(at) * (by_column ? cpu::load(of_columns + i) : row));
    }
  }
}

// The scores' diagonal, which is set to 0.
KP_PRIMITIVE void take_diagonal(float* scores, int64_t count, float* diagonal) {
  for (int64_t t = 0; t < count; ++t) {
    diagonal[t] = scores[t * kChunk + t];
    scores[t * kChunk + t] = 0;
  }
}

// The gates' gradients. That of a token's gate is what earlier tokens give to it and to later ones. In front of a chunk
// this is the state times its gradient; what a token takes, q dq, goes, and what it gives, k dk, comes. `terms`
// [tokens, columns] holds q dq - k dk without what a token gives to itself, through which no gate goes: so nothing that
// gates do not decay is among the sums, and gradients of strong gates keep their digits.
template <class T>
void write_gate_gradients(const Extent& e, int64_t begin, int64_t count, const float* before, const float* gradient,
                          const Gradients& gradients, const float* terms, float* sums, float* row) {
  const int64_t wide = e.wide_columns;
  for (int64_t i = 0; i < wide; ++i) sums[i] = 0;
  for (int64_t i = 0; i < e.columns; ++i) {
    Vec sum{};
    for (int64_t j = 0; j < e.wide_values; j += kLanes) {
      sum += cpu::load(before + i * e.wide_values + j) * cpu::load(gradient + i * e.wide_values + j);
    }
    sums[i] = cpu::horizontal_sum(sum);
  }
  double decay = 0;
  for (int64_t t = 0; t < count; ++t) {
    Vec total{};
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec sum = cpu::load(sums + i);
      cpu::store(row + i, sum);
      cpu::store(sums + i, sum - cpu::load(terms + t * wide + i));
      total += sum;
    }
    const float scalar = cpu::horizontal_sum(total);
    decay += scalar;
    if (gradients.gate.data != nullptr) {
      if (gradients.gate.is_float) {
        *row_at<float>(gradients.gate, begin + t) = scalar;
      } else {
        *row_at<T>(gradients.gate, begin + t) = from_float<T>(scalar);
      }
    }
    if (gradients.channel_gate.data == nullptr) continue;
    if (gradients.channel_gate.is_float) {
      write_rows(row, wide, 1, e.columns, row_at<float>(gradients.channel_gate, begin + t), 0, 1.0f);
    } else {
      write_rows(row, wide, 1, e.columns, row_at<T>(gradients.channel_gate, begin + t), 0, 1.0f);
    }
  }
  if (gradients.decay != nullptr) *gradients.decay += decay;
}

void read_state(const float* from, int64_t columns, int64_t values, float* state) {
  const int64_t wide = padded(values, kLanes), all = state_floats(columns, values);
  for (int64_t i = 0; i < all; ++i) state[i] = 0;
  for (int64_t i = 0; from != nullptr && i < columns; ++i) {
    for (int64_t j = 0; j < values; ++j) state[i * wide + j] = from[i * values + j];
  }
}
void write_state(const float* state, int64_t columns, int64_t values, float* to) {
  const int64_t wide = padded(values, kLanes);
  for (int64_t i = 0; i < columns; ++i) {
    for (int64_t j = 0; j < values; ++j) to[i * values + j] = state[i * wide + j];
  }
}

}  // namespace
}  // namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE
