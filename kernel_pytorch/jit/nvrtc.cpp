// One NVRTC program: the entry's source and all its headers from memory, one name expression, cubin or PTX out.
#include "kernel_pytorch/jit/nvrtc.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/jit/nvrtc_library.h"
#include "kernel_pytorch/jit/ptxas_log.h"

namespace kernel_pytorch::jit {
namespace {

std::atomic<int64_t> programs_compiled{0};

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
  const cuda_device::DriverTable* driver = options().disable_cuda ? nullptr : cuda_device::driver();
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

// A program that is destroyed on every way out.
class Program {
 public:
  Program(const NvrtcLibrary& nvrtc, const SourceClosure& closure, const std::string& entry)
      : nvrtc_(nvrtc), entry_(entry) {
    std::vector<std::string> texts, names;
    std::vector<const char*> text_pointers, name_pointers;
    for (const EmbeddedSource& file : closure.files) {
      texts.emplace_back(file.text);
      names.emplace_back(file.path);
    }
    for (size_t i = 1; i < texts.size(); ++i) {
      text_pointers.push_back(texts[i].c_str());
      name_pointers.push_back(names[i].c_str());
    }
    require(nvrtc_.create(&program_, texts[0].c_str(), names[0].c_str(), static_cast<int>(text_pointers.size()),
                          text_pointers.data(), name_pointers.data()),
            "creating a program");
  }
  ~Program() { nvrtc_.destroy(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void require(NvrtcResult result, std::string_view what) const {
    if (result != 0) {
      fail(ErrorCode::kDevice, "jit: ", entry_, ": ", what, ": ", nvrtc_.error_string(result));
    }
  }
  void compile(const std::vector<std::string>& options, const std::string& architecture) {
    require(nvrtc_.add_name(program_, entry_.c_str()), "adding its name");
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    programs_compiled.fetch_add(1, std::memory_order_relaxed);
    const NvrtcResult result = nvrtc_.compile(program_, static_cast<int>(pointers.size()), pointers.data());
    if (result != 0) {
      fail(ErrorCode::kDevice, "jit: compiling ", entry_, " for ", architecture, " with NVRTC ", nvrtc_.info.major, ".",
           nvrtc_.info.minor, " (", nvrtc_.info.path, ") failed: ", nvrtc_.error_string(result), "\n", log());
    }
  }
  std::string log() const {
    size_t bytes = 0;
    require(nvrtc_.log_size(program_, &bytes), "reading the log");
    std::string text(bytes, '\0');
    if (bytes > 0) require(nvrtc_.log(program_, text.data()), "reading the log");
    while (!text.empty() && text.back() == '\0') text.pop_back();
    return text;
  }
  std::string lowered_name() const {
    const char* name = nullptr;
    require(nvrtc_.lowered_name(program_, entry_.c_str(), &name), "reading its lowered name");
    return name;
  }
  std::string code(bool is_cubin) const {
    size_t bytes = 0;
    require((is_cubin ? nvrtc_.cubin_size : nvrtc_.ptx_size)(program_, &bytes), "reading the compiled code");
    std::string code(bytes, '\0');
    require((is_cubin ? nvrtc_.cubin : nvrtc_.ptx)(program_, code.data()), "reading the compiled code");
    return code;
  }

 private:
  const NvrtcLibrary& nvrtc_;
  const std::string& entry_;
  NvrtcProgram program_ = nullptr;
};

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
  Program program(nvrtc, closure, code.entry);
  program.compile(compile_options(target), architecture);
  CompiledKernel compiled;
  compiled.entry = code.entry;
  compiled.lowered_name = program.lowered_name();
  compiled.cubin = program.code(target.starts_with("sm_"));
  compiled.log = program.log();
  PtxasSummary summary = summarize_ptxas_log(compiled.log);
  compiled.warnings = std::move(summary.warnings);
  compiled.registers = summary.registers;
  compiled.spill_bytes = summary.spill_bytes;
  compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return compiled;
}

CompiledKernel compile(const DeviceCode& code, const std::string& architecture) {
  return run_nvrtc(code, architecture);
}

std::string nvrtc_version_text() {
  const NvrtcInfo& info = nvrtc_info();
  return info.found ? concat(info.major, ".", info.minor) : "";
}

int64_t compile_count() {
  return programs_compiled.load(std::memory_order_relaxed);
}

}  // namespace kernel_pytorch::jit
