// New rows of a cache on the lanes of the CPU, built once per instruction level: turned in fp32, divided by the scale
// and rounded once. The bits are the reference's at every level, so sums of the rotation are fused by name.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/paged_attention/append/rows.h"

namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

struct Int8Code {};

template <class T>
void widen_row(const void* from, float* to, int64_t count) {
  const T* source = static_cast<const T*>(from);
  cpu::for_columns<float>(count, [&](int64_t j, auto lanes) {
    if constexpr (__is_same(decltype(lanes), cpu::AllLanes)) {
      cpu::store(to + j, cpu::load(source + j));
    } else {
      cpu::store_partial(to + j, cpu::load_partial(source + j, lanes.count), lanes.count);
    }
  });
}

KP_PRIMITIVE void turn_pair(float& first, float& second, float cosine, float sine) {
  const float a = first, b = second;
  const Vec ones = cpu::fma_once(cpu::broadcast(a), cpu::broadcast(cosine), cpu::broadcast(-(b * sine)));
  const Vec others = cpu::fma_once(cpu::broadcast(b), cpu::broadcast(cosine), cpu::broadcast(a * sine));
  first = ones[0];
  second = others[0];
}

void turn_row(const AppendRow& row, float* values) {
  if (row.interleaved) {
    for (int64_t i = 0; i < row.pairs; ++i) turn_pair(values[2 * i], values[2 * i + 1], row.cos[i], row.sin[i]);
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= row.pairs; i += kLanes) {
    const Vec a = cpu::load(values + i), b = cpu::load(values + row.pairs + i);
    const Vec cosine = cpu::load(row.cos + i), sine = cpu::load(row.sin + i);
    cpu::store(values + i, cpu::fma_once(a, cosine, -(b * sine)));
    cpu::store(values + row.pairs + i, cpu::fma_once(b, cosine, a * sine));
  }
  for (; i < row.pairs; ++i) turn_pair(values[i], values[row.pairs + i], row.cos[i], row.sin[i]);
}

template <class Code, class Lanes>
KP_PRIMITIVE void store_code(void* to, int64_t j, Vec value, Lanes lanes) {
  constexpr bool kIsWhole = __is_same(Lanes, cpu::AllLanes);
  if constexpr (__is_same(Code, Int8Code)) {
    int64_t count = kLanes;
    if constexpr (!kIsWhole) count = lanes.count;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds what is small to a whole number
    Vec limited = cpu::select(value == value, value, Vec{});
    limited = cpu::min(cpu::max(limited, cpu::broadcast(-128.0f)), cpu::broadcast(127.0f));
    const auto whole = __builtin_convertvector((limited + kRound) - kRound, cpu::VecI);
    for (int64_t lane = 0; lane < count; ++lane) static_cast<int8_t*>(to)[j + lane] = static_cast<int8_t>(whole[lane]);
  } else if constexpr (kIsWhole) {
    cpu::store(static_cast<Code*>(to) + j, value);
  } else {
    cpu::store_partial(static_cast<Code*>(to) + j, value, lanes.count);
  }
}

template <class T, class Code>
void write_row(const AppendRow& row) {
  constexpr bool kIsDivided = !__is_same(T, Code);
  const auto write = [&](const auto* values) {
    const auto from = [&](int64_t j, auto lanes) {
      if constexpr (__is_same(decltype(lanes), cpu::AllLanes)) {
        return cpu::load(values + j);
      } else {
        return cpu::load_partial(values + j, lanes.count);
      }
    };
    cpu::for_columns<float>(row.size, [&](int64_t j, auto lanes) {
      Vec value = from(j, lanes);
      if constexpr (kIsDivided) value = value / row.divisor;
      store_code<Code>(row.to, j, value, lanes);
    });
  };
  if (row.cos == nullptr) {
    write(static_cast<const T*>(row.from));
    return;
  }
  widen_row<T>(row.from, row.space, row.size);
  turn_row(row, row.space);
  write(static_cast<const float*>(row.space));
}

template <class T>
constexpr AppendKernels kernels_for() {
  return {{write_row<T, T>, write_row<T, Float8E4M3>, write_row<T, Int8Code>}, widen_row<T>};
}

}  // namespace

extern const AppendKernels kAppendKernels[3] = {kernels_for<float>(), kernels_for<BFloat16>(), kernels_for<Float16>()};

}  // namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE
