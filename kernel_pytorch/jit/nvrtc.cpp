// One NVRTC program: the entry's source and all its headers from memory, one name expression, cubin or PTX out.
#include "kernel_pytorch/jit/nvrtc.h"

#include <algorithm>
#include <charconv>
#include <chrono>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/jit/nvrtc_library.h"
#include "kernel_pytorch/jit/program.h"
#include "kernel_pytorch/jit/ptxas_log.h"

namespace kernel_pytorch::jit {
namespace {

struct Architecture {
  bool is_real = true;  // sm_: a cubin; compute_: PTX for the driver to finish
  int capability = 0;
  char suffix = 0;  // 'a' or 'f', or none
};

Architecture parse_architecture(const std::string& text) {
  Architecture architecture;
  std::string_view rest = text;
  architecture.is_real = rest.starts_with("sm_");
  const bool known_prefix = architecture.is_real || rest.starts_with("compute_");
  rest.remove_prefix(std::min(rest.find('_'), rest.size() - 1) + 1);
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), architecture.capability);
  if (end != rest.data() + rest.size()) architecture.suffix = *end;
  const bool ends_right =
      end == rest.data() + rest.size() || (end + 1 == rest.data() + rest.size() && (*end == 'a' || *end == 'f'));
  KP_CHECK(known_prefix && error == std::errc() && ends_right, "jit: \"", text,
           "\" is no architecture; write it like sm_90a or sm_80");
  return architecture;
}

// What NVRTC is asked for: the architecture itself where it knows it, PTX of its newest where the device is newer.
std::string target_for(const NvrtcLibrary& nvrtc, const std::string& architecture, const std::string& entry) {
  const Architecture wanted = parse_architecture(architecture);
  const std::vector<int>& known = nvrtc.capabilities;
  if (std::find(known.begin(), known.end(), wanted.capability) != known.end()) return architecture;
  const int newest = *std::max_element(known.begin(), known.end());
  const std::string version = concat(nvrtc.info.major, ".", nvrtc.info.minor);
  if (wanted.capability < newest || wanted.suffix != 0) {
    fail(ErrorCode::kDevice, "jit: NVRTC ", version, " (", nvrtc.info.path, ") does not know ", architecture,
         ", which ", entry, " is to be compiled for; it knows up to sm_", newest, ": use another NVRTC");
  }
  const cuda_device::DriverTable* driver = options().disable_cuda || options().amd ? nullptr : cuda_device::driver();
  if (driver != nullptr && nvrtc.info.major * 1000 + nvrtc.info.minor * 10 > driver->version) {
    fail(ErrorCode::kDevice, "jit: NVRTC ", version, " does not know ", architecture,
         " and its PTX is newer than the "
         "driver can compile (CUDA ",
         driver->version / 1000, ".", driver->version % 1000 / 10, "): update the driver or use another NVRTC");
  }
  KP_LOG(kInfo, "jit: NVRTC ", version, " does not know ", architecture, "; the driver finishes PTX for compute_",
         newest);
  return concat("compute_", newest);
}

}  // namespace

int capability_of(const std::string& architecture) {
  return parse_architecture(architecture).capability;
}

bool is_architecture_specific(const std::string& architecture) {
  return parse_architecture(architecture).suffix != 0;
}

std::string architecture_for(const DeviceCode& code, int capability) {
  return concat("sm_", capability, code.architecture_specific && capability >= 90 ? "a" : "");
}

std::vector<std::string> compile_options(const std::string& architecture) {
  std::vector<std::string> options = {"--gpu-architecture=" + architecture, "--std=c++20",
                                      // Headers shared with the host carry no __device__.
                                      "--device-as-default-execution-space"};
  if (architecture.starts_with("sm_")) options.emplace_back("--ptxas-options=-v");
  return options;
}

CompiledKernel run_nvrtc(const DeviceCode& code, const std::string& architecture) {
  const SourceClosure closure = closure_of(code);
  KP_CHECK(capability_of(architecture) >= code.minimum_capability, "jit: ", code.entry, " needs sm_",
           code.minimum_capability, " or later and is to be compiled for ", architecture);
  const NvrtcLibrary& nvrtc = require_nvrtc();
  const std::string target = target_for(nvrtc, architecture, code.entry);
  const auto start = std::chrono::steady_clock::now();
  Program program(nvrtc, closure.files[0], std::span(closure.files).subspan(1), code.entry);
  program.compile(compile_options(target), architecture);
  CompiledKernel compiled;
  compiled.entry = code.entry;
  compiled.lowered_name = program.lowered_name();
  const bool is_cubin = target.starts_with("sm_");
  compiled.cubin = program.code(is_cubin ? nvrtc.cubin_size : nvrtc.ptx_size, is_cubin ? nvrtc.cubin : nvrtc.ptx);
  compiled.log = program.log();
  PtxasSummary summary = summarize_ptxas_log(compiled.log);
  compiled.warnings = std::move(summary.warnings);
  compiled.registers = summary.registers;
  compiled.spill_bytes = summary.spill_bytes;
  compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return compiled;
}

std::string nvrtc_version_text() {
  const NvrtcInfo& info = nvrtc_info();
  return info.found ? concat(info.major, ".", info.minor) : "";
}

}  // namespace kernel_pytorch::jit
