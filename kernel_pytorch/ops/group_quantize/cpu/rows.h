// What crosses from the host side of the CPU kernels to the code built per instruction level (cpu/isa.h says why): a
// part of a row, as floats, of whole groups but for the row's last.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch::group_quantize {

inline constexpr int64_t kPartColumns = 1024;  // at most: a multiple of every group
inline constexpr int64_t kPartGroups = kPartColumns / 16;

struct QuantizePart {
  const float* values;
  int64_t count, group;
  group_format::ScaleType scale_type;
  float tensor_scale;
  const int64_t* seed;    // with stochastic rounding
  int64_t first_element;  // the place of values[0]
  uint8_t* codes;
  uint8_t* scale_bytes;  // of formats whose scales are bytes
  float* scales;         // of the others
  uint8_t* zeros;        // or null
};
struct DequantizePart {
  const uint8_t* codes;
  int64_t count, group;
  const uint8_t* scale_bytes;
  const float* scales;
  const uint8_t* zeros;  // or null
  float tensor_scale;
  float* values;
};

struct GroupKernels {
  void (*load[3])(const void* from, int64_t count, float* to);            // by type: fp32, bf16, fp16
  void (*store[4])(const float* from, int64_t count, void* to);           // and e4m3
  void (*quantize[group_format::kFormats][2])(const QuantizePart& part);  // to nearest, stochastic
  void (*dequantize[group_format::kFormats])(const DequantizePart& part);
};
KP_EACH_CPU_LEVEL(extern const GroupKernels kGroupKernels;)

}  // namespace kernel_pytorch::group_quantize
