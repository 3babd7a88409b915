// Programs as text: how they travel through a framework's op as a string, and what they are hashed by.
//   expression 1              the version of this form
//   capture bf16 2            captured tensors in order: element type, dimensions
//   %0 = score                then one operation a line, numbered from 0
//   %1 = head
//   %2 = key
//   %3 = load 0 %1 %2         an element of captured tensor 0
//   %4 = add %0 %3
//   %5 = float 0.5            constants: float (also inf, -inf, nan), int, bool (true, false)
//   %6 = mul %4 %5
//   return %6
#pragma once

#include <string>
#include <string_view>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

// Untrusted text: throws kInvalidArgument with the line, or gives a program that holds together. It need not be in
// simplest form; the program is. parse(print(program)) == program.
KP_EXPORT Program parse(std::string_view text);
KP_EXPORT std::string print(const Program& program);

// 32 hex digits: equal for equal programs.
KP_EXPORT std::string hash_of(const Program& program);

}  // namespace kernel_pytorch::expression
