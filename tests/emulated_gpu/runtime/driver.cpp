// libcuda.so.1 of the emulated device: the functions that device/cuda/driver_table.h asks for. Streams run their work
// at once, so every call has finished when it returns.
#include "tests/emulated_gpu/runtime/driver.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tests/emulated_gpu/runtime/memory.h"
#include "tests/emulated_gpu/runtime/tensor_map.h"

using namespace emulated;
namespace cuda = kernel_pytorch::cuda_device;

#define EMULATED_API extern "C" __attribute__((visibility("default"))) int

namespace emulated {
namespace {

std::string& detail() {
  static auto* text = new std::string;
  return *text;
}
thread_local CUctx_st* context_stack[64];
thread_local int contexts = 0;
CUctx_st primary_context{0};

long environment_number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == 0 ? otherwise : std::strtol(text, nullptr, 10);
}

int read_capability() {
  const char* text = std::getenv("EMULATED_GPU_CAPABILITY");
  if (text == nullptr || *text == 0) return 90;
  if (std::strcmp(text, "gfx90a") == 0) return kAmd;
  char* end = nullptr;
  const long major = std::strtol(text, &end, 10);
  if (*end != '.') return static_cast<int>(major);  // "90"
  return static_cast<int>(major * 10 + std::strtol(end + 1, nullptr, 10));
}

}  // namespace

const Settings& settings() {
  static const Settings settings = {
      .capability = read_capability(),
      .multiprocessors = static_cast<int>(environment_number("EMULATED_GPU_MULTIPROCESSORS", 4)),
      .seed = static_cast<uint64_t>(environment_number("EMULATED_GPU_SEED", 1)),
  };
  return settings;
}

int shared_limit() {
  switch (settings().capability) {
    case kAmd:
      return 64 << 10;
    case 80:
    case 87:
      return 163 << 10;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 << 10;
    case 75:
      return 64 << 10;
    default:
      return 227 << 10;
  }
}

int report(int result, const std::string& text) {
  if (result != kOk) {
    std::fprintf(stderr, "emulated GPU: %s\n", text.c_str());
    detail() = text;
  }
  return result;
}

std::string last_detail() {
  return detail();
}

}  // namespace emulated

EMULATED_API cuInit(unsigned) {
  return kOk;
}
EMULATED_API cuDriverGetVersion(int* version) {
  *version = 13000;
  return kOk;
}
EMULATED_API cuGetErrorName(int result, const char** text) {
  switch (result) {
    case kOk:
      *text = "CUDA_SUCCESS";
      return kOk;
    case kInvalidValue:
      *text = "CUDA_ERROR_INVALID_VALUE";
      return kOk;
    case kOutOfMemory:
      *text = "CUDA_ERROR_OUT_OF_MEMORY";
      return kOk;
    case kInvalidImage:
      *text = "CUDA_ERROR_INVALID_IMAGE";
      return kOk;
    case kInvalidHandle:
      *text = "CUDA_ERROR_INVALID_HANDLE";
      return kOk;
    case kNotFound:
      *text = "CUDA_ERROR_NOT_FOUND";
      return kOk;
    case kIllegalAddress:
      *text = "CUDA_ERROR_ILLEGAL_ADDRESS";
      return kOk;
    case kLaunchOutOfResources:
      *text = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
      return kOk;
    case kLaunchFailed:
      *text = "CUDA_ERROR_LAUNCH_FAILED";
      return kOk;
    case kCaptureUnsupported:
      *text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
      return kOk;
    case kCaptureImplicit:
      *text = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
      return kOk;
    case kInvalidClusterSize:
      *text = "CUDA_ERROR_INVALID_CLUSTER_SIZE";
      return kOk;
    default:
      return kInvalidValue;
  }
}
EMULATED_API cuGetErrorString(int result, const char** text) {
  if (result == kOk) {
    *text = "no error";
    return kOk;
  }
  static std::string kept;
  kept = last_detail().empty() ? "no detail" : last_detail();
  *text = kept.c_str();
  return kOk;
}

EMULATED_API cuDeviceGetCount(int* count) {
  *count = 1;
  return kOk;
}
EMULATED_API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kOk : kInvalidValue;
}
EMULATED_API cuDeviceGetName(char* name, int length, int) {
  const bool is_amd = settings().capability == kAmd;
  std::snprintf(name, static_cast<size_t>(length), is_amd ? "Emulated gfx90a" : "Emulated sm_%d",
                settings().capability);
  return kOk;
}
EMULATED_API cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{16} << 30;
  return kOk;
}
EMULATED_API cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case cuda::kClockKilohertz:
    case cuda::kMemoryClockKilohertz:
      *value = 1000000;
      return kOk;
    case cuda::kMultiprocessors:
      *value = settings().multiprocessors;
      return kOk;
    case cuda::kMemoryBusBits:
      *value = 1024;
      return kOk;
    case cuda::kL2Bytes:
      *value = 32 << 20;
      return kOk;
    case cuda::kComputeMajor:
      *value = settings().capability / 10;
      return kOk;
    case cuda::kComputeMinor:
      *value = settings().capability % 10;
      return kOk;
    case cuda::kSharedBytesPerMultiprocessor:
      *value = shared_limit() + 1024;
      return kOk;
    case cuda::kSharedBytesPerBlockOptIn:
      *value = shared_limit();
      return kOk;
    default:
      return report(kInvalidValue, "cuDeviceGetAttribute: attribute " + std::to_string(attribute) + " is not emulated");
  }
}

