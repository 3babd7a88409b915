// One chunk of one head on the lanes of the CPU: everything is fp32 in a workspace that stays in L2, products are
// register tiles (cpu/tile_product.h). Built once per instruction level.
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/linear_attention/cpu/chunk_parts.h"

namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE {
namespace {

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

// Qa, Ka, Qi, Ki of a chunk, and what gates multiply: factors[t, i] = e^(G - m) with gates of columns; sums[t] = G with
// scalar ones. last = G_last of each column.
template <class T>
void prepare(const Head& head, const Extent& e, int64_t begin, int64_t count, const Space& s) {
  const int64_t wide = e.wide_columns;
  read_rows(row_at<const T>(head.query, begin), head.query.stride, count, e.columns, wide, head.scale, s.qa);
  read_rows(row_at<const T>(head.key, begin), head.key.stride, count, e.columns, wide, 1.0f, s.ka);
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
    float sum = 0;
    for (int64_t t = 0; t < count; ++t) {
      if (head.has_scalar) sum += scalar_gate<T>(head, begin + t);
      s.sums[t] = sum;
    }
    for (int64_t t = count; t < kChunk; ++t) s.sums[t] = sum;
    for (int64_t i = 0; i < wide; i += kLanes) cpu::store(s.last + i, cpu::broadcast(sum));
    for (int64_t t = 0; t < count; ++t) {
      const Vec into = cpu::exp(cpu::broadcast(s.sums[t])), out = cpu::exp(cpu::broadcast(sum - s.sums[t]));
      for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
        cpu::store(s.qi + i, cpu::load(s.qa + i) * into);
        cpu::store(s.ki + i, cpu::load(s.ka + i) * out);
      }
    }
  }
  for (int64_t i = count * wide; i < kChunk * wide; i += kLanes) {
    cpu::store(s.qi + i, Vec{});
    cpu::store(s.ki + i, Vec{});
  }
}

