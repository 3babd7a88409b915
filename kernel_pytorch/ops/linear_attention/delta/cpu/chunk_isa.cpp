// kp-isa: v2 v3 v4 v4bf16 neon sve256
// One chunk of one head of the delta rule on the lanes of the CPU, and the same token by token. Built once per
// instruction level.
#include "kernel_pytorch/ops/linear_attention/delta/cpu/chunk.h"

#include "kernel_pytorch/ops/linear_attention/cpu/chunk_gates.h"

namespace kernel_pytorch::linear_attention::delta::KP_ISA_NAMESPACE {
namespace {

using namespace linear_attention::KP_ISA_NAMESPACE;  // NOLINT: the parts of chunks

constexpr float kEpsilon = 1e-6f;

struct DeltaSpace : Space {
  float *n, *ng, *a, *w, *u, *dw, *da, *terms, *other, *inverse_query, *inverse_key, *beta, *row;
};
int64_t place_delta(const Extent& e, float* base, DeltaSpace* space) {
  int64_t used = place(e, base, space);
  const auto take = [&](float*& part, int64_t count) {
    if (base != nullptr) part = base + used;
    used += padded(count + kTileRows, kLanes);
  };
  DeltaSpace unused{};
  DeltaSpace& s = space != nullptr ? *space : unused;
  const int64_t c = kChunk, k = e.wide_columns, v = e.wide_values;
  take(s.n, c * k), take(s.ng, c * k), take(s.a, c * c), take(s.w, c * v), take(s.u, c * v), take(s.dw, c * v);
  take(s.da, c * c), take(s.terms, c * k), take(s.other, c * k);
  take(s.inverse_query, c), take(s.inverse_key, c), take(s.beta, c), take(s.row, 2 * k);
  return used;
}
int64_t workspace_floats(int64_t columns, int64_t values) {
  return place_delta(extent_of(columns, values), nullptr, nullptr);
}

KP_PRIMITIVE float dot(const float* one, const float* other, int64_t wide) {
  Vec sum{};
  for (int64_t i = 0; i < wide; i += kLanes) sum += cpu::load(one + i) * cpu::load(other + i);
  return cpu::horizontal_sum(sum);
}
KP_PRIMITIVE float inverse_norm(const float* row, int64_t wide) {
  return 1.0f / __builtin_sqrtf(dot(row, row, wide) + kEpsilon);
}
// rows[t] *= factor / its norm, which is kept.
KP_PRIMITIVE void normalize(float* rows, int64_t count, int64_t wide, float factor, float* inverses) {
  for (int64_t t = 0; t < count; ++t) {
    float* row = rows + t * wide;
    inverses[t] = inverse_norm(row, wide);
    for (int64_t i = 0; i < wide; i += kLanes) cpu::store(row + i, cpu::load(row + i) * (inverses[t] * factor));
  }
}

// Qa, Ka, Qi, Ki, N, Ng and beta of a chunk.
template <class T>
void prepare(const DeltaHead& head, const Extent& e, int64_t begin, int64_t count, const DeltaSpace& s) {
  const int64_t wide = e.wide_columns;
  const float factor = head.normalizes ? 1.0f : head.scale;
  read_rows(row_at<const T>(head.query, begin), head.query.stride, count, e.columns, wide, factor, s.qa);
  read_rows(row_at<const T>(head.key, begin), head.key.stride, count, e.columns, wide, 1.0f, s.ka);
  if (head.normalizes) {
    normalize(s.qa, count, wide, head.scale, s.inverse_query);
    normalize(s.ka, count, wide, 1.0f, s.inverse_key);
  }
  for (int64_t i = 0; i < kChunk * wide; i += kLanes) cpu::store(s.n + i, -cpu::load(s.ka + i));
  for (int64_t t = 0; t < count; ++t) s.beta[t] = element_at<T>(head.beta, begin + t);
  apply_gates<T>(head, e, begin, count, s);
  if (head.channel_gate.data == nullptr) {
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) cpu::store(s.ng + i, cpu::load(s.n + i) * s.into[t]);
    }
    return;
  }
  for (int64_t i = 0; i < wide; i += kLanes) {
    const Vec before = cpu::exp(cpu::load(s.middle + i));
    for (int64_t t = 0; t < count; ++t) {
      const Vec row = cpu::load(s.n + t * wide + i) * cpu::load(s.factors + t * wide + i);
      cpu::store(s.n + t * wide + i, row);
      cpu::store(s.ng + t * wide + i, row * before);
    }
  }
}

