// The chosen NVRTC: its functions, and why others were passed over. One that is newer than the driver can run is
// refused.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/jit.h"

struct _nvrtcProgram;

namespace kernel_pytorch::jit {

using NvrtcResult = int;
using NvrtcProgram = _nvrtcProgram*;

// X(member, symbol, parameters)
#define KP_NVRTC_FUNCTIONS(X)                                                                                    \
  X(version, "nvrtcVersion", (int* major, int* minor))                                                           \
  X(supported_count, "nvrtcGetNumSupportedArchs", (int* count))                                                  \
  X(supported, "nvrtcGetSupportedArchs", (int* capabilities))                                                    \
  X(create, "nvrtcCreateProgram",                                                                                \
    (NvrtcProgram * program, const char* source, const char* name, int header_count, const char* const* headers, \
     const char* const* include_names))                                                                          \
  X(destroy, "nvrtcDestroyProgram", (NvrtcProgram * program))                                                    \
  X(compile, "nvrtcCompileProgram", (NvrtcProgram program, int option_count, const char* const* options))        \
  X(add_name, "nvrtcAddNameExpression", (NvrtcProgram program, const char* name))                                \
  X(lowered_name, "nvrtcGetLoweredName", (NvrtcProgram program, const char* name, const char** lowered))         \
  X(log_size, "nvrtcGetProgramLogSize", (NvrtcProgram program, size_t * bytes))                                  \
  X(log, "nvrtcGetProgramLog", (NvrtcProgram program, char* text))                                               \
  X(cubin_size, "nvrtcGetCUBINSize", (NvrtcProgram program, size_t * bytes))                                     \
  X(cubin, "nvrtcGetCUBIN", (NvrtcProgram program, char* code))                                                  \
  X(ptx_size, "nvrtcGetPTXSize", (NvrtcProgram program, size_t * bytes))                                         \
  X(ptx, "nvrtcGetPTX", (NvrtcProgram program, char* code))

struct NvrtcLibrary {
  using Handle = NvrtcProgram;
#define KP_NVRTC_MEMBER(member, symbol, parameters) NvrtcResult(*member) parameters = nullptr;
  KP_NVRTC_FUNCTIONS(KP_NVRTC_MEMBER)
#undef KP_NVRTC_MEMBER
  const char* (*error_string)(NvrtcResult result) = nullptr;
  NvrtcInfo info;
  std::vector<int> capabilities;  // that it knows: {75, 80, ..., 121}
  std::string description() const {
    return concat("NVRTC ", info.major, ".", info.minor, " (", info.path, ")");
  }
};

// Loads it at the first call. Throws kDevice with how to get one. The reference stays valid for good.
const NvrtcLibrary& require_nvrtc();

}  // namespace kernel_pytorch::jit
