// Sums of squares on the lanes of the CPU, built once per instruction level. Squares are taken and summed in double:
// two conversions a vector are hidden behind the memory's time, and no square of a float overflows.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/reduce_norm/reduce_norm_chunk.h"

namespace kernel_pytorch::reduce_norm::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanesOf;
using cpu::VecOf;

KP_WORD cpu::VecD squares_of(cpu::Vec value) {
  const cpu::Pair<cpu::VecD> halves = cpu::to_double(value);
  return halves.low * halves.low + halves.high * halves.high;
}
KP_WORD cpu::VecD squares_of(cpu::VecD value) {
  return value * value;
}

template <class T>
double sum_squares(const void* from, int64_t count) {
  constexpr int kStep = kLanesOf<T>;
  const T* elements = static_cast<const T*>(from);
  cpu::VecD sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    const cpu::PairOf<T> first = cpu::load2_unordered(elements + i);
    const cpu::PairOf<T> second = cpu::load2_unordered(elements + i + 2 * kStep);
    sums[0] += squares_of(first.low);
    sums[1] += squares_of(first.high);
    sums[2] += squares_of(second.low);
    sums[3] += squares_of(second.high);
  }
  for (; i < count; i += kStep) {
    const int64_t left = count - i < kStep ? count - i : kStep;
    sums[0] += squares_of(cpu::load_partial(elements + i, left));
  }
  return cpu::horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

}  // namespace

extern const ChunkKernels kChunkKernels = {
    {sum_squares<float>, sum_squares<double>, sum_squares<BFloat16>, sum_squares<Float16>}};

}  // namespace kernel_pytorch::reduce_norm::KP_ISA_NAMESPACE
