// Kernels compiled ahead of time: the files of the cubin cache under names that do not tell the NVRTC, so that a
// machine without one finds them, and an index for people.
#include <algorithm>
#include <filesystem>
#include <mutex>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cpu/thread_pool.h"
#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/jit/cubin_cache.h"
#include "kernel_pytorch/jit/hiprtc.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/jit/nvrtc.h"
#include "kernel_pytorch/jit/sources.h"

namespace kernel_pytorch::jit {
namespace {

void write_or_fail(const std::string& path, std::string_view bytes) {
  std::string problem;
  if (!write_file_atomically(path, bytes, problem)) fail(ErrorCode::kDevice, "jit: writing the bundle: ", problem);
}

// What a device will ask for: generic code does not carry the "a".
std::string target_of(const DeviceCode& code, const std::string& architecture) {
  return is_amd(architecture) ? architecture : architecture_for(code, capability_of(architecture));
}

std::string shared_obstacle(const DeviceCode& code, const CudaCapability& gpu, const std::string& architecture) {
  const int kib = gpu.shared_kib_per_block;
  if (kib < code.least_shared_kib) {
    return concat("blocks of ", architecture, " have ", kib, " KiB of shared memory, and its tiles are larger");
  }
  if (kib > code.most_shared_kib) {
    return concat("blocks of ", architecture, " have ", kib, " KiB of shared memory, and take larger tiles");
  }
  return "";
}

}  // namespace

std::string obstacle(const DeviceCode& code, const std::string& architecture) {
  const std::string needed = concat("sm_", code.minimum_capability);
  if (is_amd(architecture)) {
    if (const std::string reason = shared_obstacle(code, kAmdGpu, architecture); !reason.empty()) return reason;
    if (code.architecture_specific) return concat("it is written for ", needed, "a alone");
    if (code.minimum_capability >= 90) return concat("it needs what ", needed, " has (clusters, the copy engine)");
    const std::string missing = hip_closure_of(code).missing;
    return missing.empty() ? "" : concat("hip/ptx has no ", missing);
  }
  const int capability = capability_of(architecture);
  if (code.architecture_specific) {
    const bool is_its_own = is_architecture_specific(architecture) && capability == code.minimum_capability;
    return is_its_own ? "" : concat("it is written for ", needed, "a alone");
  }
  if (capability < code.minimum_capability) return concat("it needs ", needed);
  return shared_obstacle(code, cuda_capability(capability), architecture);
}

bool can_run(const DeviceCode& code, const std::string& architecture) {
  return obstacle(code, architecture).empty();
}

std::string bundle_key(const DeviceCode& code, const std::string& architecture) {
  return content_key(code, target_of(code, architecture));
}

CompiledKernel compile(const DeviceCode& code, const std::string& architecture) {
  return is_amd(architecture) ? run_hiprtc(code, architecture) : run_nvrtc(code, architecture);
}

std::vector<CompiledKernel> write_bundle(const std::vector<DeviceCode>& codes, const std::string& architecture,
                                         const std::string& directory,
                                         void (*progress)(const CompiledKernel&, int done, int total)) {
  std::vector<DeviceCode> wanted;
  for (const DeviceCode& code : codes) {
    if (can_run(code, architecture) && std::find(wanted.begin(), wanted.end(), code) == wanted.end()) {
      wanted.push_back(code);
    }
  }
  if (wanted.empty()) {
    KP_CHECK(!codes.empty(), "jit: there is nothing to compile: these ops have no CUDA kernels");
    if (is_amd(architecture)) {
      fail(ErrorCode::kInvalidArgument, "jit: none of the ", codes.size(), " kernels has a form for ", architecture,
           ": ", codes[0].entry, ": ", obstacle(codes[0], architecture));
    }
    const auto least = std::ranges::min_element(codes, {}, &DeviceCode::minimum_capability);
    fail(ErrorCode::kInvalidArgument, "jit: none of the ", codes.size(), " kernels runs on ", architecture,
         "; the least that they need is sm_", least->minimum_capability, ", as in --arch sm_80 or sm_90a");
  }
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) fail(ErrorCode::kDevice, "jit: creating the bundle's folder ", directory, ": ", error.message());
  std::vector<CompiledKernel> compiled(wanted.size());
  std::mutex progress_mutex;
  int done = 0;
  parallel_for(&cpu_device::own_threads(), static_cast<int64_t>(wanted.size()), [&](int64_t i) {
    compiled[i] = compile(wanted[i], target_of(wanted[i], architecture));
    compiled[i].key = bundle_key(wanted[i], architecture);
    const CubinFile file{compiled[i].entry, compiled[i].lowered_name, compiled[i].cubin};
    write_or_fail(concat(directory, "/", compiled[i].key, ".cubin"), encode_cubin_file(file));
    const std::lock_guard lock(progress_mutex);
    ++done;
    if (progress != nullptr) progress(compiled[i], done, static_cast<int>(wanted.size()));
  });
  std::string index = "file\tarchitecture\tregisters\tspill_bytes\tprivate_bytes\tsource\tentry\n";
  for (size_t i = 0; i < wanted.size(); ++i) {
    index += concat(compiled[i].key, ".cubin\t", target_of(wanted[i], architecture), "\t", compiled[i].registers, "\t",
                    compiled[i].spill_bytes, "\t", compiled[i].private_bytes, "\t", wanted[i].source, "\t",
                    wanted[i].entry, "\n");
  }
  write_or_fail(concat(directory, "/index-", architecture, ".tsv"), index);
  return compiled;
}

}  // namespace kernel_pytorch::jit
