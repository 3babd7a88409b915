// Checks that ops over rows share: one tensor leads, the others must agree with it. Every failure names the op, the
// argument, both values and the cure.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

// The types that a parameter of a `type` tensor may have, as errors name them.
inline std::string type_or_wider(DType type) {
  return type == DType::kFloat32 || type == DType::kFloat64 ? concat(type) : concat(type, " or fp32");
}

// The checks of one call: which op speaks, and the tensor everything else must agree with.
struct ArgumentCheck {
  std::string_view op;
  std::string_view main_name;
  const TensorView& main;
  Device device;

  void check_main() const {
    KP_CHECK(main.is_present(), op, ": ", main_name, " is missing");
    KP_CHECK(main.rank >= 1, op, ": ", main_name, " has no dimensions; it needs at least one, the columns");
    const bool is_known = main.dtype == DType::kFloat32 || main.dtype == DType::kFloat64 ||
                          main.dtype == DType::kBFloat16 || main.dtype == DType::kFloat16;
    KP_CHECK(is_known, op, ": ", main_name, " is ", main.dtype, "; convert it to fp32, bf16, fp16 or fp64");
    KP_CHECK(main.dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, op, ": ", main_name, " is fp64 on ",
             device, "; fp64 is supported on the CPU only, convert it to fp32");
    check_device(main_name, main);
  }

  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }

  // Same shape and type as the main tensor.
  void check_like(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    KP_CHECK(view.dtype == main.dtype, op, ": ", name, " is ", view.dtype, ", ", main_name, " is ", main.dtype,
             "; convert one of them");
    check_shape(name, view);
  }
  // The same, or of a 16-bit type where the main tensor is fp32.
  void check_like_or_narrow(std::string_view name, const TensorView& view) const {
    if (!view.is_present() || view.dtype == main.dtype) return check_like(name, view);
    check_device(name, view);
    const bool is_narrow = view.dtype == DType::kBFloat16 || view.dtype == DType::kFloat16;
    KP_CHECK(is_narrow && main.dtype == DType::kFloat32, op, ": ", name, " is ", view.dtype, ", ", main_name, " is ",
             main.dtype, "; it must have that type, or be bf16 or fp16 where ", main_name, " is fp32");
    check_shape(name, view);
  }

  void check_shape(std::string_view name, const TensorView& view) const {
    KP_CHECK(std::ranges::equal(view.shape(), main.shape()), op, ": ", name, " has shape ", shape_text(view.shape()),
             ", ", main_name, " has ", shape_text(main.shape()), "; they must be equal (expand it first)");
  }

  void check_output(std::string_view name, const TensorView& view) const {
    check_like(name, view);
    check_contiguous(name, view);
  }
  void check_contiguous(std::string_view name, const TensorView& view) const {
    KP_CHECK(!view.is_present() || is_contiguous(view), op, ": ", name, " has strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; it must be contiguous");
  }

  void check_columns(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    KP_CHECK(view.rank == 1 && view.size(0) == columns_of(main), op, ": ", name, " has shape ",
             shape_text(view.shape()), ", the last dimension of ", main_name, " is ", columns_of(main),
             "; it must have that one dimension");
    KP_CHECK(view.dtype == main.dtype || (view.dtype == DType::kFloat32 && main.dtype != DType::kFloat64), op, ": ",
             name, " is ", view.dtype, ", ", main_name, " is ", main.dtype, "; it must be ", type_or_wider(main.dtype));
    KP_CHECK(view.size(0) <= 1 || view.stride(0) == 1, op, ": ", name, " has stride ", view.stride(0),
             "; make it contiguous");
  }

  void check_statistics(std::string_view name, const TensorView& view) const {
    if (!view.is_present()) return;
    check_device(name, view);
    const DType wanted = main.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    KP_CHECK(view.dtype == wanted, op, ": ", name, " is ", view.dtype, "; it must be ", wanted);
    KP_CHECK(view.element_count() == rows_of(main) && is_contiguous(view), op, ": ", name, " has shape ",
             shape_text(view.shape()), "; it must be contiguous with one element for each of the ", rows_of(main),
             " rows");
  }

  void check_same_type(std::string_view name, const TensorView& view, std::string_view other_name,
                       const TensorView& other) const {
    KP_CHECK(!view.is_present() || !other.is_present() || view.dtype == other.dtype, op, ": ", name, " is ", view.dtype,
             ", ", other_name, " is ", other.dtype, "; they must have one type");
  }
};

}  // namespace kernel_pytorch
