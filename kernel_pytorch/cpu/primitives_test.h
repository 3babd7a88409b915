// The levels this machine can run, for the tests of the words.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cpu/primitive_probes.h"

namespace kernel_pytorch::cpu_probes {

struct Level {
  std::string name;
  PrimitiveProbes probes;
};

std::vector<Level> levels_of_this_machine();  // words_test.cpp

}  // namespace kernel_pytorch::cpu_probes
