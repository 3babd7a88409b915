// What kpt doctor finds out: the machine, the libraries, the caches, and whether kernels compute the right thing here.
// Each finding that hurts carries the exact command that cures it. Printing is doctor.cpp's business.
#pragma once

#include <string>
#include <vector>

namespace kernel_pytorch::cli {

enum class Health { kGood, kNote, kProblem };

struct Finding {
  std::string section;  // "CPU"
  Health health = Health::kGood;
  std::string text;
  std::string cure;  // a command to paste; only with kProblem
};

struct SelfTest {
  std::string device;
  std::string op;
  std::vector<std::string> failures;
  double copy_gigabytes_per_second = 0;  // measured now; 0 where it could not be
  double seconds = 0;
};

struct Diagnosis {
  std::vector<Finding> findings;
  std::vector<SelfTest> self_tests;
  bool self_tests_passed() const;
};

Diagnosis diagnose(bool with_self_test);

// The home folder as ~, so that a pasted report does not name its user.
std::string without_home(const std::string& path);

}  // namespace kernel_pytorch::cli
