// libamdhip64 of the emulated device, in the same library: with EMULATED_GPU_CAPABILITY=gfx90a it is an AMD GPU.
// Streams, memory and graphs are those of the emulated CUDA driver; here is what HIP has another function for.
#include <cstdlib>
#include <cstring>

#include "tests/emulated_gpu/runtime/driver.h"

using namespace emulated;
namespace cuda = kernel_pytorch::cuda_device;

#define EMULATED_API extern "C" __attribute__((visibility("default")))

// A function of HIP's that has CUDA's parameters is CUDA's: the list of these is the one that the library asks for, and
// its symbols are texts, of which the assembler alone makes functions.
#define EMULATED_SAME(member, symbol, hip_symbol, parameters) \
  asm(".ifnc \"" hip_symbol                                   \
      "\", \"\"\n"                                            \
      ".globl " hip_symbol                                    \
      "\n"                                                    \
      ".type " hip_symbol ", @function\n" hip_symbol ": jmp " symbol "@PLT\n.endif");
asm(".text");
KP_DRIVER_FUNCTIONS(EMULATED_SAME)
#undef EMULATED_SAME

extern "C" {
int cuGetErrorName(int result, const char** text);
int cuGetErrorString(int result, const char** text);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuLibraryLoadData(CUlib_st** library, const void* code, int*, void**, unsigned, int*, void**, unsigned);
int cuLibraryUnload(CUlib_st* library);
int cuLibraryGetKernel(CUkern_st** kernel, CUlib_st* library, const char* name);
int cuKernelGetAttribute(int* value, int attribute, CUkern_st* kernel, int device);
}

EMULATED_API int hipDriverGetVersion(int* version) {
  *version = 60'200'000;  // 6.2
  return kOk;
}
EMULATED_API const char* hipGetErrorName(int result) {
  const char* text = "hipErrorUnknown";
  cuGetErrorName(result, &text);
  return text;
}
EMULATED_API const char* hipGetErrorString(int result) {
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  return text;
}

EMULATED_API int hipGetDevice(int* device) {
  *device = 0;
  return kOk;
}
EMULATED_API int hipSetDevice(int device) {
  return device == 0 ? kOk : report(kInvalidValue, "hipSetDevice: there is one device");
}
// hipDeviceAttribute_t
EMULATED_API int hipDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 5:
      return cuDeviceGetAttribute(value, cuda::kClockKilohertz, device);
    case 19:
      return cuDeviceGetAttribute(value, cuda::kL2Bytes, device);
    case 59:
      return cuDeviceGetAttribute(value, cuda::kMemoryBusBits, device);
    case 60:
      return cuDeviceGetAttribute(value, cuda::kMemoryClockKilohertz, device);
    case 63:
      return cuDeviceGetAttribute(value, cuda::kMultiprocessors, device);
    case 74:
    case 10002:
      *value = shared_limit();
      return kOk;
    case 87:
      *value = 64;
      return kOk;
    default:
      return report(kInvalidValue, "hipDeviceGetAttribute: " + std::to_string(attribute) + " is not emulated");
  }
}
// The names where ROCm 6 has them; nothing else.
EMULATED_API int hipGetDevicePropertiesR0600(char* properties, int) {
  std::strcpy(properties, "Emulated gfx90a");
  std::strcpy(properties + 1160, "gfx90a:sramecc+:xnack-");
  return kOk;
}

EMULATED_API int hipModuleLoadData(CUlib_st** module, const void* code) {
  return cuLibraryLoadData(module, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
}
EMULATED_API int hipModuleUnload(CUlib_st* module) {
  return cuLibraryUnload(module);
}
EMULATED_API int hipModuleGetFunction(CUkern_st** function, CUlib_st* module, const char* name) {
  return cuLibraryGetKernel(function, module, name);
}
EMULATED_API int hipFuncGetAttribute(int* value, int attribute, CUkern_st* function) {
  return cuKernelGetAttribute(value, attribute, function, 0);
}
EMULATED_API int hipModuleLaunchKernel(CUkern_st* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                       CUstream_st* stream, void** arguments, void**) {
  if (uint64_t{grid_x} * block_x > 0xffffffffu) {
    return report(kInvalidValue, function->name + ": a grid of more than 2^32 threads");
  }
  // All of it without asking.
  function->dynamic_bytes = static_cast<unsigned>(shared_limit()) - function->table->static_shared_bytes;
  return launch({.grid = {grid_x, grid_y, grid_z},
                 .block = {block_x, block_y, block_z},
                 .shared_bytes = shared_bytes,
                 .stream = stream,
                 .attributes = nullptr,
                 .attribute_count = 0},
                *function, arguments);
}
