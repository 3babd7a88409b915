// Element types of tensors: their names, sizes and parsing.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string_view>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,
  kFloat8E5M2,
  kInt8,
  kInt32,
  kInt64,
  kBool
};
inline constexpr int kDTypeCount = 10;

constexpr int64_t size_of(DType dtype) {
  constexpr int64_t kSizes[kDTypeCount] = {4, 8, 2, 2, 1, 1, 1, 4, 8, 1};
  return kSizes[static_cast<int>(dtype)];
}

constexpr bool is_floating(DType dtype) {
  return dtype <= DType::kFloat8E5M2;
}

KP_EXPORT std::string_view name_of(DType dtype);  // "fp32", "bf16", "e4m3", "int64", ...
KP_EXPORT std::optional<DType> parse_dtype(
    std::string_view name);  // the names above and torch's ("float32", "half", ...)

inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  return out << name_of(dtype);
}

}  // namespace kernel_pytorch
