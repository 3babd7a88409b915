// One chunk of one head on the lanes of the CPU: everything is fp32 in a workspace that stays in L2, products are
// register tiles (cpu/tile_product.h). Built once per instruction level.
#include "kernel_pytorch/ops/linear_attention/cpu/chunk_gates.h"

namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE {
namespace {

template <class T>
void prepare(const Head& head, const Extent& e, int64_t begin, int64_t count, const Space& s) {
  const int64_t wide = e.wide_columns;
  read_rows(row_at<const T>(head.query, begin), head.query.stride, count, e.columns, wide, head.scale, s.qa);
  read_rows(row_at<const T>(head.key, begin), head.key.stride, count, e.columns, wide, 1.0f, s.ka);
  apply_gates<T>(head, e, begin, count, s);
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
