// How errors name an argument of an op.
#pragma once

#include <cstdint>
#include <ostream>
#include <string_view>

namespace kernel_pytorch::torch_ops {

// "rms_norm: x" of rms_norm and rms_norm_forward, "rms_norm backward: x" of its backward,
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
