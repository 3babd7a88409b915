// A declaration as torch's adapter calls it: what every call would otherwise look up again.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "kernel_pytorch/registry/declaration.h"

namespace kernel_pytorch::torch_ops {

inline constexpr size_t kMaxArguments = 64;
inline constexpr size_t kMaxFlags = 2;  // that ask for one output together

struct Plan {
  struct Argument {
    size_t index;  // on the stack
    std::string_view name;
    const Field* field;
    bool is_optional;
    bool is_updated;
    bool are_rows;  // of any strides and leading shape, which a CPU's kernels want dense
  };
  struct Output {
    const Field* field;
    std::array<int8_t, kMaxFlags> wanted{-1, -1};  // places on the stack
    int8_t type = -1;                              // in `types`
    const Field* same_as = nullptr;                // a required tensor of the same shape: its sizes are copied
  };

  const registry::Declaration* declaration = nullptr;
  std::vector<Argument> tensors, lists, options;
  std::vector<Argument> types;  // that choose outputs' types
  std::vector<Output> outputs;
  std::vector<const Field*> in_place;  // outputs that take the memory of an input
  bool writes = false;                 // into a tensor that its caller gives
  bool binds = false;                  // names of dimensions to sizes: an output has the shape of no input
};

Plan plan_of(const registry::Declaration& declaration);

}  // namespace kernel_pytorch::torch_ops
