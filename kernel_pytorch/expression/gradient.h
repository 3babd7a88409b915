// The derivative of a program's one float result, as a program: by score, and by each captured element that it reads.
// One reverse sweep gives all of them. Where torch has a convention it is torch's: abs is flat at 0, min and max share
// at a tie, where hands the derivative to what it chose. Integers, bools, floor and casts have no derivative.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

// A load of a float capture that the result depends on: results[derivative] is d result / d element, and the results
// from `indices` on are the element's index, one for each dimension.
struct LoadGradient {
  int capture = 0;
  int derivative = 0;
  int indices = 0;
  uint8_t index_varies = kVariesNot;  // where it varies by key alone, the queries can be summed before they are added
};

struct Gradient {
  Program program;  // results[0] is d result / d score
  std::vector<LoadGradient> loads;
};

KP_EXPORT Gradient differentiate(const Program& program);

// Whether the result is the score and something else added to it: its derivative to the score is 1.
KP_EXPORT bool adds_to_score(const Gradient& gradient);

}  // namespace kernel_pytorch::expression
