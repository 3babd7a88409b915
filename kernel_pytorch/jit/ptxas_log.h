// Reads what ptxas -v says about one program: registers, spills, and the lines that a release must not have.
#pragma once

#include <string>
#include <string_view>

namespace kernel_pytorch::jit {

struct PtxasSummary {
  int registers = 0;     // of the kernel: the largest of the program's functions
  int spill_bytes = 0;   // stored, summed over the program's functions
  std::string warnings;  // warnings and serialised wgmma, one a line; empty when clean
};

PtxasSummary summarize_ptxas_log(std::string_view log);

}  // namespace kernel_pytorch::jit
