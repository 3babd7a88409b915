// What an op gives to the library, as one constant that ops/operations.cpp lists: the ops of front ends, and the
// operations that are chosen, tuned, tried and measured.
#pragma once

#include <span>
#include <vector>

#include "kernel_pytorch/registry/declaration.h"
#include "kernel_pytorch/registry/erase.h"

namespace kernel_pytorch::registry {

struct OpEntry {
  std::span<const Declaration> declarations{};
  std::vector<AnyOperation> (*operations)() = nullptr;  // null: none, an op that is made of others
};

template <const auto&... kOperations>
std::vector<AnyOperation> erased() {
  return {erase(kOperations)...};
}

}  // namespace kernel_pytorch::registry
