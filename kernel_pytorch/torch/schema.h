// An op's schema as a value that templates take, and its words: "rms_norm(Tensor x, float eps) -> Tensor" has the name
// rms_norm and the arguments {Tensor, x} and {float, eps}. Read while compiling, so a call pays nothing for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>

namespace kernel_pytorch::torch_ops {

template <size_t kSize>
struct Schema {
  char text[kSize]{};
  consteval Schema(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
  constexpr std::string_view view() const { return {text, kSize - 1}; }
};

struct SchemaArgument {
  std::string_view type;  // "Tensor", "Tensor?", "Tensor(a!)", "Tensor[]", "float", "int", "bool", "str", "float?"
  std::string_view name;  // without its default
  bool is_optional = false;
  bool is_written = false;
};

constexpr std::string_view name_of(std::string_view schema) {
  return schema.substr(0, schema.find('('));
}

// The argument at `index`; one without a type past the last.
constexpr SchemaArgument argument_of(std::string_view schema, size_t index) {
  size_t begin = schema.find('(') + 1;
  int depth = 1;
  for (size_t i = begin; i < schema.size() && depth > 0; ++i) {
    if (schema[i] == '(') ++depth;
    if (schema[i] == ')') --depth;
    if (depth > 1 || (depth == 1 && schema[i] != ',')) continue;
    if (index == 0) {
      const std::string_view words = schema.substr(begin, i - begin);
      const size_t space = words.rfind(' ');
      if (space == std::string_view::npos) return {};
      const std::string_view type = words.substr(0, space), name = words.substr(space + 1);
      return {.type = type,
              .name = name.substr(0, name.find('=')),
              .is_optional = type.ends_with('?'),
              .is_written = type.find('!') != std::string_view::npos};
    }
    --index;
    begin = i + 2;
  }
  return {};
}

constexpr size_t argument_count(std::string_view schema) {
  size_t count = 0;
  while (!argument_of(schema, count).type.empty()) ++count;
  return count;
}

// How errors name an argument: "rms_norm: x" of rms_norm and rms_norm_forward, "rms_norm backward: x" of its backward,
// "reduce_norm: tensors[2]" of an entry of a list.
struct ArgumentName {
  std::string_view op;
  std::string_view argument;
  int64_t index = -1;  // in its list
};

// The same without the op.
struct ShortName {
  ArgumentName name;
};

inline std::ostream& operator<<(std::ostream& out, const ShortName& name) {
  out << name.name.argument;
  return name.name.index < 0 ? out : out << '[' << name.name.index << ']';
}

inline std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
  constexpr std::string_view kForward = "_forward", kBackward = "_backward";
  std::string_view op = name.op;
  const bool is_backward = op.ends_with(kBackward);
  if (is_backward) op.remove_suffix(kBackward.size());
  if (op.ends_with(kForward)) op.remove_suffix(kForward.size());
  return out << op << (is_backward ? " backward: " : ": ") << ShortName{name};
}

}  // namespace kernel_pytorch::torch_ops
