// kp-isa: v2 v3 v4 v4bf16 neon sve256
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
    triangle<T>(s, s.qa, e.wide_columns, s.turned, e.columns, count, s.p);
    mask(head, count, s, s.p);
    product<T>(s, {s.qi, e.wide_columns, 1}, {state, e.wide_values}, {s.result, e.wide_values}, count, e.wide_values,
               e.columns, false);
    product<T>(s, {s.p, kChunk, 1}, {s.v, e.wide_values}, {s.result, e.wide_values}, count, e.wide_values, count, true,
               [=](int64_t i, int64_t) {
                 return Steps{0, i + kTileRows < count ? i + kTileRows : count};
               });
    write_rows(s.result, e.wide_values, count, e.values, row_at<T>(output, begin), output.stride, 1.0f);
  }
  gather(s, s.ki, s.v, e, count, has_gates(head), state);
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
  gather(s, s.qi, s.d, e, end - begin, has_gates(head), state_gradient);
  for (int64_t i = 0; i < e.columns; ++i) log_total[i] += s.last[i];
}

template <class T>
void differentiate(const Head& head, int64_t begin, int64_t end, const float* state_before, float* state_gradient,
                   const Gradients& gradients, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t count = end - begin, wide = e.wide_columns, values = e.wide_values;
  const bool by_column = head.channel_gate.data != nullptr;
  Space s{};
  place(e, workspace, &s);
  prepare<T>(head, e, begin, count, s);
  read_rows(row_at<const T>(head.value, begin), head.value.stride, count, e.values, values, 1.0f, s.v);
  read_rows(row_at<const T>(head.grad_output, begin), head.grad_output.stride, count, e.values, values, 1.0f, s.d);
  transpose_into(s.ka, kChunk, wide, wide, s.turned, kChunk);
  triangle<T>(s, s.qa, wide, s.turned, e.columns, count, s.p);
  mask(head, count, s, s.p);
  transpose_into(s.v, kChunk, values, values, s.turned, kChunk);
  triangle<T>(s, s.d, values, s.turned, e.values, count, s.dp);
  mask(head, count, s, s.dp);
  const auto from_row = [=](int64_t i, int64_t) { return Steps{i, count}; };
  const auto to_row = [=](int64_t i, int64_t) { return Steps{0, i + kTileRows < count ? i + kTileRows : count}; };

  // dV = P^T dO + Ki dS
  product<T>(s, {s.ki, wide, 1}, {state_gradient, values}, {s.result, values}, count, values, e.columns, false);
  product<T>(s, {s.p, 1, kChunk}, {s.d, values}, {s.result, values}, count, values, count, true, from_row);
  write_rows(s.result, values, count, e.values, row_at<T>(gradients.value, begin), gradients.value.stride, 1.0f);

  // dQ = e^(G - m) (e^m dO S^T + dP Ka); terms of the gates' gradient begin with q dq.
  const bool wants_gates =
      gradients.gate.data != nullptr || gradients.channel_gate.data != nullptr || gradients.decay != nullptr;
  float *terms = s.ki, *diagonal = s.p;  // neither is needed any more
  take_diagonal(s.dp, count, diagonal);
  if (by_column) {
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec middle = cpu::load(s.middle + i);
      cpu::store(s.middle + i, cpu::exp(middle));
      cpu::store(s.sums + i, cpu::exp(cpu::load(s.last + i) - middle));  // sums are not read again by columns
    }
  }
  transpose_into(state_before, e.columns, values, values, s.turned_state, wide);
  product<T>(s, {s.d, values, 1}, {s.turned_state, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(head, e, count, s.middle, s.into, s.wide);
  product<T>(s, {s.dp, kChunk, 1}, {s.ka, wide}, {s.wide, wide}, count, wide, count, true, to_row);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
      const Vec gradient = cpu::load(s.wide + i);
      if (wants_gates) cpu::store(terms + i, cpu::load(s.qa + i) * gradient);
      const Vec whole = gradient + cpu::load(s.ka + i) * diagonal[t];
      cpu::store(s.wide + i, by_column ? whole * cpu::load(s.factors + i) : whole);
    }
  }
  write_rows(s.wide, wide, count, e.columns, row_at<T>(gradients.query, begin), gradients.query.stride, head.scale);

  // dK = e^(m - G) (e^(G_last - m) V dS^T + dP^T Qa)
  transpose_into(state_gradient, e.columns, values, values, s.turned_state, wide);
  product<T>(s, {s.v, values, 1}, {s.turned_state, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(head, e, count, s.sums, s.out_of, s.wide);
  product<T>(s, {s.dp, 1, kChunk}, {s.qa, wide}, {s.wide, wide}, count, wide, count, true, from_row);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
      const Vec gradient = cpu::load(s.wide + i);
      if (wants_gates) cpu::store(terms + i, cpu::load(terms + i) - cpu::load(s.ka + i) * gradient);
      const Vec whole = gradient + cpu::load(s.qa + i) * diagonal[t];
      cpu::store(s.wide + i, by_column ? whole / cpu::load(s.factors + i) : whole);
    }
  }
  write_rows(s.wide, wide, count, e.columns, row_at<T>(gradients.key, begin), gradients.key.stride, 1.0f);
  gather(s, s.qi, s.d, e, count, has_gates(head), state_gradient);
  if (wants_gates) {
    write_gate_gradients<T>(e, begin, count, state_before, state_gradient, gradients, terms, s.turned, s.turned + wide);
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

#if defined(__AVX512BF16__)
extern const ChunkKernels kBFloat16ChunkKernels = kernels_for<BFloat16>();
#else
extern const ChunkKernels kChunkKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(),
                                                        kernels_for<Float16>()};
#endif

}  // namespace kernel_pytorch::linear_attention::KP_ISA_NAMESPACE
