// Each word in the shortest loop that uses it. Tails go through the partial forms, so those are probed everywhere.
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/primitive_probes.h"
#include "kernel_pytorch/cpu/tile_product.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/cpu/vec_philox.h"

namespace kernel_pytorch::cpu_probes::KP_ISA_NAMESPACE {

using namespace cpu;

template <class From, class To>
static void convert(const From* from, To* to, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  store_partial(to + i, load_partial(from + i, count - i), count - i);
}

template <class T>
static void convert_pairs(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) store2(to + i, load2(from + i));
  convert(from + i, to + i, count - i);
}

template <class T>
static void convert_streamed(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) stream2(to + i, load2(from + i));
  for (; i + kLanes <= count; i += kLanes) stream(to + i, load(from + i));
  convert(from + i, to + i, count - i);
  stream_fence();
}

template <class T>
static void copy_partial(const T* from, T* to, int64_t count) {
  store_partial(to, load_partial(from, count), count);
}

template <class T>
static void copy_unordered(const T* from, T* to, int64_t count) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= count / 2; i += 2 * kLanes) store2_unordered(to + i, load2_unordered(from + i));
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) stream2_unordered(to + i, load2_unordered(from + i));
  stream_fence();
}

template <class T>
static TypeProbes<T> type_probes() {
  return {convert<T, float>,   convert<float, T>, convert_pairs<T>,
          convert_streamed<T>, copy_partial<T>,   copy_unordered<T>};
}

#define KP_UNARY_PROBE(word)                                                      \
  static void probe_##word(const float* from, float* to, int64_t count) {         \
    int64_t i = 0;                                                                \
    for (; i + kLanes <= count; i += kLanes) store(to + i, word(load(from + i))); \
    store_partial(to + i, word(load_partial(from + i, count - i)), count - i);    \
  }
KP_UNARY_PROBE(exp)
KP_UNARY_PROBE(exp_fast)
KP_UNARY_PROBE(exp2_fast)
KP_UNARY_PROBE(log)
KP_UNARY_PROBE(tanh)
KP_UNARY_PROBE(erf)
KP_UNARY_PROBE(sigmoid)
KP_UNARY_PROBE(sqrt)
KP_UNARY_PROBE(reciprocal)
KP_PRIMITIVE Vec exp2_for_bfloat16(Vec x) {
  return exp2_rough<8>(x);
}
KP_PRIMITIVE Vec exp2_for_float16(Vec x) {
  return exp2_rough<11>(x);
}
KP_PRIMITIVE Vec sigmoid_for_bfloat16(Vec x) {
  return sigmoid_rough<8>(x);
}
KP_PRIMITIVE Vec sigmoid_for_float16(Vec x) {
  return sigmoid_rough<11>(x);
}
KP_UNARY_PROBE(exp2_for_bfloat16)
KP_UNARY_PROBE(exp2_for_float16)
KP_UNARY_PROBE(sigmoid_for_bfloat16)
KP_UNARY_PROBE(sigmoid_for_float16)
#undef KP_UNARY_PROBE

static void reduce(const float* from, int64_t count, float* sum_and_max) {
  Vec sum = broadcast(0.0f), most = load(from);
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    sum += load(from + i);
    most = max(most, load(from + i));
  }
  sum_and_max[0] = horizontal_sum(sum);
  sum_and_max[1] = horizontal_max(most);
}

static void reduce_double(const double* from, int64_t count, double* sum_max_root) {
  VecD sum = broadcast(0.0), most = load(from);
  for (int64_t i = 0; i + kDoubleLanes <= count; i += kDoubleLanes) {
    sum += load(from + i);
    most = max(most, load(from + i));
  }
  sum_max_root[0] = horizontal_sum(sum);
  sum_max_root[1] = horizontal_max(most);
  sum_max_root[2] = sqrt(abs(load(from)))[0];
}

static double sum_squares_in_double(const float* from, int64_t count) {
  VecD sum = broadcast(0.0);
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) {
    const Pair<VecD> pair = to_double(load(from + i));
    sum = fma(pair.low, pair.low, sum);
    sum = fma(pair.high, pair.high, sum);
  }
  return horizontal_sum(sum);
}

static void round_trip_double(const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) store(to + i, to_float(to_double(load(from + i))));
}

static void minimum(const float* a, const float* b, float* to, int64_t count) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) store(to + i, min(load(a + i), load(b + i)));
}
static void maximum(const float* a, const float* b, float* to, int64_t count) {
  for (int64_t i = 0; i + kLanes <= count; i += kLanes) store(to + i, max(load(a + i), load(b + i)));
}

static int64_t probe_elements_to_alignment(const BFloat16* address, int64_t bytes) {
  return elements_to_alignment(address, bytes);
}

static void probe_philox_blocks(uint64_t seed, uint64_t offset, uint64_t first_block, uint32_t* to) {
  philox_blocks(seed, offset, first_block, to);
}

static void probe_multiply_tile(int vectors, const float* a, int64_t row_stride, int64_t step_stride, const float* b,
                                int64_t b_stride, int64_t steps, float* c, int64_t c_stride, bool add) {
  multiply_tile(vectors, {a, row_stride, step_stride}, {b, b_stride}, steps, {c, c_stride}, add);
}

static void probe_transpose(const float* from, float* to) {
  Vec rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from + i * kLanes);
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) store(to + i * kLanes, rows[i]);
}

PrimitiveProbes primitive_probes() {
  return {kLanes,
          type_probes<BFloat16>(),
          type_probes<Float16>(),
          type_probes<Float8E4M3>(),
          type_probes<Float8E5M2>(),
          type_probes<float>(),
          copy_partial<double>,
          probe_exp,
          probe_exp_fast,
          probe_exp2_fast,
          probe_log,
          probe_tanh,
          probe_erf,
          probe_sigmoid,
          probe_sqrt,
          probe_reciprocal,
          probe_exp2_for_bfloat16,
          probe_exp2_for_float16,
          probe_sigmoid_for_bfloat16,
          probe_sigmoid_for_float16,
          reduce,
          reduce_double,
          sum_squares_in_double,
          round_trip_double,
          minimum,
          maximum,
          probe_elements_to_alignment,
          probe_philox_blocks,
          kTileVectors,
          probe_multiply_tile,
          probe_transpose};
}

}  // namespace kernel_pytorch::cpu_probes::KP_ISA_NAMESPACE
