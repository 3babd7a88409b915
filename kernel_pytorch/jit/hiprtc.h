// HIPRTC by dlopen, in our own declarations: device sources for AMD GPUs, compiled on machines without one too.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/jit/jit.h"

struct _hiprtcProgram;

namespace kernel_pytorch::jit {

std::vector<std::string> hip_compile_options(const std::string& architecture);

// Loads HIPRTC where needed. Throws kDevice with the log, or with how to get a HIPRTC.
CompiledKernel run_hiprtc(const DeviceCode& code, const std::string& architecture);

}  // namespace kernel_pytorch::jit
