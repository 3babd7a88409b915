// Rotation of the heads of one token on the lanes of the CPU, built once per instruction level. The cos and sin of the
// token are read by all heads from the nearest cache.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/columns.h"
#include "kernel_pytorch/ops/rope/cpu/rows.h"

namespace kernel_pytorch::rope::KP_ISA_NAMESPACE {
namespace {

using cpu::AllLanes;
using cpu::kLanes;
using cpu::SomeLanes;
using cpu::Vec;

template <class T>
KP_PRIMITIVE void write_pair(T* to, cpu::PairOf<T> pair, bool stream) {
  if (stream) {
    cpu::stream2(to, pair);
  } else {
    cpu::store2(to, pair);
  }
}

struct Rotated {
  Vec first, second;
};
KP_PRIMITIVE Rotated rotate_pair(Vec first, Vec second, Vec cosine, Vec sine) {
  return {first * cosine - second * sine, second * cosine + first * sine};
}

template <class T, class Lanes>
KP_PRIMITIVE Rotated rotate_split_pairs(const T* input, const HeadRows& rows, int64_t i, Lanes lanes) {
  return rotate_pair(cpu::load(input + i, lanes), cpu::load(input + rows.pairs + i, lanes),
                     cpu::load(rows.cos + i, lanes), cpu::load(rows.sin + i, lanes));
}

template <class T>
KP_PRIMITIVE void rotate_split_head(const T* input, T* output, const HeadRows& rows) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= rows.pairs; i += 2 * kLanes) {
    const Rotated low = rotate_split_pairs(input, rows, i, AllLanes());
    const Rotated high = rotate_split_pairs(input, rows, i + kLanes, AllLanes());
    write_pair<T>(output + i, {low.first, high.first}, rows.stream_stores);
    write_pair<T>(output + rows.pairs + i, {low.second, high.second}, rows.stream_stores);
  }
  for (; i < rows.pairs; i += kLanes) {
    const SomeLanes rest{static_cast<int>(rows.pairs - i < kLanes ? rows.pairs - i : kLanes)};
    const Rotated last = rotate_split_pairs(input, rows, i, rest);
    cpu::store(output + i, last.first, rest);
    cpu::store(output + rows.pairs + i, last.second, rest);
  }
}

// The even and the odd elements of two vectors, and the vectors they came from.
#if KP_LANES == 16
#define KP_EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define KP_ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define KP_LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define KP_UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif KP_LANES == 8
#define KP_EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define KP_ODD 1, 3, 5, 7, 9, 11, 13, 15
#define KP_LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define KP_UPPER 4, 12, 5, 13, 6, 14, 7, 15
#else
#define KP_EVEN 0, 2, 4, 6
#define KP_ODD 1, 3, 5, 7
#define KP_LOWER 0, 4, 1, 5
#define KP_UPPER 2, 6, 3, 7
#endif

template <class T>
KP_PRIMITIVE void rotate_interleaved_head(const T* input, T* output, const HeadRows& rows) {
  int64_t i = 0;
  for (; i + kLanes <= rows.pairs; i += kLanes) {
    const cpu::PairOf<T> loaded = cpu::load2(input + 2 * i);
    const Rotated rotated = rotate_pair(__builtin_shufflevector(loaded.low, loaded.high, KP_EVEN),
                                        __builtin_shufflevector(loaded.low, loaded.high, KP_ODD),
                                        cpu::load(rows.cos + i), cpu::load(rows.sin + i));
    write_pair<T>(output + 2 * i,
                  {__builtin_shufflevector(rotated.first, rotated.second, KP_LOWER),
                   __builtin_shufflevector(rotated.first, rotated.second, KP_UPPER)},
                  rows.stream_stores);
  }
  for (; i < rows.pairs; ++i) {
    const float first = to_float(input[2 * i]), second = to_float(input[2 * i + 1]);
    output[2 * i] = from_float<T>(first * rows.cos[i] - second * rows.sin[i]);
    output[2 * i + 1] = from_float<T>(second * rows.cos[i] + first * rows.sin[i]);
  }
}

template <class T>
void rotate(const HeadRows& rows) {
  for (int64_t head = 0; head < rows.heads; ++head) {
    const T* input = static_cast<const T*>(rows.input) + head * rows.input_stride_elements;
    T* output = static_cast<T*>(rows.output) + head * rows.output_stride_elements;
    if (rows.interleaved) {
      rotate_interleaved_head(input, output, rows);
    } else {
      rotate_split_head(input, output, rows);
    }
    if (!rows.copies_rest) continue;
    cpu::for_columns<T>(rows.head_dim - 2 * rows.pairs, [&](int64_t j, auto lanes) {
      cpu::store(output + 2 * rows.pairs + j, cpu::load(input + 2 * rows.pairs + j, lanes), lanes);
    });
  }
}

template <class T>
void widen(const void* from, float* to, int64_t count) {
  const T* source = static_cast<const T*>(from);
  cpu::for_columns<T>(count, [&](int64_t j, auto lanes) { cpu::store(to + j, cpu::load(source + j, lanes), lanes); });
}

void fence() {
  cpu::stream_fence();
}

}  // namespace

RowKernels row_kernels(int type) {
  constexpr RowKernels kKernels[kTypesCount] = {{rotate<float>, widen<float>, fence},
                                                {rotate<BFloat16>, widen<BFloat16>, fence},
                                                {rotate<Float16>, widen<Float16>, fence}};
  return kKernels[type];
}

}  // namespace kernel_pytorch::rope::KP_ISA_NAMESPACE
