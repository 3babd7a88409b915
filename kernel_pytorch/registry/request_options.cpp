#include "kernel_pytorch/registry/request_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

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

namespace {

// The part of a text up to a separator, taken off its front together with it.
std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  const auto count = std::ranges::count(text, separator) + 1;
  for (auto i = count; i > 0; --i) parts.push_back(take_until(text, separator));
  return parts;
}

// Of a list of choices every combination with those made before.
template <class Made, class Add>
void combine(std::vector<Made>& made, const std::vector<std::string_view>& choices, const Add& add) {
  std::vector<Made> all;
  for (std::string_view choice : choices) {
    for (const Made& one : made) add(all.emplace_back(one), choice);
  }
  made = std::move(all);
}

std::string text_of_value(std::string_view value, DType dtype, const RequestOptions& texts) {
  if (value == "wide") return dtype == DType::kFloat64 ? "fp64" : "fp32";
  if (!value.starts_with('$')) return std::string(value);
  const auto found = std::ranges::find(texts, value.substr(1), [](const auto& text) { return text.first; });
  KP_INTERNAL_CHECK(found != texts.end(), value, ": no text has this name");
  return found->second;
}

std::vector<std::vector<int64_t>> shapes_of_word(std::string_view word) {
  std::vector<std::vector<int64_t>> shapes(1);
  for (std::string_view sizes : split(word, 'x')) {
    combine(shapes, split(sizes, ','), [&](std::vector<int64_t>& shape, std::string_view size) {
      const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), shape.emplace_back());
      KP_INTERNAL_CHECK(error == std::errc() && end == size.data() + size.size(), word, " is no shape");
    });
  }
  return shapes;
}

// Every combination of the options that an entry has.
std::vector<RequestOptions> options_of_entry(const std::vector<std::string_view>& words, DType dtype,
                                             const RequestOptions& texts) {
  std::vector<RequestOptions> options(1);
  for (std::string_view word : words) {
    const size_t middle = word.find('=');
    if (middle == std::string_view::npos) continue;  // a shape
    combine(options, split(word.substr(middle + 1), ','), [&](RequestOptions& made, std::string_view value) {
      const std::string text = text_of_value(value, dtype, texts);
      for (std::string_view name : split(word.substr(0, middle), '+')) {
        if (text != "-") made.emplace_back(name, text);
      }
    });
  }
  return options;
}

}  // namespace

std::vector<ProblemRequest> requests_of(std::string_view table, const RequestOptions& texts) {
  std::vector<ProblemRequest> requests;
  std::vector<std::string_view> types;
  std::vector<std::vector<int64_t>> shapes;
  const auto add_entry = [&](std::string_view entry) {
    if (entry.find(':') != std::string_view::npos) types = words_of(take_until(entry, ':'));
    const std::vector<std::string_view> words = words_of(entry);
    if (words.empty()) return;
    if (words[0].find('=') == std::string_view::npos) shapes.clear();
    for (std::string_view word : words) {
      if (word.find('=') == std::string_view::npos) std::ranges::copy(shapes_of_word(word), std::back_inserter(shapes));
    }
    for (std::string_view type : types) {
      const auto dtype = parse_dtype(type);
      KP_INTERNAL_CHECK(dtype.has_value(), type, " is no type");
      for (const RequestOptions& options : options_of_entry(words, *dtype, texts)) {
        for (const auto& shape : shapes) {
          requests.push_back({.shape = shape, .dtype = *dtype, .device = {}, .options = options});
        }
      }
    }
  };
  while (!table.empty()) {
    std::string_view line = take_until(table, '\n');
    for (std::string_view entry : split(take_until(line, '#'), ';')) add_entry(entry);
  }
  return requests;
}

std::vector<ProblemRequest> RequestSource::operator()() const {
  return make_ != nullptr ? make_() : requests_of(table_);
}

void store_matrices(TensorView& view, int64_t padding, bool transposed) {
  if (!view.is_present()) return;
  const auto rank = static_cast<size_t>(view.rank);
  const int64_t rows = view.size(-2), columns = view.size(-1), pitch = (transposed ? rows : columns) + padding;
  view.strides[rank - 2] = transposed ? 1 : pitch;
  view.strides[rank - 1] = transposed ? pitch : 1;
  int64_t stride = pitch * (transposed ? columns : rows);
  for (int i = view.rank - 3; i >= 0; --i) {
    view.strides[static_cast<size_t>(i)] = stride;
    stride *= view.size(i);
  }
}

TensorView rows_view(const ProblemRequest& request) {
  KP_CHECK(!request.shape.empty(), "shape is empty; give rows and columns, e.g. 1024x4096");
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < request.shape.size(); ++i) rows *= request.shape[i];
  KP_CHECK(rows >= 0 && request.shape.back() >= 0, "shape ", shape_text(request.shape), ": sizes cannot be negative");
  return contiguous_view(nullptr, request.dtype, {rows, request.shape.back()}, request.device);
}

}  // namespace kernel_pytorch::registry