// A product of rows and columns of tokens: only what is not above the diagonal is kept, decayed by scalar gates.
void mask(const Head& head, int64_t count, const float* sums, float* scores) {
  alignas(64) float numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);
  const Vec lanes = cpu::load(numbers);
  const bool decays = head.has_scalar && head.channel_gate.data == nullptr;
  for (int64_t t = 0; t < padded(count, kTileRows); ++t) {
    for (int64_t s = 0; s < kChunk; s += kLanes) {
      Vec value = cpu::load(scores + t * kChunk + s);
      if (decays && s <= t) value = value * cpu::exp(cpu::broadcast(sums[t]) - cpu::load(sums + s));
      const auto is_kept = lanes + static_cast<float>(s) <= cpu::broadcast(static_cast<float>(t < count ? t : -1));
      cpu::store(scores + t * kChunk + s, cpu::select(is_kept, value, Vec{}));
    }
  }
}
// scores[t, s] = rows[t] . turned[:, s] for s up to t's tile.
void triangle(const float* rows, int64_t wide, const float* turned, int64_t steps, int64_t count, float* scores) {
  product({rows, wide, 1}, {turned, kChunk}, {scores, kChunk}, count, kChunk, false, [=](int64_t i, int64_t j) {
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
void gather(const float* a, const float* b, const Extent& e, int64_t count, bool has_gates, const float* last,
            float* state) {
  if (has_gates) scale_state(last, e, state);
  product({a, 1, e.wide_columns}, {b, e.wide_values}, {state, e.wide_values}, e.columns, e.wide_values, count, true);
}
KP_PRIMITIVE bool has_gates(const Head& head) {
  return head.has_scalar || head.channel_gate.data != nullptr;
}

template <class T>
void advance(const Head& head, int64_t begin, int64_t end, float* state, const Rows& output, float* log_total,
             float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t count = end - begin;
  Space s{};
  place(e, workspace, &s);
  prepare<T>(head, e, begin, count, s);
  read_rows(row_at<const T>(head.value, begin), head.value.stride, count, e.values, e.wide_values, 1.0f, s.v);
  if (output.data != nullptr) {
    transpose_into(s.ka, kChunk, e.wide_columns, e.wide_columns, s.turned, kChunk);
    triangle(s.qa, e.wide_columns, s.turned, e.columns, count, s.p);
    mask(head, count, s.sums, s.p);
    product({s.qi, e.wide_columns, 1}, {state, e.wide_values}, {s.result, e.wide_values}, count, e.wide_values,
            e.columns, false);
    product({s.p, kChunk, 1}, {s.v, e.wide_values}, {s.result, e.wide_values}, count, e.wide_values, true,
            [=](int64_t i, int64_t) {
              return Steps{0, i + kTileRows < count ? i + kTileRows : count};
            });
    write_rows(s.result, e.wide_values, count, e.values, row_at<T>(output, begin), output.stride, 1.0f);
  }
  gather(s.ki, s.v, e, count, has_gates(head), s.last, state);
  if (log_total != nullptr) {
    for (int64_t i = 0; i < e.columns; ++i) log_total[i] += s.last[i];
  }
}

// One row of the state after another, each read and written once for a token.
template <class T>
void step(const Head& head, int64_t begin, int64_t end, float* state, const Rows& output, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  Space s{};
  place(e, workspace, &s);
  const int64_t values = e.wide_values;
  for (int64_t token = begin; token < end; ++token) {
    const T *query = row_at<const T>(head.query, token), *key = row_at<const T>(head.key, token);
    read_rows(row_at<const T>(head.value, token), 0, 1, e.values, 0, 1.0f, s.v);
    if (head.channel_gate.data != nullptr) {
      sum_column_gates<T>(head, e, token, 1, s.sums);
    } else {
      const Vec gate = cpu::broadcast(head.has_scalar ? scalar_gate<T>(head, token) : 0.0f);
      for (int64_t i = 0; i < e.wide_columns; i += kLanes) cpu::store(s.sums + i, gate);
    }
    for (int64_t i = 0; i < e.wide_columns; i += kLanes) cpu::store(s.sums + i, cpu::exp(cpu::load(s.sums + i)));
    for (int64_t j = 0; j < values; j += kLanes) cpu::store(s.result + j, Vec{});
    for (int64_t i = 0; i < e.columns; ++i) {
      const float kept = s.sums[i], k = to_float(key[i]), q = to_float(query[i]) * head.scale;
      float* row = state + i * values;
      for (int64_t j = 0; j < values; j += kLanes) {
        const Vec next = cpu::load(row + j) * kept + cpu::load(s.v + j) * k;
        cpu::store(row + j, next);
        cpu::store(s.result + j, cpu::load(s.result + j) + next * q);
      }
    }
    write_rows(s.result, values, 1, e.values, row_at<T>(output, token), 0, 1.0f);
  }
}

template <class T>
void retreat(const Head& head, int64_t begin, int64_t end, float* state_gradient, float* log_total, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  Space s{};
  place(e, workspace, &s);
  prepare<T>(head, e, begin, end - begin, s);
  read_rows(row_at<const T>(head.grad_output, begin), head.grad_output.stride, end - begin, e.values, e.wide_values,
            1.0f, s.d);
  gather(s.qi, s.d, e, end - begin, has_gates(head), s.last, state_gradient);
  for (int64_t i = 0; i < e.columns; ++i) log_total[i] += s.last[i];
}

// part[t, i] *= what the state's share of a gradient is multiplied by: `of_columns[i]` with gates of columns, else
// e^`of_token(t)`.
template <class OfToken>
KP_PRIMITIVE void scale_share(const Head& head, const Extent& e, int64_t count, const float* of_columns,
                              const OfToken& of_token, float* part) {
  if (!has_gates(head)) return;
  const bool by_column = head.channel_gate.data != nullptr;
  for (int64_t t = 0; t < count; ++t) {
    const Vec row = by_column ? Vec{} : cpu::exp(cpu::broadcast(of_token(t)));
    for (int64_t i = 0; i < e.wide_columns; i += kLanes) {
      float* at = part + t * e.wide_columns + i;
      cpu::store(at, cpu::load(at) * (by_column ? cpu::load(of_columns + i) : row));
    }
  }
}

// The gates' gradients: that of G_t is what q dq - k dk sums to over t and all later tokens, and behind the chunk it is
// the state times its gradient. `terms` [tokens, columns] holds q dq - k dk.
template <class T>
void write_gate_gradients(const Extent& e, int64_t begin, int64_t count, const float* after, const float* gradient,
                          const Gradients& gradients, const float* terms, float* sums, float* row) {
  const int64_t wide = e.wide_columns;
  for (int64_t i = 0; i < wide; ++i) sums[i] = 0;
  for (int64_t i = 0; i < e.columns; ++i) {
    Vec sum{};
    for (int64_t j = 0; j < e.wide_values; j += kLanes) {
      sum += cpu::load(after + i * e.wide_values + j) * cpu::load(gradient + i * e.wide_values + j);
    }
    sums[i] = cpu::horizontal_sum(sum);
  }
  double decay = 0;
  for (int64_t t = count - 1; t >= 0; --t) {
    const bool is_first = begin + t == gradients.first;
    Vec total{};
    for (int64_t i = 0; i < wide; i += kLanes) {
      // Of a first token what is there is a difference of rounded sums.
      const Vec sum = is_first ? Vec{} : cpu::load(sums + i) + cpu::load(terms + t * wide + i);
      cpu::store(sums + i, sum);
      cpu::store(row + i, sum);
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

template <class T>
void differentiate(const Head& head, int64_t begin, int64_t end, const float* state_before, const float* state_after,
                   float* state_gradient, const Gradients& gradients, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t count = end - begin, wide = e.wide_columns, values = e.wide_values;
  const bool by_column = head.channel_gate.data != nullptr;
  Space s{};
  place(e, workspace, &s);
  prepare<T>(head, e, begin, count, s);
  read_rows(row_at<const T>(head.value, begin), head.value.stride, count, e.values, values, 1.0f, s.v);
  read_rows(row_at<const T>(head.grad_output, begin), head.grad_output.stride, count, e.values, values, 1.0f, s.d);
  transpose_into(s.ka, kChunk, wide, wide, s.turned, kChunk);
  triangle(s.qa, wide, s.turned, e.columns, count, s.p);
  mask(head, count, s.sums, s.p);
  transpose_into(s.v, kChunk, values, values, s.turned, kChunk);
  triangle(s.d, values, s.turned, e.values, count, s.dp);
  mask(head, count, s.sums, s.dp);
  const auto from_row = [=](int64_t i, int64_t) { return Steps{i, count}; };
  const auto to_row = [=](int64_t i, int64_t) { return Steps{0, i + kTileRows < count ? i + kTileRows : count}; };

  // dV = P^T dO + Ki dS
  product({s.ki, wide, 1}, {state_gradient, values}, {s.result, values}, count, values, e.columns, false);
  product({s.p, 1, kChunk}, {s.d, values}, {s.result, values}, count, values, true, from_row);
  write_rows(s.result, values, count, e.values, row_at<T>(gradients.value, begin), gradients.value.stride, 1.0f);

  // dQ = e^(G - m) (e^m dO S^T + dP Ka); terms of the gates' gradient begin with q dq.
  const bool wants_gates =
      gradients.gate.data != nullptr || gradients.channel_gate.data != nullptr || gradients.decay != nullptr;
  float* terms = s.qi;  // Qi is needed once more below, and computed again there
  if (by_column) {
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec middle = cpu::load(s.middle + i);
      cpu::store(s.middle + i, cpu::exp(middle));
      cpu::store(s.sums + i, cpu::exp(cpu::load(s.last + i) - middle));  // sums are not read again by columns
    }
  }
  transpose_into(state_before, e.columns, values, values, s.turned_state, wide);
  product({s.d, values, 1}, {s.turned_state, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(
      head, e, count, s.middle, [&](int64_t t) { return s.sums[t]; }, s.wide);
  product({s.dp, kChunk, 1}, {s.ka, wide}, {s.wide, wide}, count, wide, true, to_row);
  // The gradient of the state in front, before Qi makes room.
  float* after_gradient = s.turned_state;
  for (int64_t i = 0; wants_gates && i < count * wide; i += kLanes) {
    cpu::store(terms + i, cpu::load(s.qa + i) * cpu::load(s.wide + i));
  }
  for (int64_t i = 0; by_column && i < count * wide; i += kLanes) {
    cpu::store(s.wide + i, cpu::load(s.wide + i) * cpu::load(s.factors + i));
  }
  write_rows(s.wide, wide, count, e.columns, row_at<T>(gradients.query, begin), gradients.query.stride, head.scale);

  // dK = e^(m - G) (e^(G_last - m) V dS^T + dP^T Qa)
  transpose_into(state_gradient, e.columns, values, values, after_gradient, wide);
  product({s.v, values, 1}, {after_gradient, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(
      head, e, count, s.sums, [&](int64_t t) { return s.last[0] - s.sums[t]; }, s.wide);
  product({s.dp, 1, kChunk}, {s.qa, wide}, {s.wide, wide}, count, wide, true, from_row);
  for (int64_t i = 0; wants_gates && i < count * wide; i += kLanes) {
    cpu::store(terms + i, cpu::load(terms + i) - cpu::load(s.ka + i) * cpu::load(s.wide + i));
  }
  for (int64_t i = 0; by_column && i < count * wide; i += kLanes) {
    cpu::store(s.wide + i, cpu::load(s.wide + i) / cpu::load(s.factors + i));
  }
  write_rows(s.wide, wide, count, e.columns, row_at<T>(gradients.key, begin), gradients.key.stride, 1.0f);
  if (wants_gates) {
    write_gate_gradients<T>(e, begin, count, state_after, state_gradient, gradients, terms, s.ki, s.ki + wide);
  }

  // Qi again, from Qa.
  for (int64_t t = 0; t < count; ++t) {
    const Vec row = by_column ? Vec{} : cpu::exp(cpu::broadcast(s.sums[t]));
    for (int64_t i = 0; i < wide; i += kLanes) {
      cpu::store(s.qi + t * wide + i, cpu::load(s.qa + t * wide + i) * (by_column ? cpu::load(s.middle + i) : row));
    }
  }
  gather(s.qi, s.d, e, count, has_gates(head), s.last, state_gradient);
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
void join_states(const float* log_factors, const float* more, int64_t columns, int64_t values, float* state) {
  const Extent e = extent_of(columns, values);
  scale_state(log_factors, e, state);
  for (int64_t i = 0; i < e.columns * e.wide_values; ++i) state[i] += more[i];
}

template <class T>
constexpr ChunkKernels kernels_for() {
  return {workspace_floats, state_floats, read_state, write_state, join_states,
          chunk_end<T>,     advance<T>,   step<T>,    retreat<T>,  differentiate<T>};
}

}  // namespace

extern const ChunkKernels kChunkKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(),
                                                        kernels_for<Float16>()};

}  // namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE
