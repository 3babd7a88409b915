#include "kernel_pytorch/cli/diagnosis.h"

#include <chrono>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::cli {
namespace {

constexpr std::string_view kOneDnnVariable = "ONEDNN_MAX_CPU_ISA";
constexpr std::string_view kOneDnnCure = "AVX512_CORE_BF16";
constexpr std::string_view kSelfTestOp = "rms_norm_forward";

void look_at_cpu(std::vector<Finding>& findings) {
  const DeviceInfo& device = device_info(Device{});
  const CpuInfo& cpu = device.cpu;
  const bool is_capped = cpu.isa != cpu.machine_isa;
  findings.push_back({"CPU", Health::kGood,
                      format("{}, {} core{}, memory {}", device.name, cpu.cores, cpu.cores == 1 ? "" : "s",
                             bytes_text(device.memory_bytes)),
                      ""});
  findings.push_back({"CPU", is_capped ? Health::kNote : Health::kGood,
                      format("instructions {}{}; caches L1d {}, L2 {}, L3 {}", name_of(cpu.isa),
                             is_capped ? format(" (the machine has {})", name_of(cpu.machine_isa)) : "",
                             bytes_text(cpu.l1_data_bytes), bytes_text(cpu.l2_bytes), bytes_text(cpu.l3_bytes)),
                      ""});
  if (!cpu.amx_palette_missing) return;
  const std::string in_force = environment(kOneDnnVariable);
  if (!in_force.empty() && in_force.find("AMX") == std::string::npos) {
    findings.push_back(
        {"CPU", Health::kNote,
         format("AMX without palette information (CPUID leaf 0x1D); {}={} keeps torch's oneDNN away from it",
                kOneDnnVariable, in_force),
         ""});
    return;
  }
  findings.push_back(
      {"CPU", Health::kProblem,
       "this virtual machine shows AMX but no palette information (CPUID leaf 0x1D): torch's oneDNN dies "
       "with SIGILL on bf16 matrix products (our kernels do not)",
       format("export {}={}", kOneDnnVariable, kOneDnnCure)});
}

bool look_at_cuda(std::vector<Finding>& findings) {
  bool found = false;
  for (const DeviceInfo& device : devices()) {
    if (!device.is_cuda()) continue;
    found = true;
    findings.push_back({"CUDA", Health::kGood,
                        format("{}: {}, sm_{}, {} multiprocessors, {}, L2 {}, driver {}.{}", to_string(device.device),
                               device.name, device.cuda.capability(), device.cuda.multiprocessors,
                               bytes_text(device.memory_bytes), bytes_text(device.cuda.l2_bytes),
                               device.cuda.driver_version / 1000, device.cuda.driver_version % 1000 / 10),
                        ""});
  }
  if (!found) findings.push_back({"CUDA", Health::kNote, cuda_absence(), ""});
  return found;
}

void look_at_nvrtc(std::vector<Finding>& findings, bool has_cuda) {
  const jit::NvrtcInfo& nvrtc = jit::nvrtc_info(/*load=*/true);
  if (nvrtc.found) {
    findings.push_back({"NVRTC", Health::kGood,
                        format("{}.{}, {} ({})", nvrtc.major, nvrtc.minor, without_home(nvrtc.path), nvrtc.how), ""});
    return;
  }
  // CUDA kernels are compiled at their first call; with no GPU nobody will miss the compiler.
  const int driver_major = has_cuda ? device_info(Device{DeviceKind::kCuda, 0}).cuda.driver_version / 1000 : 13;
  const std::string package = driver_major <= 12 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc";
  findings.push_back(
      {"NVRTC", has_cuda ? Health::kProblem : Health::kNote, nvrtc.absence, has_cuda ? "pip install " + package : ""});
}

void look_at_caches(std::vector<Finding>& findings) {
  const tuning::StoreInfo store = tuning::store_info();
  const bool is_ready = store.state == "ready" || store.state.starts_with("ready");
  const std::string cure = "export KERNEL_PYTORCH_CACHE_DIR=/a/folder/you/can/write";
  findings.push_back({"caches", is_ready ? Health::kGood : Health::kProblem,
                      format("measurements: {} ({}, {} rows)", without_home(store.path), store.state, store.rows),
                      is_ready ? "" : cure});
  const jit::CubinCacheInfo cubins = jit::cubin_cache_info();
  const bool is_off = options().cubin_cache_megabytes == 0;
  findings.push_back({"caches",
                      cubins.writable ? Health::kGood
                      : is_off        ? Health::kNote
                                      : Health::kProblem,
                      format("compiled kernels: {} ({} files, {}{})", without_home(cubins.directory), cubins.files,
                             bytes_text(cubins.bytes),
                             is_off            ? ", off"
                             : cubins.writable ? ""
                                               : ", not writable"),
                      cubins.writable || is_off ? "" : cure});
}

void look_at_options(std::vector<Finding>& findings) {
  std::string set;
  for (const OptionDescription& option : describe_options()) {
    if (option.from_environment)
      set += format("{}{}={}", set.empty() ? "" : " ", option.variable, without_home(option.value));
  }
  findings.push_back({"options", Health::kGood, set.empty() ? "none set; `kpt doctor --json` lists them" : set, ""});
}

registry::ProblemRequest request_for(const DeviceInfo& device, std::vector<int64_t> shape) {
  return {.shape = std::move(shape), .dtype = DType::kFloat32, .device = device.device, .options = {}};
}

// Right results first, then how fast memory is: the roof of every op that moves more than it computes.
SelfTest test_device(const registry::AnyOperation& operation, const DeviceInfo& device) {
  SelfTest test{.device = to_string(device.device), .op = operation.name, .failures = {}};
  const auto start = std::chrono::steady_clock::now();
  try {
    test.failures = operation.verify(request_for(device, {64, 1000}));
    const int64_t rows = device.is_cpu() ? 4096 : 65536;
    const registry::BenchReport bench = operation.bench(request_for(device, {rows, 4096}), false, 0.2);
    if (bench.copy_us > 0) {
      test.copy_gigabytes_per_second = static_cast<double>(bench.cost.bytes) / bench.copy_us * 1e-3;
    }
  } catch (const std::exception& error) {  // a sick device is what doctor is for
    test.failures.push_back(error.what());
  }
  test.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return test;
}

void run_self_tests(Diagnosis& diagnosis) {
  const registry::AnyOperation* operation = find_operation(kSelfTestOp);
  if (operation == nullptr) return;
  for (const DeviceInfo& device : devices()) {
    const SelfTest test = test_device(*operation, device);
    if (test.failures.empty()) {
      diagnosis.findings.push_back({"self-test", Health::kGood,
                                    format("{}: every {} kernel agrees with the reference; a copy moves {:.1f} GB/s",
                                           test.device, test.op, test.copy_gigabytes_per_second),
                                    ""});
    }
    for (const std::string& failure : test.failures) {
      diagnosis.findings.push_back({"self-test", Health::kProblem, test.device + ": " + failure,
                                    format("kpt verify {} --device {}", test.op, test.device)});
    }
    diagnosis.self_tests.push_back(test);
  }
}

}  // namespace

bool Diagnosis::self_tests_passed() const {
  for (const SelfTest& test : self_tests) {
    if (!test.failures.empty()) return false;
  }
  return true;
}

std::string without_home(const std::string& path) {
  const std::string home = environment("HOME");
  return home.size() > 1 && path.starts_with(home) ? "~" + path.substr(home.size()) : path;
}

Diagnosis diagnose(bool with_self_test) {
  Diagnosis diagnosis;
  diagnosis.findings.push_back({"version", Health::kGood, format("KernelPyTorch {}", kp_version()), ""});
  look_at_cpu(diagnosis.findings);
  const bool has_cuda = look_at_cuda(diagnosis.findings);
  look_at_nvrtc(diagnosis.findings, has_cuda);
  look_at_caches(diagnosis.findings);
  look_at_options(diagnosis.findings);
  if (with_self_test) run_self_tests(diagnosis);
  return diagnosis;
}

}  // namespace kernel_pytorch::cli
