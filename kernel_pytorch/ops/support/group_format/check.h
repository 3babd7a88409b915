// What the host sides of ops on matrices in few bits (ops/support/group_format/format_cuda.h) share: checks, types of
// scales.
#pragma once

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/ops/support/group_format/format_cuda.h"

namespace kernel_pytorch {

namespace group_format {

inline ScaleType scale_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return ScaleType::kE4M3;
    case DType::kInt8:
      return ScaleType::kE8M0;
    case DType::kBFloat16:
      return ScaleType::kBFloat16;
    case DType::kFloat16:
      return ScaleType::kFloat16;
    default:
      return ScaleType::kFloat32;
  }
}

}  // namespace group_format

struct GroupFormatCheck {
  std::string_view op;
  Device device;
  group_format::Format format;
  int64_t group;

  static std::string_view name_of(group_format::Format format) {
    constexpr std::string_view kNames[] = {"nvfp4", "mxfp4", "mxfp8", "int4", "int8", "int2", "int3", "int5", "int6"};
    return kNames[static_cast<int>(format)];
  }

  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }
  static bool is_float(DType dtype) {
    return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  }
  void check_float_matrix(std::string_view name, const TensorView& view) const {
    check_device(name, view);
    KP_CHECK(is_float(view.dtype), op, ": ", name, " is ", view.dtype, "; convert it to fp32, bf16 or fp16");
    check_rows(name, view);
  }
  void check_output_matrix(const TensorView& view) const {
    check_device("output", view);
    KP_CHECK(is_float(view.dtype) || view.dtype == DType::kFloat8E4M3, op, ": output is ", view.dtype,
             "; it must be fp32, bf16, fp16 or e4m3");
    check_rows("output", view);
  }
  void check_rows(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.rank == 2 && (view.sizes[1] <= 1 || view.strides[1] == 1 || view.element_count() == 0), op, ": ",
             name, " has shape ", shape_text(view.shape()), " and strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}),
             "; it must be a matrix whose last dimension is dense");
  }

  // Codes, scales and zeros of a matrix [rows, columns].
  void check_matrix(const TensorView& codes, const TensorView& scales, const TensorView& zeros,
                    const TensorView& tensor_scale, int64_t rows, int64_t columns) const {
    KP_CHECK(static_cast<int>(format) < group_format::kFormats, op, ": format is number ", static_cast<int>(format),
             "; there are ", group_format::kFormats);
    const bool is_integer = group_format::is_integer(format), is_nvfp4 = format == group_format::Format::kNvfp4;
    KP_CHECK(group_format::is_legal_group(format, group), op, ": group is ", group, " with format ", name_of(format),
             "; it must be ",
             is_integer ? "32, 64 or 128"
             : is_nvfp4 ? "16"
                        : "32");
    check_bytes("codes", codes, rows, group_format::code_bytes(format, columns));
    const int64_t groups = (columns + group - 1) / group;
    check_device("scales", scales);
    const bool has_scale_type = is_nvfp4     ? scales.dtype == DType::kFloat8E4M3
                                : is_integer ? scales.dtype == DType::kBFloat16 || scales.dtype == DType::kFloat16 ||
                                                   scales.dtype == DType::kFloat32
                                             : scales.dtype == DType::kInt8;
    KP_CHECK(has_scale_type, op, ": scales are ", scales.dtype, " with format ", name_of(format), "; they must be ",
             is_nvfp4     ? "e4m3"
             : is_integer ? "bf16, fp16 or fp32"
                          : "int8, the bytes of E8M0");
    check_shape("scales", scales, rows, groups);
    if (zeros.is_present()) {
      KP_CHECK(is_integer, op, ": zeros are given with format ", name_of(format), "; they are for integers");
      check_bytes("zeros", zeros, rows, groups);
    }
    if (!tensor_scale.is_present()) return;
    check_device("tensor_scale", tensor_scale);
    KP_CHECK(is_nvfp4 && tensor_scale.dtype == DType::kFloat32 && tensor_scale.element_count() == 1, op,
             ": tensor_scale is ", tensor_scale, " with format ", name_of(format),
             "; it must be fp32 with one element, and is for nvfp4");
  }

 private:
  void check_bytes(std::string_view name, const TensorView& view, int64_t rows, int64_t columns) const {
    check_device(name, view);
    KP_CHECK(view.dtype == DType::kInt8, op, ": ", name, " are ", view.dtype, "; they must be int8, which holds bytes");
    check_shape(name, view, rows, columns);
  }
  void check_shape(std::string_view name, const TensorView& view, int64_t rows, int64_t columns) const {
    KP_CHECK(view.rank == 2 && view.sizes[0] == rows && view.sizes[1] == columns && is_contiguous(view), op, ": ", name,
             " have shape ", shape_text(view.shape()), "; for format ", name_of(format), ", group ", group, " and ",
             rows, " rows they must be contiguous [", rows, ", ", columns, "]");
  }
};

}  // namespace kernel_pytorch
