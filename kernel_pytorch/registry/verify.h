// Every supported kernel and config against the reference.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch::registry {

// One line per failure. Problems of more than 32 Mi elements are checked on fewer rows, as the reference is scalar.
KP_EXPORT std::vector<std::string> verify(const AnyProblem& problem);
// The same for the one kernel and config that a call would get.
KP_EXPORT std::vector<std::string> verify_chosen(const AnyProblem& problem);

}  // namespace kernel_pytorch::registry
