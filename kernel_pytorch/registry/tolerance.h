// How far a kernel may be from the reference: one table by type of the output.
//
//   |value - reference| <= relative * |reference| + absolute * max |reference over the tensor|, and at least `least`
//
// The least is the type's smallest step, which is all that denormal values have of precision.
// The absolute part is for results of cancellation, whose error belongs to the terms and not to the result. An output
// that gathers many terms per element (a weight's gradient over the rows, a statistic over the columns) is summed in
// another order than the reference's, whose error grows like the root of the number of terms.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernel_pytorch/base/dtype.h"

namespace kernel_pytorch::registry {

struct Tolerance {
  double relative = 0;
  double absolute = 0;  // of the largest reference value
  double least = 0;
};

// To what an output is right: to a type's precision (its own, or a coarser one where something on the way is rounded),
// and no closer than a share of the largest value, where the sums themselves are kept short.
struct Precision {
  DType dtype = DType::kFloat32;
  double least_absolute = 0;
};

inline Tolerance tolerance_for(Precision precision, int64_t terms_per_element) {
  constexpr Tolerance kTable[kDTypeCount] = {
      {1e-5, 1e-5, 0x1p-149},       // fp32: sums in fp32
      {1e-10, 1e-10, 0},            // fp64
      {0x1p-7, 0x1p-9, 0x1p-133},   // bf16: one unit in the last place, two where an intermediate is rounded too
      {0x1p-10, 0x1p-12, 0x1p-24},  // fp16
      {0x1p-3, 0x1p-5, 0x1p-9},     // e4m3
      {0x1p-2, 0x1p-4, 0x1p-16},    // e5m2
      {0, 0, 0},                    // int8: exact, as the integers below
      {0, 0, 0},
      {0, 0, 0},
      {0, 0, 0},
  };
  Tolerance tolerance = kTable[static_cast<int>(precision.dtype)];
  if (precision.dtype == DType::kFloat32 || precision.dtype == DType::kFloat64) {
    tolerance.absolute *= std::max(1.0, std::sqrt(static_cast<double>(terms_per_element)) / 32);
  }
  tolerance.absolute = std::max(tolerance.absolute, precision.least_absolute);
  return tolerance;
}

}  // namespace kernel_pytorch::registry
