// The functions of libcuda.so.1 that we call, in our own declarations, resolved once by dlopen and dlsym. The types and
// numbers are those of the driver's stable binary interface (CUDA 12.0 and later); no toolkit header is needed.
// With KERNEL_PYTORCH_AMD=1 the table is filled from libamdhip64 (hip_driver.h), whose functions are much alike.
// Private to device/cuda and to tests that need a call that driver.h does not offer (graphs).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel_pytorch/base/error.h"

struct CUctx_st;
struct CUlib_st;
struct CUkern_st;
struct CUfunc_st;
struct CUevent_st;
struct CUstream_st;
struct CUgraph_st;
struct CUgraphExec_st;

namespace kernel_pytorch::cuda_device {

using Result = int;
using DeviceAddress = unsigned long long;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorStreamCaptureImplicit = 906;

struct LaunchAttribute {
  enum Id : int { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };
  Id id;
  int padding;
  union {
    unsigned cluster[3];
    int flag;
    char bytes[64];
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfiguration {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream_st* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfiguration) == 56);

enum DeviceAttribute : int {
  kWarpLanes = 10,
  kClockKilohertz = 13,
  kMultiprocessors = 16,
  kMemoryClockKilohertz = 36,
  kMemoryBusBits = 37,
  kL2Bytes = 38,
  kComputeMajor = 75,
  kComputeMinor = 76,
  kSharedBytesPerMultiprocessor = 81,
  kSharedBytesPerBlockOptIn = 97,
};
enum FunctionAttribute : int {
  kStaticSharedBytes = 1,
  kLocalBytes = 3,
  kRegisters = 4,
  kMaximumDynamicSharedBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};
enum class TensorMapType : int { kBytes = 0, kFloat16 = 6, kFloat32 = 7, kBFloat16 = 9 };
enum class TensorMapInterleave : int { kNone = 0 };
enum class TensorMapSwizzle : int { k64Bytes = 2, k128Bytes = 3 };
enum class TensorMapPromotion : int { k256Bytes = 3 };
enum class TensorMapFill : int { kZeros = 0 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };

// X(member, symbol, HIP's symbol, parameters): one row per function; symbols carry the version whose parameters are
// written here. HIP's has the same parameters; where it has none like it ("") hip_driver.cpp has a function.
#define KP_DRIVER_FUNCTIONS(X)                                                                                         \
  X(init, "cuInit", "hipInit", (unsigned flags))                                                                       \
  X(driver_version, "cuDriverGetVersion", "", (int* version))                                                          \
  X(error_name, "cuGetErrorName", "", (Result result, const char** text))                                              \
  X(error_string, "cuGetErrorString", "", (Result result, const char** text))                                          \
  X(device_count, "cuDeviceGetCount", "hipGetDeviceCount", (int* count))                                               \
  X(device_get, "cuDeviceGet", "hipDeviceGet", (int* device, int ordinal))                                             \
  X(device_name, "cuDeviceGetName", "hipDeviceGetName", (char* name, int length, int device))                          \
  X(device_total_memory, "cuDeviceTotalMem_v2", "hipDeviceTotalMem", (size_t * bytes, int device))                     \
  X(device_attribute, "cuDeviceGetAttribute", "", (int* value, DeviceAttribute attribute, int device))                 \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", "", (CUctx_st * *context, int device))                         \
  X(context_current, "cuCtxGetCurrent", "", (CUctx_st * *context))                                                     \
  X(context_push, "cuCtxPushCurrent_v2", "", (CUctx_st * context))                                                     \
  X(context_pop, "cuCtxPopCurrent_v2", "", (CUctx_st * *context))                                                      \
  X(library_load_data, "cuLibraryLoadData", "",                                                                        \
    (CUlib_st * *library, const void* code, int* jit_options, void** jit_values, unsigned jit_count,                   \
     int* library_options, void** library_values, unsigned library_count))                                             \
  X(library_unload, "cuLibraryUnload", "", (CUlib_st * library))                                                       \
  X(library_kernel, "cuLibraryGetKernel", "", (CUkern_st * *kernel, CUlib_st * library, const char* name))             \
  X(kernel_function, "cuKernelGetFunction", "", (CUfunc_st * *function, CUkern_st * kernel))                           \
  X(kernel_attribute, "cuKernelGetAttribute", "",                                                                      \
    (int* value, FunctionAttribute attribute, CUkern_st* kernel, int device))                                          \
  X(kernel_set_attribute, "cuKernelSetAttribute", "",                                                                  \
    (FunctionAttribute attribute, int value, CUkern_st* kernel, int device))                                           \
  X(launch_kernel, "cuLaunchKernelEx", "",                                                                             \
    (const LaunchConfiguration* configuration, CUfunc_st* function, void** arguments, void** extra))                   \
  X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",    \
    (int* blocks, CUfunc_st* function, int block_threads, size_t shared_bytes))                                        \
  X(tensor_map_encode, "cuTensorMapEncodeTiled", "",                                                                   \
    (uint64_t * map, TensorMapType type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides, \
     const unsigned* box, const unsigned* element_strides, TensorMapInterleave interleave, TensorMapSwizzle swizzle,   \
     TensorMapPromotion promotion, TensorMapFill fill))                                                                \
  X(memory_allocate, "cuMemAlloc_v2", "hipMalloc", (DeviceAddress * address, size_t bytes))                            \
  X(memory_free, "cuMemFree_v2", "hipFree", (DeviceAddress address))                                                   \
  X(memory_info, "cuMemGetInfo_v2", "hipMemGetInfo", (size_t * free_bytes, size_t * total_bytes))                      \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync",                                                      \
    (DeviceAddress target, const void* source, size_t bytes, CUstream_st* stream))                                     \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync",                                                        \
    (void* target, DeviceAddress source, size_t bytes, CUstream_st* stream))                                           \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync",                                                      \
    (DeviceAddress target, DeviceAddress source, size_t bytes, CUstream_st * stream))                                  \
  X(fill_bytes, "cuMemsetD8Async", "hipMemsetD8Async",                                                                 \
    (DeviceAddress target, unsigned char value, size_t count, CUstream_st* stream))                                    \
  X(stream_create, "cuStreamCreate", "hipStreamCreateWithFlags", (CUstream_st * *stream, unsigned flags))              \
  X(stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy", (CUstream_st * stream))                                  \
  X(stream_synchronize, "cuStreamSynchronize", "hipStreamSynchronize", (CUstream_st * stream))                         \
  X(stream_is_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing", (CUstream_st * stream, int* status))           \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode",                  \
    (CaptureMode * mode))                                                                                              \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", "hipStreamBeginCapture",                                          \
    (CUstream_st * stream, CaptureMode mode))                                                                          \
  X(stream_end_capture, "cuStreamEndCapture", "hipStreamEndCapture", (CUstream_st * stream, CUgraph_st * *graph))      \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags",                                  \
    (CUgraphExec_st * *executable, CUgraph_st * graph, unsigned long long flags))                                      \
  X(graph_launch, "cuGraphLaunch", "hipGraphLaunch", (CUgraphExec_st * executable, CUstream_st * stream))              \
  X(graph_destroy, "cuGraphDestroy", "hipGraphDestroy", (CUgraph_st * graph))                                          \
  X(graph_executable_destroy, "cuGraphExecDestroy", "hipGraphExecDestroy", (CUgraphExec_st * executable))              \
  X(event_create, "cuEventCreate", "hipEventCreateWithFlags", (CUevent_st * *event, unsigned flags))                   \
  X(event_destroy, "cuEventDestroy_v2", "hipEventDestroy", (CUevent_st * event))                                       \
  X(event_record, "cuEventRecord", "hipEventRecord", (CUevent_st * event, CUstream_st * stream))                       \
  X(event_synchronize, "cuEventSynchronize", "hipEventSynchronize", (CUevent_st * event))                              \
  X(event_elapsed, "cuEventElapsedTime", "hipEventElapsedTime",                                                        \
    (float* milliseconds, CUevent_st* start, CUevent_st* end))

