// The levels this machine can run, for the tests of the words.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cpu/word_probes.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_probes {

struct Level {
  std::string name;
  WordProbes probes;
};

inline std::vector<Level> levels_of_this_machine() {
#if defined(__aarch64__)
  return {{"neon", isa_neon::word_probes()}};
#else
  const CpuIsa machine = device_info(Device{}).cpu.machine_isa;
  std::vector<Level> levels = {{"v2", isa_v2::word_probes()}};
  if (machine >= CpuIsa::kX86V3) levels.push_back({"v3", isa_v3::word_probes()});
  if (machine >= CpuIsa::kX86V4) levels.push_back({"v4", isa_v4::word_probes()});
  return levels;
#endif
}

}  // namespace kernel_pytorch::cpu_probes
