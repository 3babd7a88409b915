#include "kernel_pytorch/ops/support/cuda_support.h"

#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch {
namespace {

constexpr const char* kManyLeading = "rows are not evenly spaced in memory: their leading dimensions do not merge";
constexpr const char* kStridedColumns = "columns are not contiguous";
constexpr const char* kMisaligned = "rows do not start at multiples of 16 bytes";
constexpr const char* kRaggedColumns = "the row is not a multiple of 16 bytes long";
constexpr const char* kParameterMisaligned = "weight or bias does not start at a multiple of 16 bytes";

}  // namespace

CUkern_st* load_kernel(const DeviceCode& code, const Context& context) {
  return jit::get_kernel(code, *context.info, context.stream);
}

std::string_view bool_name(bool value) {
  return value ? "true" : "false";
}

std::string_view element_type_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "kernel_pytorch::tile::BFloat16";
    case DType::kFloat16:
      return "kernel_pytorch::tile::Float16";
    case DType::kFloat8E4M3:
      return "kernel_pytorch::tile::Float8E4M3";
    default:
      return "float";
  }
}

const char* vector_access_obstacle(const TensorView& view) {
  if (!view.is_present()) return nullptr;
  if (view.rank != 2) return kManyLeading;
  if (view.strides[1] != 1 && view.sizes[1] > 1) return kStridedColumns;
  if (view.sizes[1] * size_of(view.dtype) % kVectorBytes != 0) return kRaggedColumns;
  return has_aligned_rows(view) ? nullptr : kMisaligned;
}

const char* parameter_obstacle(const TensorView& parameter) {
  if (!parameter.is_present()) return nullptr;
  if (parameter.sizes[0] > 1 && parameter.strides[0] != 1) return kStridedColumns;
  return is_aligned(parameter, kVectorBytes) ? nullptr : kParameterMisaligned;
}

}  // namespace kernel_pytorch
