#include "kernel_pytorch/device/cuda/hip_driver.h"

#include <dlfcn.h>
#include <elf.h>

#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernel_pytorch/base/options.h"

struct ihipModule_t;

namespace kernel_pytorch::cuda_device {
namespace {

constexpr Result kInvalidValue = 1, kNotFound = 500, kNotSupported = 801;

// X(member, symbol, parameters)
#define KP_HIP_FUNCTIONS(X)                                                                                       \
  X(driver_version, "hipDriverGetVersion", (int* version))                                                        \
  X(get_device, "hipGetDevice", (int* device))                                                                    \
  X(set_device, "hipSetDevice", (int device))                                                                     \
  X(attribute, "hipDeviceGetAttribute", (int* value, int attribute, int device))                                  \
  X(module_load, "hipModuleLoadData", (ihipModule_t * *module, const void* code))                                 \
  X(module_unload, "hipModuleUnload", (ihipModule_t * module))                                                    \
  X(module_function, "hipModuleGetFunction", (CUfunc_st * *function, ihipModule_t * module, const char* name))    \
  X(function_attribute, "hipFuncGetAttribute", (int* value, FunctionAttribute attribute, CUfunc_st* function))    \
  X(launch, "hipModuleLaunchKernel",                                                                              \
    (CUfunc_st * function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, CUstream_st* stream, void** arguments, void** extra))

struct Hip {
#define KP_HIP_MEMBER(member, symbol, parameters) Result(*member) parameters = nullptr;
  KP_HIP_FUNCTIONS(KP_HIP_MEMBER)
#undef KP_HIP_MEMBER
  const char* (*error_name)(Result result) = nullptr;
  const char* (*error_string)(Result result) = nullptr;
  Result (*properties)(void* properties, int device) = nullptr;
};
Hip hip;  // of the one table of the process

// 50221153, which is 5.2.21153, as CUDA writes it.
Result driver_version(int* version) {
  const Result result = hip.driver_version(version);
  *version = *version / 10'000'000 * 1000 + *version / 100'000 % 100 * 10;
  return result;
}

Result error_name(Result result, const char** text) {
  *text = hip.error_name(result);
  return kSuccess;
}

Result error_string(Result result, const char** text) {
  *text = result == kNotSupported ? "AMD GPUs have no clusters of blocks and no tensor maps" : hip.error_string(result);
  return kSuccess;
}

Result device_attribute(int* value, DeviceAttribute attribute, int device) {
  const auto read = [&](int number) { return hip.attribute(value, number, device); };  // hipDeviceAttribute_t
  switch (attribute) {
    case kClockKilohertz:
      return read(5);
    case kL2Bytes:
      return read(19);
    case kMemoryBusBits:
      return read(59);
    case kMemoryClockKilohertz:
      return read(60);
    case kMultiprocessors:
      return read(63);
    case kSharedBytesPerBlockOptIn:
      return read(74);
    case kWarpLanes:
      return read(87);
    case kSharedBytesPerMultiprocessor:
      return read(10002);
    case kComputeMajor:
    case kComputeMinor:
      *value = 0;  // HIP's numbers are those of the gfx name: 9.0 is a gfx90a, and no Hopper
      return kSuccess;
  }
  return kNotSupported;
}

// The structure of properties has another layout since ROCm 6. Its last text that begins with "gfx" is the name of the
// architecture ("gfx90a:sramecc+:xnack-") in both; what follows the colon may be left out for code of any setting.
Result gfx_name(char* name, int length, int device) {
  std::string bytes(8192, '\0');
  if (const Result result = hip.properties(bytes.data(), device); result != kSuccess) return result;
  const size_t at = bytes.rfind("gfx");
  if (at == std::string::npos) return kNotFound;
  const std::string found = bytes.substr(at, bytes.find_first_of(std::string_view(":\0", 2), at) - at);
  name[found.copy(name, static_cast<size_t>(length) - 1)] = '\0';
  return kSuccess;
}

// HIP has a current device in place of contexts: a context here is the device's number and one.
CUctx_st* context_of(int device) {
  return reinterpret_cast<CUctx_st*>(intptr_t{device} + 1);
}
int device_of(CUctx_st* context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context) - 1);
}
// Devices that were current before this thread's pushes. Without a destructor: memory is released by static objects
// too.
struct Pushes {
  int before[16];
  size_t count;
};
constinit thread_local Pushes pushes{};

Result primary_context_retain(CUctx_st** context, int device) {
  *context = context_of(device);
  return kSuccess;
}

Result context_current(CUctx_st** context) {
  int device = 0;
  const Result result = hip.get_device(&device);
  *context = context_of(device);
  return result;
}

Result context_push(CUctx_st* context) {
  if (pushes.count == std::size(pushes.before)) return kInvalidValue;
  if (const Result result = hip.get_device(&pushes.before[pushes.count]); result != kSuccess) return result;
  if (const Result result = hip.set_device(device_of(context)); result != kSuccess) return result;
  ++pushes.count;
  return kSuccess;
}

Result context_pop(CUctx_st** context) {
  const Result result = context_current(context);
  if (result != kSuccess) return result;
  return hip.set_device(pushes.before[--pushes.count]);
}