KP_PRIMITIVE void add_row(float factor, const float* from, int64_t wide, float* to) {
  for (int64_t j = 0; j < wide; j += kLanes) cpu::store(to + j, cpu::load(to + j) + cpu::load(from + j) * factor);
}
KP_PRIMITIVE void scale_row(float factor, const float* from, int64_t wide, float* to) {
  for (int64_t j = 0; j < wide; j += kLanes) cpu::store(to + j, cpu::load(from + j) * factor);
}

// A of a chunk, W and U: a tile's rows take what the tiles above give by one product, and then one another's.
template <class T>
void solve(const DeltaHead& head, const Extent& e, int64_t begin, int64_t count, const float* state,
           const DeltaSpace& s) {
  const int64_t wide = e.wide_columns, values = e.wide_values;
  transpose_into(s.ka, kChunk, wide, wide, s.turned, kChunk);
  triangle<float>(s, s.n, wide, s.turned, e.columns, count, s.a);  // errors would go through the system
  mask(head, count, s, s.a, 1);
  read_rows(row_at<const T>(head.value, begin), head.value.stride, count, e.values, values, 1.0f, s.w);
  product<float>(s, {s.ng, wide, 1}, {state, values}, {s.w, values}, count, values, e.columns, true);
  for (int64_t first = 0; first < count; first += kTileRows) {
    const int64_t last = first + kTileRows < count ? first + kTileRows : count;
    if (first > 0) {
      product<float>(s, {s.a + first * kChunk, kChunk, 1}, {s.u, values}, {s.w + first * values, values}, last - first,
                     values, first, true);
    }
    for (int64_t t = first; t < last; ++t) {
      for (int64_t other = first; other < t; ++other) {
        add_row(s.a[t * kChunk + other], s.u + other * values, values, s.w + t * values);
      }
      scale_row(s.beta[t], s.w + t * values, values, s.u + t * values);
    }
  }
}

template <class T>
void advance(const DeltaHead& head, int64_t begin, int64_t end, float* state, const Rows& output, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t count = end - begin, wide = e.wide_columns, values = e.wide_values;
  DeltaSpace s{};
  place_delta(e, workspace, &s);
  prepare<T>(head, e, begin, count, s);
  solve<T>(head, e, begin, count, state, s);
  if (output.data != nullptr) {
    triangle<T>(s, s.qa, wide, s.turned, e.columns, count, s.p);
    mask(head, count, s, s.p);
    product<T>(s, {s.qi, wide, 1}, {state, values}, {s.result, values}, count, values, e.columns, false);
    product<T>(s, {s.p, kChunk, 1}, {s.u, values}, {s.result, values}, count, values, count, true,
               [=](int64_t i, int64_t) {
                 return Steps{0, i + kTileRows < count ? i + kTileRows : count};
               });
    write_rows(s.result, values, count, e.values, row_at<T>(output, begin), output.stride, 1.0f);
  }
  gather(s, s.ki, s.u, e, count, has_gates(head), state);
}

// So many values of a state go through all tokens before the next ones do, in a cache's innermost level.
constexpr int64_t kPanel = cpu::kTileColumns;

int64_t step_floats(int64_t columns) {
  return 3 * padded(columns, kLanes) + columns * kPanel;
}

