// NVRTC by dlopen, in our own declarations: one program per kernel entry. Measured on 2 cores with NVRTC 13.0: two
// threads compile twice as fast as one, and putting 16 entries into one program would save a third of the time at the
// price of cubins that hold strangers; so entries stay alone and run in parallel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/sources.h"

namespace kernel_pytorch::jit {

// The options that every kernel is compiled with; part of the cache key.
std::vector<std::string> compile_options(const std::string& architecture);

// Loads NVRTC where needed. Throws kDevice with the log, or with how to get an NVRTC.
CompiledKernel run_nvrtc(const DeviceCode& code, const std::string& architecture);

// "13.0", without loading it where file names tell; empty where there is none.
std::string nvrtc_version_text();

// 90 for "sm_90", "sm_90a", "compute_90". Throws kInvalidArgument for anything else.
int capability_of(const std::string& architecture);
bool is_architecture_specific(const std::string& architecture);

}  // namespace kernel_pytorch::jit
