// Names that people type, for the C interface and the command line: ops (and what was likely meant), shapes, dtypes,
// devices. Every refusal is kInvalidArgument with what to write instead.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/any_operation.h"

namespace kernel_pytorch::c_interface {

KP_EXPORT std::string joined(const std::vector<std::string>& names, std::string_view separator);

// The name that was likely meant, empty when nothing is near.
KP_EXPORT std::string nearest_name(std::string_view name, const std::vector<std::string>& known);

// Ops called `name`, or whose name it begins up to an underscore: "rms_norm" is rms_norm_forward and rms_norm_backward.
// Empty stands for every op. Throws kInvalidArgument with what was likely meant.
KP_EXPORT std::vector<const registry::AnyOperation*> matching_operations(std::string_view name);

// Exactly one op. A name that stands for several is refused with their names.
KP_EXPORT const registry::AnyOperation& one_operation(std::string_view name);

KP_EXPORT std::vector<std::string> operation_names();
// Every CUDA function of these ops, each once.
KP_EXPORT std::vector<DeviceCode> device_code_of(const std::vector<const registry::AnyOperation*>& operations);

KP_EXPORT DType dtype_from(std::string_view text);
KP_EXPORT Device device_from(std::string_view text);
KP_EXPORT std::vector<int64_t> shape_from(std::string_view text);  // "1024x4096"
// No negative size, at most kMaxRank of them, and a byte count that fits 63 bits for any type.
KP_EXPORT void check_shape(const std::vector<int64_t>& shape, std::string_view where);
KP_EXPORT std::string request_shape_text(const std::vector<int64_t>& shape);  // "1024x4096"

}  // namespace kernel_pytorch::c_interface