template <class T>
void step(const DeltaHead& head, int64_t begin, int64_t end, const float* from, float* to, const Rows& output,
          float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t wide = e.wide_columns;
  float *query = workspace, *key = query + wide, *kept = key + wide, *panel = kept + wide;
  const bool gates = has_gates(head);
  for (int64_t first = 0; first < e.values; first += kPanel) {
    const int64_t here = e.values - first < kPanel ? e.values - first : kPanel;
    for (int64_t i = 0; i < e.columns; ++i) {
      for (int64_t j = 0; j < kPanel; j += kLanes) {
        const int64_t left = here - j < kLanes ? here - j : kLanes;
        Vec old{};
        if (from != nullptr && left > 0) old = cpu::load_partial(from + i * e.values + first + j, left);
        cpu::store(panel + i * kPanel + j, old);
      }
    }
    for (int64_t token = begin; token < end; ++token) {
      read_row(row_at<const T>(head.query, token), e.columns, wide, head.normalizes ? 1.0f : head.scale, query);
      read_row(row_at<const T>(head.key, token), e.columns, wide, 1.0f, key);
      if (head.normalizes) {
        scale_row(head.scale * inverse_norm(query, wide), query, wide, query);
        scale_row(inverse_norm(key, wide), key, wide, key);
      }
      if (gates) read_factors<T>(head, e, token, kept);
      Vec error[cpu::kTileVectors], result[cpu::kTileVectors];
      const T* value = row_at<const T>(head.value, token) + first;
#pragma GCC unroll 4
      for (int v = 0; v < cpu::kTileVectors; ++v) {
        const int64_t left = here - v * kLanes < kLanes ? here - v * kLanes : kLanes;
        error[v] = left > 0 ? cpu::load_partial(value + v * kLanes, left) : Vec{};
        result[v] = Vec{};
      }
      for (int64_t i = 0; i < e.columns; ++i) {
        float* row = panel + i * kPanel;
        const Vec factor = cpu::broadcast(gates ? kept[i] : 1.0f), k = cpu::broadcast(key[i]);
#pragma GCC unroll 4
        for (int v = 0; v < cpu::kTileVectors; ++v) {
          const Vec decayed = cpu::load(row + v * kLanes) * factor;
          cpu::store(row + v * kLanes, decayed);
          error[v] -= decayed * k;
        }
      }
      const Vec beta = cpu::broadcast(element_at<T>(head.beta, token));
#pragma GCC unroll 4
      for (int v = 0; v < cpu::kTileVectors; ++v) error[v] = error[v] * beta;
      for (int64_t i = 0; i < e.columns; ++i) {
        float* row = panel + i * kPanel;
        const Vec q = cpu::broadcast(query[i]), k = cpu::broadcast(key[i]);
#pragma GCC unroll 4
        for (int v = 0; v < cpu::kTileVectors; ++v) {
          const Vec next = cpu::load(row + v * kLanes) + error[v] * k;
          cpu::store(row + v * kLanes, next);
          result[v] += next * q;
        }
      }
      T* out = row_at<T>(output, token) + first;
#pragma GCC unroll 4
      for (int v = 0; v < cpu::kTileVectors; ++v) {
        const int64_t left = here - v * kLanes < kLanes ? here - v * kLanes : kLanes;
        if (left > 0) cpu::store_partial(out + v * kLanes, result[v], left);
      }
    }
    for (int64_t i = 0; to != nullptr && i < e.columns; ++i) {
      for (int64_t j = 0; j < here; j += kLanes) {
        const int64_t left = here - j < kLanes ? here - j : kLanes;
        cpu::store_partial(to + i * e.values + first + j, cpu::load(panel + i * kPanel + j), left);
      }
    }
  }
}

