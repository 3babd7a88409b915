// A row of a tile on the lanes of the CPU, built once per instruction level: its magnitudes, and its codes.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/ops/quantize/cpu/rows.h"

namespace kernel_pytorch::quantize::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::VecU;

template <class T>
uint32_t measure(const void* from, int64_t count, uint32_t* columns, bool* found_nonfinite) {
  const T* row = static_cast<const T*>(from);
  const VecU infinity = cpu::broadcast(0x7f800000u);
  VecU largest = {}, any = {};
  const auto step = [&](int64_t j, Vec value, int64_t lanes) {
    const VecU bits = cpu::bits_of(value) & 0x7fffffffu;
    const VecU finite = cpu::select(bits < infinity, bits, VecU{});
    any |= bits ^ finite;
    largest = cpu::max(largest, finite);
    if (lanes == kLanes) {
      cpu::store_storage(columns + j, cpu::max(cpu::load_storage<VecU>(columns + j), finite));
    } else {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        columns[j + lane] = columns[j + lane] > finite[lane] ? columns[j + lane] : finite[lane];
      }
    }
  };
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) step(j, cpu::load(row + j), kLanes);
  if (j < count) step(j, cpu::load_partial(row + j, count - j), count - j);
  uint32_t result = 0, others = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result = result > largest[lane] ? result : largest[lane];
    others |= any[lane];
  }
  if (others != 0) *found_nonfinite = true;
  return result;
}

template <class T, class Code>
void cast(const void* from, int64_t count, float inverse, const float* inverses, uint8_t* codes) {
  const T* row = static_cast<const T*>(from);
  auto* to = reinterpret_cast<Code*>(codes);
  int64_t j = 0;
  if (inverses == nullptr) {
    for (; j + kLanes <= count; j += kLanes) cpu::store(to + j, cpu::load(row + j) * inverse);
    if (j < count) cpu::store_partial(to + j, cpu::load_partial(row + j, count - j) * inverse, count - j);
    return;
  }
  for (; j + kLanes <= count; j += kLanes) cpu::store(to + j, cpu::load(row + j) * cpu::load(inverses + j));
  if (j < count) {
    cpu::store_partial(to + j, cpu::load_partial(row + j, count - j) * cpu::load_partial(inverses + j, count - j),
                       count - j);
  }
}

template <class T>
constexpr RowKernels kernels_for() {
  return {measure<T>, {cast<T, Float8E4M3>, cast<T, Float8E5M2>}};
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {kernels_for<float>(), kernels_for<BFloat16>(),
                                                    kernels_for<Float16>()};

}  // namespace kernel_pytorch::quantize::KP_ISA_NAMESPACE
