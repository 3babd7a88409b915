#include "kernel_pytorch/registry/request_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/field.h"

namespace kernel_pytorch::registry {
namespace {

const std::string* find_option(const ProblemRequest& request, std::string_view name) {
  const auto found = std::ranges::find(request.options, name, [](const auto& option) { return option.first; });
  return found == request.options.end() ? nullptr : &found->second;
}

std::string join(std::span<const std::string_view> words) {
  std::string text;
  for (std::string_view word : words) text += concat(text.empty() ? "" : ", ", word);
  return text;
}

}  // namespace

void check_options(const ProblemRequest& request, std::span<const std::string_view> known) {
  for (const auto& [name, text] : request.options) {
    KP_CHECK(std::ranges::find(known, name) != known.end(), "option ", name, "=", text, ": unknown; known are ",
             join(known));
  }
}

bool has_option(const ProblemRequest& request, std::string_view name) {
  return find_option(request, name) != nullptr;
}

double number_option(const ProblemRequest& request, std::string_view name, double fallback) {
  const std::string* text = find_option(request, name);
  if (text == nullptr) return fallback;
  double number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  KP_CHECK(error == std::errc() && end == text->data() + text->size() && std::isfinite(number), "option ", name, "=",
           *text, ": a number is needed");
  return number;
}

int64_t integer_option(const ProblemRequest& request, std::string_view name, int64_t fallback) {
  const std::string* text = find_option(request, name);
  if (text == nullptr) return fallback;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  KP_CHECK(error == std::errc() && end == text->data() + text->size(), "option ", name, "=", *text,
           ": a whole number is needed");
  return number;
}

std::string text_option(const ProblemRequest& request, std::string_view name) {
  const std::string* text = find_option(request, name);
  return text == nullptr ? std::string() : *text;
}

bool flag_option(const ProblemRequest& request, std::string_view name, bool fallback) {
  return number_option(request, name, fallback) != 0;
}

DType dtype_option(const ProblemRequest& request, std::string_view name, DType fallback) {
  const std::string* text = find_option(request, name);
  if (text == nullptr) return fallback;
  const auto dtype = parse_dtype(*text);
  KP_CHECK(dtype.has_value(), "option ", name, "=", *text, ": unknown; use a type such as fp32, bf16 or fp16");
  return *dtype;
}

int choice_option(const ProblemRequest& request, std::string_view name, std::span<const std::string_view> words,
                  std::string_view fallback) {
  const std::string* text = find_option(request, name);
  const auto found = std::ranges::find(words, text == nullptr ? fallback : std::string_view(*text));
  KP_CHECK(found != words.end(), "option ", name, "=", text == nullptr ? fallback : *text, ": unknown; known are ",
           join(words));
  return static_cast<int>(found - words.begin());
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (auto word = take_token(text); !word.empty(); word = take_token(text)) words.push_back(word);
  return words;
}

TensorView rows_view(const ProblemRequest& request) {
  KP_CHECK(!request.shape.empty(), "shape is empty; give rows and columns, e.g. 1024x4096");
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < request.shape.size(); ++i) rows *= request.shape[i];
  KP_CHECK(rows >= 0 && request.shape.back() >= 0, "shape ", shape_text(request.shape), ": sizes cannot be negative");
  return contiguous_view(nullptr, request.dtype, {rows, request.shape.back()}, request.device);
}

}  // namespace kernel_pytorch::registry
