// The ops of the front ends, one line each in declarations.cpp.
#pragma once

#include <span>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/declaration.h"

namespace kernel_pytorch {

inline constexpr size_t kDeclarationCount = 10;  // front ends make an entry point of each while compiling
KP_EXPORT std::span<const registry::Declaration, kDeclarationCount> declarations();

}  // namespace kernel_pytorch