// A module of HIP's is loaded on one device: the code is kept, and loaded on each at its first function there.
struct Library;
struct Kernel {
  Library* library;
  std::string name;
};
struct Library {
  std::string code;
  std::mutex mutex;
  std::map<int, ihipModule_t*> modules;
  std::deque<Kernel> kernels;
};
Library* library_of(CUlib_st* library) {
  return reinterpret_cast<Library*>(library);
}

Result library_load_data(CUlib_st** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  Elf64_Ehdr header;
  std::memcpy(&header, code, sizeof(header));
  // No one says how long it is. The table of sections is the last part of a code object.
  const size_t bytes = header.e_shoff + size_t{header.e_shentsize} * header.e_shnum;
  auto loaded = std::make_unique<Library>();
  loaded->code.assign(static_cast<const char*>(code), bytes);
  *library = reinterpret_cast<CUlib_st*>(loaded.release());
  return kSuccess;
}

Result library_unload(CUlib_st* library) {
  for (const auto& [device, module] : library_of(library)->modules) hip.module_unload(module);
  delete library_of(library);
  return kSuccess;
}

Result library_kernel(CUkern_st** kernel, CUlib_st* library, const char* name) {
  Library& own = *library_of(library);
  const std::lock_guard lock(own.mutex);
  *kernel = reinterpret_cast<CUkern_st*>(&own.kernels.emplace_back(Kernel{&own, name}));
  return kSuccess;
}

Result kernel_function(CUfunc_st** function, CUkern_st* kernel) {
  const Kernel& own = *reinterpret_cast<const Kernel*>(kernel);
  int device = 0;
  if (const Result result = hip.get_device(&device); result != kSuccess) return result;
  const std::lock_guard lock(own.library->mutex);
  ihipModule_t*& module = own.library->modules[device];
  if (module == nullptr) {
    if (const Result result = hip.module_load(&module, own.library->code.data()); result != kSuccess) return result;
  }
  return hip.module_function(function, module, own.name.c_str());
}

Result kernel_attribute(int* value, FunctionAttribute attribute, CUkern_st* kernel, int) {
  CUfunc_st* function = nullptr;
  if (const Result result = kernel_function(&function, kernel); result != kSuccess) return result;
  return hip.function_attribute(value, attribute, function);  // the numbers that we ask for are CUDA's
}

// All of LDS is a block's without asking; a launch that wants more is refused.
Result kernel_set_attribute(FunctionAttribute attribute, int, CUkern_st*, int) {
  return attribute == kMaximumDynamicSharedBytes ? kSuccess : kNotSupported;
}

Result launch_kernel(const LaunchConfiguration* shape, CUfunc_st* function, void** arguments, void** extra) {
  if (shape->attribute_count != 0) return kNotSupported;  // clusters, dependent launches
  return hip.launch(function, shape->grid[0], shape->grid[1], shape->grid[2], shape->block[0], shape->block[1],
                    shape->block[2], shape->shared_bytes, shape->stream, arguments, extra);
}

Result tensor_map_encode(uint64_t*, TensorMapType, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*,
                         const unsigned*, TensorMapInterleave, TensorMapSwizzle, TensorMapPromotion, TensorMapFill) {
  return kNotSupported;
}

}  // namespace

void* open_hip() {
  const std::string root = environment("ROCM_PATH");
  for (const int flag : {RTLD_NOLOAD, 0}) {
    for (const char* name : {"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"}) {
      for (const std::string& path : {std::string(name), concat(root, "/lib/", name)}) {
        if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flag)) return library;
      }
    }
  }
  return nullptr;
}

const char* resolve_hip(void* library, DriverTable& table) {
  const char* missing = nullptr;
  const auto resolve = [&](auto& member, const char* symbol) {
    if (*symbol == '\0') return;
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(dlsym(library, symbol));
    if (member == nullptr && missing == nullptr) missing = symbol;
  };
#define KP_ROW_RESOLVE(member, symbol, hip_symbol, parameters) resolve(table.member, hip_symbol);
  KP_DRIVER_FUNCTIONS(KP_ROW_RESOLVE)
#undef KP_ROW_RESOLVE
#define KP_HIP_RESOLVE(member, symbol, parameters) resolve(hip.member, symbol);
  KP_HIP_FUNCTIONS(KP_HIP_RESOLVE)
#undef KP_HIP_RESOLVE
  resolve(hip.error_name, "hipGetErrorName");
  resolve(hip.error_string, "hipGetErrorString");
  const bool is_new = dlsym(library, "hipGetDevicePropertiesR0600") != nullptr;  // ROCm 6
  resolve(hip.properties, is_new ? "hipGetDevicePropertiesR0600" : "hipGetDeviceProperties");
  table.driver_version = driver_version;
  table.error_name = error_name;
  table.error_string = error_string;
  table.device_attribute = device_attribute;
  table.gfx_name = gfx_name;
  table.primary_context_retain = primary_context_retain;
  table.context_current = context_current;
  table.context_push = context_push;
  table.context_pop = context_pop;
  table.library_load_data = library_load_data;
  table.library_unload = library_unload;
  table.library_kernel = library_kernel;
  table.kernel_function = kernel_function;
  table.kernel_attribute = kernel_attribute;
  table.kernel_set_attribute = kernel_set_attribute;
  table.launch_kernel = launch_kernel;
  table.tensor_map_encode = tensor_map_encode;
  return missing;
}

}  // namespace kernel_pytorch::cuda_device
