#include "kernel_pytorch/base/dtype.h"

#include <utility>

namespace kernel_pytorch {
namespace {

constexpr std::string_view kNames[kDTypeCount] = {"fp32", "fp64", "bf16",  "fp16",  "e4m3",
                                                  "e5m2", "int8", "int32", "int64", "bool"};

constexpr std::pair<std::string_view, DType> kAliases[] = {
    {"float32", DType::kFloat32},
    {"float", DType::kFloat32},
    {"float64", DType::kFloat64},
    {"double", DType::kFloat64},
    {"bfloat16", DType::kBFloat16},
    {"float16", DType::kFloat16},
    {"half", DType::kFloat16},
    {"float8_e4m3fn", DType::kFloat8E4M3},
    {"float8_e5m2", DType::kFloat8E5M2},
    {"long", DType::kInt64},
    {"int", DType::kInt32},
};

}  // namespace

std::string_view name_of(DType dtype) {
  return kNames[static_cast<int>(dtype)];
}

std::optional<DType> parse_dtype(std::string_view name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (kNames[i] == name) return static_cast<DType>(i);
  }
  for (const auto& [alias, dtype] : kAliases) {
    if (alias == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace kernel_pytorch
