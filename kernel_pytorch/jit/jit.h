// From device source to a function that can be launched: embedded sources -> NVRTC or HIPRTC (dlopen, when needed) ->
// cubin, cached on disk by content -> module. See jit/sources.h, jit/nvrtc.h, jit/cubin_cache.h for the steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/device/device_info.h"

struct CUkern_st;

namespace kernel_pytorch::jit {

// The function for this device, compiled and loaded on first use, remembered for the process. Thread-safe; several
// threads or processes that need the same cubin compile it once. Throws kDevice with NVRTC's log and the entry, or with
// how to get an NVRTC; while a stream captures, loading is made safe for the capture or refused with what to do.
// The reference stays valid for good, so a caller may keep it.
CUkern_st* get_kernel(const DeviceCode& code, const DeviceInfo& device, void* stream);

// Hash of a source and of everything it includes, as embedded: part of the tuning key.
uint64_t source_hash(const std::string& source);

struct CompiledKernel {
  std::string key;  // bundle_key: set by write_bundle
  std::string entry;
  std::string lowered_name;
  std::string cubin;      // for AMD's GPUs the code object
  std::string log;        // NVRTC's and ptxas' words, warnings included
  std::string warnings;   // the lines of the log that a release must not have (warnings, serialised wgmma)
  int registers = 0;      // from ptxas; 0 where the driver will finish the compilation (PTX). AMD: vector registers
  int spill_bytes = 0;    // AMD: what went to memory; scalar registers go to lanes of a vector register
  int private_bytes = 0;  // AMD: of a lane in memory, spills and arrays that are indexed at run time
  double seconds = 0;
};

// "sm_90a" for architecture-specific code on capability 90, else "sm_90"; a newer, unknown capability names itself.
std::string architecture_for(const DeviceCode& code, int capability);

// Compiles without a GPU: by NVRTC, or for AMD's "gfx90a" by HIPRTC into a code object. Throws kDevice with the log.
KP_EXPORT CompiledKernel compile(const DeviceCode& code, const std::string& architecture);

// Writes every kernel compiled for the architecture ("sm_90a") into a folder that KERNEL_PYTORCH_BUNDLE can name.
// Code that the architecture cannot run is left out; returns what was compiled. `progress` is called after each one.
KP_EXPORT std::vector<CompiledKernel> write_bundle(const std::vector<DeviceCode>& codes,
                                                   const std::string& architecture, const std::string& directory,
                                                   void (*progress)(const CompiledKernel&, int done, int total));

// "gfx90a": an architecture of AMD's GPUs.
KP_EXPORT bool is_amd(const std::string& architecture);
// Why the architecture cannot run the code; empty where it can. Architecture-specific code (sm_90a) runs on no other,
// not even on a newer one; AMD's GPUs have no form of some instructions.
KP_EXPORT std::string obstacle(const DeviceCode& code, const std::string& architecture);
KP_EXPORT bool can_run(const DeviceCode& code, const std::string& architecture);
// The name of a kernel's file in such a folder, without its ending: a hash of the source, its includes, the entry, the
// options and the architecture.
KP_EXPORT std::string bundle_key(const DeviceCode& code, const std::string& architecture);

struct NvrtcInfo {
  bool found = false;
  int major = 0, minor = 0;
  std::string path;
  std::string how;  // "already loaded", "torch's", "system", "PyPI's nvidia-cuda-nvrtc", "KERNEL_PYTORCH_NVRTC", ...
  std::string absence;  // why there is none, with the cure
};
// Found by file names alone where they tell the version, since loading takes up to 0.3 s; `load` makes sure it works.
KP_EXPORT const NvrtcInfo& nvrtc_info(bool load = false);
struct HiprtcInfo {
  bool found = false;
  std::string version;  // "5.2.21153": of HIP
  std::string path;
  std::string absence;  // why there is none, with the cure
};
// Loads it.
KP_EXPORT const HiprtcInfo& hiprtc_info();
// Folders to look into before wheels and the system are searched; Python names those on sys.path.
KP_EXPORT void set_nvrtc_search_path(const std::string& colon_separated_directories);

struct CubinCacheInfo {
  std::string directory;
  bool writable = false;
  int64_t files = 0;
  int64_t bytes = 0;
};
KP_EXPORT CubinCacheInfo cubin_cache_info();
KP_EXPORT int64_t clear_cubin_cache();  // files removed
struct CubinCheck {
  std::string file;
  std::string problem;  // empty when sound
};
KP_EXPORT std::vector<CubinCheck> verify_cubin_cache();

}  // namespace kernel_pytorch::jit
