// A program of the emulated NVRTC or HIPRTC.
#pragma once

#include <string>
#include <utility>
#include <vector>

#define EMULATED_API extern "C" __attribute__((visibility("default")))

struct _nvrtcProgram {
  std::string source, name;
  std::vector<std::pair<std::string, std::string>> headers;  // name, text
  std::string entry, lowered_name;
  std::string metadata;  // declarations that end the source
  std::string log, code;
};

namespace emulated {

enum Result : int { kOk = 0, kInvalidInput = 3, kInvalidOption = 5, kCompilation = 6, kNameNotValid = 10 };

inline constexpr int kAmdArchitecture = 0;
int compile(_nvrtcProgram& program, int architecture, bool is_specific);  // 900; kAmdArchitecture

}  // namespace emulated

EMULATED_API int nvrtcAddNameExpression(_nvrtcProgram* program, const char* name);
EMULATED_API const char* nvrtcGetErrorString(int result);
EMULATED_API int nvrtcVersion(int* major, int* minor);
EMULATED_API int nvrtcCreateProgram(_nvrtcProgram** program, const char* source, const char* name, int header_count,
                                    const char* const* headers, const char* const* include_names);
EMULATED_API int nvrtcDestroyProgram(_nvrtcProgram** program);
EMULATED_API int nvrtcGetProgramLogSize(_nvrtcProgram* program, size_t* bytes);
EMULATED_API int nvrtcGetProgramLog(_nvrtcProgram* program, char* text);
EMULATED_API int nvrtcGetCUBINSize(_nvrtcProgram* program, size_t* bytes);
EMULATED_API int nvrtcGetCUBIN(_nvrtcProgram* program, char* code);
