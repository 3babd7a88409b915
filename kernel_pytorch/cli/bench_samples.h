// The samples of `kpt bench` on disk: adding a run to a file, and comparing two files.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/registry/any_operation.h"

namespace kernel_pytorch::cli {

// One run more in `path`, which is made where it is not there: two programs measured by turns into two files meet the
// same moods of the machine. problems[i] is what reports[i] is of.
void save_samples(const std::string& path, const std::vector<NamedProblem>& problems,
                  const std::vector<registry::BenchReport>& reports);
void check_samples_file(const std::string& path);  // throws where save_samples would, before anything was measured

struct CompareArguments {
  std::vector<std::string> files;  // before, after
  double threshold_percent = 5;
  double significance = 0.01;
  bool json = false;
};

// Prints a table; kFailure where something is slower.
int compare_samples(const CompareArguments& arguments);

}  // namespace kernel_pytorch::cli
