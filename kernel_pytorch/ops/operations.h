// Every op of the library, one line each in operations.cpp.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/registry/declaration.h"

namespace kernel_pytorch {

KP_EXPORT const std::vector<registry::AnyOperation>& operations();
KP_EXPORT const registry::AnyOperation* find_operation(std::string_view name);  // null when there is none

// The ops of the front ends.
KP_EXPORT std::span<const registry::Declaration> declarations();

}  // namespace kernel_pytorch