EMULATED_API cuDevicePrimaryCtxRetain(CUctx_st** context, int) {
  ++primary_context.retained;
  *context = &primary_context;
  return kOk;
}
EMULATED_API cuCtxGetCurrent(CUctx_st** context) {
  *context = contexts == 0 ? nullptr : context_stack[contexts - 1];
  return kOk;
}
EMULATED_API cuCtxPushCurrent_v2(CUctx_st* context) {
  if (contexts == 64) return report(kInvalidValue, "cuCtxPushCurrent: 64 contexts deep");
  context_stack[contexts++] = context;
  return kOk;
}
EMULATED_API cuCtxPopCurrent_v2(CUctx_st** context) {
  if (contexts == 0) return report(kInvalidValue, "cuCtxPopCurrent without a context");
  *context = context_stack[--contexts];
  return kOk;
}

EMULATED_API cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  void* memory = bytes == 0 ? nullptr : emulated::allocate(bytes);
  if (memory == nullptr) return report(kOutOfMemory, "allocating " + std::to_string(bytes) + " bytes");
  *address = reinterpret_cast<unsigned long long>(memory);
  return kOk;
}
EMULATED_API cuMemFree_v2(unsigned long long address) {
  const std::string problem = emulated::release(reinterpret_cast<void*>(address));
  if (problem.empty()) return kOk;
  report(kInvalidValue, problem);
  std::abort();  // the caller may not look at the result of a free
}
EMULATED_API cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = size_t{16} << 30;
  *free_bytes = *total_bytes - std::min(*total_bytes, allocated_bytes());
  return kOk;
}
EMULATED_API cuMemcpyHtoDAsync_v2(unsigned long long target, const void* source, size_t bytes, CUstream_st* stream) {
  return submit(stream, [=] {
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    return kOk;
  });
}
EMULATED_API cuMemcpyDtoHAsync_v2(void* target, unsigned long long source, size_t bytes, CUstream_st* stream) {
  return submit(stream, [=] {
    std::memcpy(target, reinterpret_cast<const void*>(source), bytes);
    return kOk;
  });
}
EMULATED_API cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, size_t bytes,
                                  CUstream_st* stream) {
  return submit(stream, [=] {
    std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
    return kOk;
  });
}
EMULATED_API cuMemsetD8Async(unsigned long long target, unsigned char value, size_t count, CUstream_st* stream) {
  return submit(stream, [=] {
    std::memset(reinterpret_cast<void*>(target), value, count);
    return kOk;
  });
}

EMULATED_API cuTensorMapEncodeTiled(uint64_t* words, int type, unsigned rank, void* address, const uint64_t* sizes,
                                    const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                                    int interleave, int swizzle, int, int fill) {
  TensorMap map{};
  map.mark = kTensorMapMark;
  map.rank = rank;
  map.address = reinterpret_cast<uint64_t>(address);
  map.element_bytes = type == 0 ? 1 : type == 7 ? 4 : 2;
  map.swizzle_bytes = swizzle == 3 ? 128 : swizzle == 2 ? 64 : 0;
  const auto refuse = [](const std::string& why) { return report(kInvalidValue, "cuTensorMapEncodeTiled: " + why); };
  if (rank < 1 || rank > 5) return refuse("rank " + std::to_string(rank));
  if (map.swizzle_bytes == 0 || interleave != 0 || fill != 0) return refuse("swizzle, interleave or fill not emulated");
  if (map.address % 16 != 0) return refuse("the address is no multiple of 16");
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32) return refuse("size " + std::to_string(sizes[i]));
    if (box[i] == 0 || box[i] > 256) return refuse("box " + std::to_string(box[i]));
    if (element_strides[i] != 1) return refuse("element strides are not emulated");
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t{1} << 40)) {
      return refuse("stride " + std::to_string(strides[i - 1]));
    }
    map.sizes[i] = sizes[i];
    if (i > 0) map.strides[i - 1] = strides[i - 1];
    map.box[i] = static_cast<uint16_t>(box[i]);
  }
  const unsigned row_bytes = box[0] * map.element_bytes;
  if (row_bytes % 16 != 0 || row_bytes > map.swizzle_bytes) {
    return refuse("box rows of " + std::to_string(row_bytes) + " bytes with a swizzle of " +
                  std::to_string(map.swizzle_bytes));
  }
  std::memset(words, 0, 128);
  std::memcpy(words, &map, sizeof(map));
  return kOk;
}
