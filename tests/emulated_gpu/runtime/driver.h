// The handles of the emulated driver, and work that can run now or be captured.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernel_pytorch/device/cuda/driver_table.h"
#include "tests/emulated_gpu/runtime/machine.h"

using Work = std::function<int()>;

struct CUctx_st {
  int retained;
};
struct CUkern_st {
  const EmulatedKernel* table;
  std::string name;
  unsigned dynamic_bytes = 0;  // granted; 0: the default
  bool large_clusters = false;
};
struct CUlib_st {
  void* handle = nullptr;
  std::string path;
  std::map<std::string, std::unique_ptr<CUkern_st>> kernels;
};
struct CUfunc_st;  // is a CUkern_st
struct CUevent_st {
  std::chrono::steady_clock::time_point time;
  bool is_recorded = false;
};
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st {
  std::vector<Work> work;
};
struct CUstream_st {
  CUgraph_st* capture = nullptr;
};

namespace emulated {

enum Result : int {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kInvalidHandle = 400,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchFailed = 719,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
  kInvalidClusterSize = 912,
};

// Says on stderr and in cuGetErrorString what the number cannot.
int report(int result, const std::string& detail);
std::string last_detail();

// Runs work now, or adds it to the stream's capture.
int submit(CUstream_st* stream, Work work);
// Captures that are under way make calls on the legacy stream fail.
bool is_any_capturing();
void count_capture(int change);

int launch(const kernel_pytorch::cuda_device::LaunchConfiguration& configuration, CUkern_st& kernel, void** arguments);
unsigned dynamic_limit(const CUkern_st& kernel);

}  // namespace emulated
