// What a caller asks for, from JSON (the C interface) or from words (the command line), checked before the core sees
// it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/tuning/autotune_scope.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::c_interface {

struct OperationRequest {
  const registry::AnyOperation* operation = nullptr;
  registry::ProblemRequest problem;
};
// Reads op, shape, dtype, device and options; the caller reads its own fields and finishes the reader.
KP_EXPORT OperationRequest read_operation(FieldReader& fields);
KP_EXPORT registry::ProblemRequest read_problem(FieldReader& fields);
KP_EXPORT std::vector<tuning::OverlayEntry> read_overlay(const Json& request);
KP_EXPORT tuning::ScopeOptions read_autotune(const Json& request);  // without its callbacks
KP_EXPORT std::string read_directories(const Json& request);        // with colons between, as the search wants them

struct ClearRequest {
  bool store = true;
  bool cubins = true;
  std::string op;
};
KP_EXPORT ClearRequest read_clear(const Json& request);

}  // namespace kernel_pytorch::c_interface
