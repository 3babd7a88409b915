// HIPRTC's functions, from the library that KERNEL_PYTORCH_HIPRTC names or the system's.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/jit.h"

struct _hiprtcProgram;

namespace kernel_pytorch::jit {

using HiprtcProgram = _hiprtcProgram*;

// X(member, symbol, parameters)
#define KP_HIPRTC_FUNCTIONS(X)                                                                                    \
  X(create, "hiprtcCreateProgram",                                                                                \
    (HiprtcProgram * program, const char* source, const char* name, int header_count, const char* const* headers, \
     const char* const* include_names))                                                                           \
  X(destroy, "hiprtcDestroyProgram", (HiprtcProgram * program))                                                   \
  X(compile, "hiprtcCompileProgram", (HiprtcProgram program, int option_count, const char* const* options))       \
  X(add_name, "hiprtcAddNameExpression", (HiprtcProgram program, const char* name))                               \
  X(log_size, "hiprtcGetProgramLogSize", (HiprtcProgram program, size_t * bytes))                                 \
  X(log, "hiprtcGetProgramLog", (HiprtcProgram program, char* text))                                              \
  X(code_size, "hiprtcGetCodeSize", (HiprtcProgram program, size_t * bytes))                                      \
  X(code, "hiprtcGetCode", (HiprtcProgram program, char* code))                                                   \
  X(version, "hiprtcVersion", (int* major, int* minor))

struct HiprtcLibrary {
  using Handle = HiprtcProgram;
#define KP_HIPRTC_MEMBER(member, symbol, parameters) int(*member) parameters = nullptr;
  KP_HIPRTC_FUNCTIONS(KP_HIPRTC_MEMBER)
#undef KP_HIPRTC_MEMBER
  const char* (*error_string)(int result) = nullptr;
  HiprtcInfo info;
  std::vector<std::string>
      architectures;  // that its compiler knows: {"gfx900", ..., "gfx90a"}; empty: it does not tell
  std::string description() const {
    return concat("HIPRTC ", info.version, " (", info.path, ")");
  }
};

// Loads it at the first call. Throws kDevice with how to get one. The reference stays valid for good.
const HiprtcLibrary& require_hiprtc();

}  // namespace kernel_pytorch::jit
