// What a caller asks for, from JSON (the C interface) or from words (the command line), checked before the core sees
// it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::c_interface {

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
KP_EXPORT std::string shape_words(const std::vector<int64_t>& shape);  // "1024x4096"

struct OperationRequest {
  const registry::AnyOperation* operation = nullptr;
  registry::ProblemRequest problem;
};
// Reads op, shape, dtype, device and options; the caller reads its own fields and finishes the reader.
KP_EXPORT OperationRequest read_operation(FieldReader& fields);
KP_EXPORT registry::ProblemRequest read_problem(FieldReader& fields);
KP_EXPORT std::vector<tuning::OverlayEntry> read_overlay(const Json& request);
KP_EXPORT std::string read_directories(const Json& request);  // with colons between, as the search wants them

struct ClearRequest {
  bool store = true;
  bool cubins = true;
  std::string op;
};
KP_EXPORT ClearRequest read_clear(const Json& request);

}  // namespace kernel_pytorch::c_interface
