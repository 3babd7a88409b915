// Sums of squares on the lanes of the CPU, built once per instruction level. Lanes sum in float for 32 vectors at most
// and widen to double; a chunk whose squares left the range of float is summed again, all in double.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/reduce_norm/cpu/chunk.h"

namespace kernel_pytorch::reduce_norm::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanesOf;
using cpu::VecOf;

KP_PRIMITIVE cpu::VecD squares_of(cpu::Vec value) {
  const cpu::Pair<cpu::VecD> halves = cpu::to_double(value);
  return halves.low * halves.low + halves.high * halves.high;
}
KP_PRIMITIVE cpu::VecD squares_of(cpu::VecD value) {
  return value * value;
}

template <class T>
KP_PRIMITIVE double sum_in_double(const T* elements, int64_t count) {
  constexpr int kStep = kLanesOf<T>;
  cpu::VecD sum{};
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t left = count - i < kStep ? count - i : kStep;
    sum += squares_of(cpu::load_partial(elements + i, left));
  }
  return cpu::horizontal_sum(sum);
}

template <class T>
KP_PRIMITIVE double sum_in_float(const T* elements, int64_t count) {
  constexpr int64_t kStep = 4 * cpu::kLanes, kStretch = 8 * kStep, kAheadBytes = 2048;
  cpu::VecD sum{};
  int64_t i = 0;
  while (i + kStep <= count) {
    cpu::Vec sums[4] = {};
    const int64_t end = i + kStretch < count ? i + kStretch : count;
    for (; i + kStep <= end; i += kStep) {
      for (int64_t line = 0; line < kStep * static_cast<int64_t>(sizeof(T)); line += 64) {
        cpu::prefetch_near(reinterpret_cast<const char*>(elements + i) + kAheadBytes + line);
      }
      const cpu::PairOf<T> first = cpu::load2_unordered(elements + i);
      const cpu::PairOf<T> second = cpu::load2_unordered(elements + i + kStep / 2);
      sums[0] += first.low * first.low;
      sums[1] += first.high * first.high;
      sums[2] += second.low * second.low;
      sums[3] += second.high * second.high;
    }
    const cpu::Pair<cpu::VecD> halves = cpu::to_double((sums[0] + sums[1]) + (sums[2] + sums[3]));
    sum += halves.low + halves.high;
  }
  return cpu::horizontal_sum(sum) + sum_in_double(elements + i, count - i);
}

template <class T>
double sum_squares(const void* from, int64_t count) {
  const T* elements = static_cast<const T*>(from);
  if constexpr (__is_same(T, double)) {
    return sum_in_double(elements, count);
  } else {
    constexpr double kLeast = 1e-25, kMost = 1e37;  // below, squares may have been lost; above, or NaN, overflowed
    const double sum = sum_in_float(elements, count);
    return sum > kLeast && sum < kMost ? sum : sum_in_double(elements, count);
  }
}

}  // namespace

extern const ChunkKernels kChunkKernels = {
    {sum_squares<float>, sum_squares<double>, sum_squares<BFloat16>, sum_squares<Float16>}};

}  // namespace kernel_pytorch::reduce_norm::KP_ISA_NAMESPACE
