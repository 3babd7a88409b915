// The words of a ProblemRequest, read with defaults: what the `make` of an op starts with.
#pragma once

#include <initializer_list>
#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

// Throws where the request has an option that is not in `known`: a misspelt word must not be a default.
KP_EXPORT void check_options(const ProblemRequest& request, std::initializer_list<std::string_view> known);
KP_EXPORT double number_option(const ProblemRequest& request, std::string_view name, double fallback);
KP_EXPORT int64_t integer_option(const ProblemRequest& request, std::string_view name, int64_t fallback);
KP_EXPORT bool flag_option(const ProblemRequest& request, std::string_view name, bool fallback);
KP_EXPORT DType dtype_option(const ProblemRequest& request, std::string_view name, DType fallback);
// The place of the option's word in `words`; `fallback` is one of them.
KP_EXPORT int word_option(const ProblemRequest& request, std::string_view name,
                          std::initializer_list<std::string_view> words, std::string_view fallback);

// A contiguous [rows, columns] view without data: leading sizes of the request's shape become rows.
KP_EXPORT TensorView rows_view(const ProblemRequest& request);

}  // namespace kernel_pytorch::registry
