// The outcome of checking one problem: plain values, for the table and for JSON.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cli/problem_arguments.h"

namespace kernel_pytorch::cli {

struct Verification {
  NamedProblem problem;
  int kernels = 0;  // supported, the reference among them
  std::vector<std::string> failures;
  double seconds = 0;
  bool passed() const { return failures.empty() && kernels > 0; }
  bool failed() const { return !failures.empty(); }
};

}  // namespace kernel_pytorch::cli
