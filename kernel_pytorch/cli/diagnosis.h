// What kpt doctor finds out: the machine, the libraries, the caches, and whether kernels compute the right thing here.
// Each finding that hurts carries the exact command that cures it. Printing is doctor.cpp's business.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cli/device_check.h"

namespace kernel_pytorch::cli {

enum class Health { kGood, kNote, kProblem };

struct Finding {
  std::string section;  // "CPU"
  Health health = Health::kGood;
  std::string text;
  std::string cure;  // a command to paste; only with kProblem
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<SelfTest> self_tests;
  bool self_tests_passed() const;
};

// `python_seconds`: how long the Python next to this program may take over torch; 0: it is not asked.
Diagnosis diagnose(bool with_self_test, double python_seconds);

// The home folder as ~, so that a pasted report does not name its user.
std::string without_home(const std::string& path);

}  // namespace kernel_pytorch::cli