// The gradient of rows before their normalisation and scaling, of `gradient` behind them.
template <class T>
void write_gradient(const float* gradient, const Rows& from, const float* inverses, bool normalizes, const Extent& e,
                    int64_t begin, int64_t count, float factor, const Rows& to, float* row) {
  const int64_t wide = e.wide_columns;
  if (!normalizes) return write_rows(gradient, wide, count, e.columns, row_at<T>(to, begin), to.stride, factor);
  for (int64_t t = 0; t < count; ++t) {
    const float* given = gradient + t * wide;
    read_row(row_at<const T>(from, begin + t), e.columns, wide, inverses[t], row);
    const float along = dot(row, given, wide);
    for (int64_t i = 0; i < wide; i += kLanes) {
      cpu::store(row + i, (cpu::load(given + i) - cpu::load(row + i) * along) * inverses[t]);
    }
    write_rows(row, wide, 1, e.columns, row_at<T>(to, begin + t), 0, factor);
  }
}

template <class T>
void differentiate(const DeltaHead& head, int64_t begin, int64_t end, const float* state_before, float* state_gradient,
                   const DeltaGradients& gradients, float* workspace) {
  const Extent e = extent_of(head.columns, head.values);
  const int64_t count = end - begin, wide = e.wide_columns, values = e.wide_values;
  const bool by_column = head.channel_gate.data != nullptr;
  DeltaSpace s{};
  place_delta(e, workspace, &s);
  prepare<T>(head, e, begin, count, s);
  solve<T>(head, e, begin, count, state_before, s);
  triangle<T>(s, s.qa, wide, s.turned, e.columns, count, s.p);
  mask(head, count, s, s.p);
  read_rows(row_at<const T>(head.grad_output, begin), head.grad_output.stride, count, e.values, values, 1.0f, s.d);
  const auto from_row = [=](int64_t i, int64_t) { return Steps{i, count}; };
  const auto to_row = [=](int64_t i, int64_t) { return Steps{0, i + kTileRows < count ? i + kTileRows : count}; };

  // dU = P^T dO + Ki dS, then what later tokens add: dU += A^T dW, dW = beta dU, from the last tile back.
  product<T>(s, {s.ki, wide, 1}, {state_gradient, values}, {s.result, values}, count, values, e.columns, false);
  product<T>(s, {s.p, 1, kChunk}, {s.d, values}, {s.result, values}, count, values, count, true, from_row);
  for (int64_t first = (count - 1) / kTileRows * kTileRows; first >= 0; first -= kTileRows) {
    const int64_t last = first + kTileRows < count ? first + kTileRows : count;
    if (last < count) {
      product<float>(s, {s.a + last * kChunk + first, 1, kChunk}, {s.dw + last * values, values},
                     {s.result + first * values, values}, last - first, values, count - last, true);
    }
    for (int64_t t = last - 1; t >= first; --t) {
      float* du = s.result + t * values;
      for (int64_t later = t + 1; later < last; ++later) {
        add_row(s.a[later * kChunk + t], s.dw + later * values, values, du);
      }
      scale_row(s.beta[t], du, values, s.dw + t * values);
      const float grad_beta = dot(du, s.w + t * values, values);
      if (gradients.beta.is_float) {
        *row_at<float>(gradients.beta, begin + t) = grad_beta;
      } else {
        *row_at<T>(gradients.beta, begin + t) = from_float<T>(grad_beta);
      }
    }
  }
  write_rows(s.dw, values, count, e.values, row_at<T>(gradients.value, begin), gradients.value.stride, 1.0f);
  for (int64_t i = count * values; i < kChunk * values; i += kLanes) cpu::store(s.u + i, Vec{});

  // dP = dO U^T, and dW U^T, which is the gradient of A without its sign.
  transpose_into(s.u, kChunk, values, values, s.turned, kChunk);
  triangle<T>(s, s.d, values, s.turned, e.values, count, s.dp);
  mask(head, count, s, s.dp);
  triangle<T>(s, s.dw, values, s.turned, e.values, count, s.da);
  mask(head, count, s, s.da, 1);
  if (by_column) {
    for (int64_t i = 0; i < wide; i += kLanes) {
      const Vec middle = cpu::load(s.middle + i);
      cpu::store(s.middle + i, cpu::exp(middle));
      cpu::store(s.sums + i, cpu::exp(cpu::load(s.last + i) - middle));  // sums are not read again by columns
    }
  }
  float* diagonal = s.p;  // not needed any more
  take_diagonal(s.dp, count, diagonal);
  transpose_into(state_before, e.columns, values, values, s.turned_state, wide);

  // dQ = e^(G - m) (e^m dO S^T + dP Ka); terms of the gates' gradient begin with q dq.
  product<T>(s, {s.d, values, 1}, {s.turned_state, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(head, e, count, s.middle, s.into, s.wide);
  product<T>(s, {s.dp, kChunk, 1}, {s.ka, wide}, {s.wide, wide}, count, wide, count, true, to_row);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
      const Vec gradient = cpu::load(s.wide + i), whole = gradient + cpu::load(s.ka + i) * diagonal[t];
      cpu::store(s.terms + i, cpu::load(s.qa + i) * gradient);
      cpu::store(s.wide + i, by_column ? whole * cpu::load(s.factors + i) : whole);
    }
  }
  write_gradient<T>(s.wide, head.query, s.inverse_query, head.normalizes, e, begin, count, head.scale, gradients.query,
                    s.row);

  // The key that reads the state: -e^(G - m) (e^m dW S^T + (dW U^T) Ka).
  product<T>(s, {s.dw, values, 1}, {s.turned_state, wide}, {s.other, wide}, count, wide, e.values, false);
  scale_share(head, e, count, s.middle, s.into, s.other);
  product<T>(s, {s.da, kChunk, 1}, {s.ka, wide}, {s.other, wide}, count, wide, count, true, to_row);
  // The key that is written: e^(m - G) (e^(G_last - m) U dS^T + dP^T Qa + (dW U^T)^T N).
  transpose_into(state_gradient, e.columns, values, values, s.turned_state, wide);
  product<T>(s, {s.u, values, 1}, {s.turned_state, wide}, {s.wide, wide}, count, wide, e.values, false);
  scale_share(head, e, count, s.sums, s.out_of, s.wide);
  product<T>(s, {s.dp, 1, kChunk}, {s.qa, wide}, {s.wide, wide}, count, wide, count, true, from_row);
  product<T>(s, {s.da, 1, kChunk}, {s.n, wide}, {s.wide, wide}, count, wide, count, true, from_row);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t i = t * wide; i < (t + 1) * wide; i += kLanes) {
      const Vec reads = cpu::load(s.other + i), written = cpu::load(s.wide + i);
      cpu::store(s.terms + i, cpu::load(s.terms + i) + cpu::load(s.n + i) * reads - cpu::load(s.ka + i) * written);
      const Vec whole = written + cpu::load(s.qa + i) * diagonal[t];
      const Vec factor = by_column ? cpu::load(s.factors + i) : cpu::broadcast(1.0f);
      cpu::store(s.wide + i, whole / factor - reads * factor);
    }
  }
  write_gradient<T>(s.wide, head.key, s.inverse_key, head.normalizes, e, begin, count, 1.0f, gradients.key, s.row);
  gather(s, s.qi, s.d, e, count, has_gates(head), state_gradient);
  gather(s, s.ng, s.dw, e, count, false, state_gradient);
  if (gradients.gate.data != nullptr || gradients.channel_gate.data != nullptr) {
    write_gate_gradients<T>(e, begin, count, state_before, state_gradient, gradients, s.terms, s.row, s.row + wide);
  }
}

template <class T>
constexpr DeltaKernels kernels_for() {
  return {workspace_floats, step_floats, state_floats, read_state,      write_state,
          chunk_end<T>,     advance<T>,  step<T>,      differentiate<T>};
}

}  // namespace

#if defined(__AVX512BF16__)
extern const DeltaKernels kBFloat16DeltaKernels = kernels_for<BFloat16>();
#else
extern const DeltaKernels kDeltaKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(),
                                                        kernels_for<Float16>()};
#endif

}  // namespace kernel_pytorch::linear_attention::delta::KP_ISA_NAMESPACE
