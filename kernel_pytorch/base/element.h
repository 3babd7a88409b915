// One element of a tensor in host memory, read and written as double. A switch per element: for references, tests and
// anything else that must be plain before it is fast.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/float_types.h"

namespace kernel_pytorch {

inline double load_element(const void* data, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[offset];
    case DType::kFloat64:
      return static_cast<const double*>(data)[offset];
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(data)[offset]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(data)[offset]);
    case DType::kFloat8E4M3:
      return to_float(static_cast<const Float8E4M3*>(data)[offset]);
    case DType::kFloat8E5M2:
      return to_float(static_cast<const Float8E5M2*>(data)[offset]);
    case DType::kInt8:
      return static_cast<const int8_t*>(data)[offset];
    case DType::kInt32:
      return static_cast<const int32_t*>(data)[offset];
    case DType::kInt64:
      return static_cast<double>(static_cast<const int64_t*>(data)[offset]);
    case DType::kBool:
      return static_cast<const bool*>(data)[offset] ? 1 : 0;
  }
  fail(ErrorCode::kInternal, "load_element: unknown dtype ", static_cast<int>(dtype));
}

inline void store_element(void* data, DType dtype, int64_t offset, double value) {
  const float single = static_cast<float>(value);
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[offset] = single;
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[offset] = value;
      return;
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[offset] = from_float<BFloat16>(single);
      return;
    case DType::kFloat16:
      static_cast<Float16*>(data)[offset] = from_float<Float16>(single);
      return;
    case DType::kFloat8E4M3:
      static_cast<Float8E4M3*>(data)[offset] = from_float<Float8E4M3>(single);
      return;
    case DType::kFloat8E5M2:
      static_cast<Float8E5M2*>(data)[offset] = from_float<Float8E5M2>(single);
      return;
    case DType::kInt8:
      static_cast<int8_t*>(data)[offset] = static_cast<int8_t>(value);
      return;
    case DType::kInt32:
      static_cast<int32_t*>(data)[offset] = static_cast<int32_t>(value);
      return;
    case DType::kInt64:
      static_cast<int64_t*>(data)[offset] = static_cast<int64_t>(value);
      return;
    case DType::kBool:
      static_cast<bool*>(data)[offset] = value != 0;
      return;
  }
  fail(ErrorCode::kInternal, "store_element: unknown dtype ", static_cast<int>(dtype));
}

}  // namespace kernel_pytorch
