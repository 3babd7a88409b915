// The words of a ProblemRequest, read with defaults: what the `make` of an op starts with.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

// Throws where the request has an option that is not in `known`: a misspelt word must not be a default.
KP_EXPORT void check_options(const ProblemRequest& request, std::span<const std::string_view> known);
inline void check_options(const ProblemRequest& request, std::initializer_list<std::string_view> known) {
  check_options(request, std::span(known.begin(), known.size()));
}
KP_EXPORT bool has_option(const ProblemRequest& request, std::string_view name);
KP_EXPORT double number_option(const ProblemRequest& request, std::string_view name, double fallback);
KP_EXPORT int64_t integer_option(const ProblemRequest& request, std::string_view name, int64_t fallback);
KP_EXPORT std::string text_option(const ProblemRequest& request, std::string_view name);  // empty where it is not given
KP_EXPORT bool flag_option(const ProblemRequest& request, std::string_view name, bool fallback);
KP_EXPORT DType dtype_option(const ProblemRequest& request, std::string_view name, DType fallback);
// The place of the option's word in `words`; `fallback` is one of them.
KP_EXPORT int choice_option(const ProblemRequest& request, std::string_view name,
                            std::span<const std::string_view> words, std::string_view fallback);
inline int choice_option(const ProblemRequest& request, std::string_view name,
                         std::initializer_list<std::string_view> words, std::string_view fallback) {
  return choice_option(request, name, std::span(words.begin(), words.size()), fallback);
}

// "a b c" as {"a", "b", "c"}.
KP_EXPORT std::vector<std::string_view> words_of(std::string_view text);

// Requests as a table of entries, one after the other in lines or separated by ";": shapes, each taken with each
// combination of the options behind them, in each of the types that a colon follows. Types and shapes hold until others
// are given.
//
//   fp32 bf16 fp16: 19x1,7,128 700x256 log=0,1 scale=2; causal=1   # twelve requests of each type
//
// Commas separate alternatives, of an option also "-", which leaves it out; "a+b=1,2" gives both options the same
// value. `wide` is fp32, or fp64 for fp64; a value that begins with "$" is the text of `texts` that has this name.
KP_EXPORT std::vector<ProblemRequest> requests_of(std::string_view table, const RequestOptions& texts = {});

// Stores a tensor's matrices with `padding` elements between their rows, or transposed, between their columns.
KP_EXPORT void store_matrices(TensorView& view, int64_t padding, bool transposed = false);

// A contiguous [rows, columns] view without data: leading sizes of the request's shape become rows.
KP_EXPORT TensorView rows_view(const ProblemRequest& request);

}  // namespace kernel_pytorch::registry
