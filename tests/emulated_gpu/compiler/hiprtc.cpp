// HIPRTC of the emulated AMD GPU: the emulated NVRTC, given AMD's forms of the PTX functions by the library, whose
// objects carry a code object's metadata.
#include <cstdio>
#include <cstring>

#include "tests/emulated_gpu/compiler/program.h"

using namespace emulated;

namespace {

// The note of a code object, in which the library finds the kernel's name: MessagePack of
// {"amdhsa.kernels": [{".name": NAME}]}.
std::string metadata_of(const std::string& name) {
  std::string text =
      "\x81\xae"
      "amdhsa.kernels"
      "\x91\x81\xa5"
      ".name"
      "\xd9";
  text += static_cast<char>(name.size());
  text += name;
  std::string bytes;
  for (const unsigned char byte : text) bytes += (bytes.empty() ? "" : ",") + std::to_string(byte);
  return "asm(\".pushsection .note.amdgpu, \\\"a\\\", @note\\n.balign 4\\n.long 7, " + std::to_string(text.size()) +
         ", 32\\n.asciz \\\"AMDGPU\\\"\\n.balign 4\\n.byte " + bytes + "\\n.balign 4\\n.popsection\");\n";
}

}  // namespace

EMULATED_API const char* hiprtcGetErrorString(int result) {
  return nvrtcGetErrorString(result);
}
EMULATED_API int hiprtcVersion(int* major, int* minor) {
  return nvrtcVersion(major, minor);
}
EMULATED_API int hiprtcCreateProgram(_nvrtcProgram** program, const char* source, const char* name, int header_count,
                                     const char* const* headers, const char* const* include_names) {
  return nvrtcCreateProgram(program, source, name, header_count, headers, include_names);
}
EMULATED_API int hiprtcDestroyProgram(_nvrtcProgram** program) {
  return nvrtcDestroyProgram(program);
}
// The library looks for the function's own name with its length in front, as a mangled symbol has it.
EMULATED_API int hiprtcAddNameExpression(_nvrtcProgram* program, const char* name) {
  const std::string function = std::string(name).substr(0, std::string(name).find('<'));
  const std::string own = function.substr(function.rfind(':') + 1);
  const int result = nvrtcAddNameExpression(program, name);
  program->lowered_name += "_" + std::to_string(own.size()) + own;
  program->metadata = metadata_of(program->lowered_name);
  return result;
}
EMULATED_API int hiprtcCompileProgram(_nvrtcProgram* program, int option_count, const char* const* options) {
  for (int i = 0; i < option_count; ++i) {
    if (std::strcmp(options[i], "--offload-arch=gfx90a") == 0) return compile(*program, kAmdArchitecture, false);
  }
  program->log = "emulated HIPRTC: no --offload-arch=gfx90a";
  return kInvalidOption;
}
EMULATED_API int hiprtcGetProgramLogSize(_nvrtcProgram* program, size_t* bytes) {
  return nvrtcGetProgramLogSize(program, bytes);
}
EMULATED_API int hiprtcGetProgramLog(_nvrtcProgram* program, char* text) {
  return nvrtcGetProgramLog(program, text);
}
EMULATED_API int hiprtcGetCodeSize(_nvrtcProgram* program, size_t* bytes) {
  return nvrtcGetCUBINSize(program, bytes);
}
EMULATED_API int hiprtcGetCode(_nvrtcProgram* program, char* code) {
  return nvrtcGetCUBIN(program, code);
}
