// OP --shape --dtype --device --option: the words by which explain, tune, bench and verify name a problem.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/registry/any_operation.h"

namespace kernel_pytorch::cli {

struct ProblemArguments {
  std::string op;
  std::vector<std::string> shapes;
  std::vector<std::string> dtypes;
  std::string device = "cpu";
  std::vector<std::string> options;  // "residual=1"
};

void add_problem_arguments(Command& command, ProblemArguments& arguments, Need op_and_shape);

struct NamedProblem {
  const registry::AnyOperation* operation = nullptr;
  registry::ProblemRequest request;
};

// Every op that the name stands for, with every shape and dtype asked for (fp32 when none is). Words that an op does
// not understand are a UsageError; a device that is not there is the core's error.
std::vector<NamedProblem> named_problems(const ProblemArguments& arguments);

std::vector<const registry::AnyOperation*> named_operations(const std::string& op);
Device named_device(const std::string& device);

int64_t element_count(const registry::ProblemRequest& request);  // the product of its sizes

// "rms_norm_forward 1024x4096 bf16 residual=1 on cpu"
std::string problem_text(const NamedProblem& problem);
std::string request_text(const registry::ProblemRequest& request);  // without op and device

}  // namespace kernel_pytorch::cli
