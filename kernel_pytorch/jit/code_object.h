// What an AMD code object's metadata says of its kernel: registers, spills, memory.
#pragma once

#include <string>
#include <string_view>

namespace kernel_pytorch::jit {

struct CodeObjectSummary {
  std::string symbol;        // by which a driver finds the kernel
  int vector_registers = 0;  // of a lane, accumulation registers included
  int scalar_registers = 0;  // of a wave
  int vector_spills = 0;     // registers, to memory or to accumulation registers
  int scalar_spills = 0;     // registers, to lanes of a vector register
  int private_bytes = 0;     // of a lane in memory: spills, and arrays that are indexed at run time
  int shared_bytes = 0;      // of LDS, what a launch adds not counted
  int wave_lanes = 0;
  int spilled_bytes = 0;  // of a lane: at most so much of private_bytes is spilled registers
};

// Throws kDevice, naming the entry, for what is no code object with one kernel of that name.
CodeObjectSummary summarize_code_object(std::string_view code_object, const std::string& entry);

}  // namespace kernel_pytorch::jit