struct DriverTable {
#define KP_DRIVER_MEMBER(member, symbol, hip_symbol, parameters) Result(*member) parameters = nullptr;
  KP_DRIVER_FUNCTIONS(KP_DRIVER_MEMBER)
#undef KP_DRIVER_MEMBER
  Result (*function_load)(CUfunc_st* function) = nullptr;            // since 12.4; null before, and with HIP
  Result (*gfx_name)(char* name, int length, int device) = nullptr;  // HIP alone: "gfx90a"
  int version = 0;                                                   // 13000 for 13.0
};

// The initialised driver, or null; then driver_absence() says why ("no CUDA device: libcuda.so.1 not found ...").
const DriverTable* driver();
const std::string& driver_absence();
// Throws kDevice with the absence where there is none.
const DriverTable& require_driver();

// "CUDA_ERROR_INVALID_VALUE (invalid argument)", with the cure where we know one.
std::string error_text(Result result);

template <class... What>
void check(Result result, const What&... what) {
  if (result != kSuccess) [[unlikely]]
    fail(ErrorCode::kDevice, what..., ": ", error_text(result));
}

// Lets this thread make calls that a capture of any thread would otherwise forbid (loading, attributes); none of them
// belongs into the graph, so the capture goes on untouched.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DriverTable& driver);
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const DriverTable& driver_;
  CaptureMode mode_ = kCaptureRelaxed;
};

}  // namespace kernel_pytorch::cuda_device
