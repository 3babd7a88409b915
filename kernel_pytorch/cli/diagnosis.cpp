#include "kernel_pytorch/cli/diagnosis.h"

#include <algorithm>
#include <optional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/python/python_program.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/device/cpu/topology.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::cli {
namespace {

constexpr std::string_view kOneDnnVariable = "ONEDNN_MAX_CPU_ISA";
constexpr std::string_view kOneDnnCure = "AVX512_CORE_BF16";

std::string counted(int64_t count, std::string_view what) {
  return format("{} {}{}", count, what, count == 1 ? "" : "s");
}

// The affinity mask, cores, sockets and limits, and what the pool makes of them.
void look_at_threads(std::vector<Finding>& findings) {
  const cpu_device::Topology& machine = cpu_device::topology();
  std::string text = format("{} by default: ", counted(machine.threads(), "thread"));
  text += machine.threads_per_core > 1 ? format("{} on {} (SMT on, {} threads per core)", counted(machine.cpus, "CPU"),
                                                counted(machine.cores, "core"), machine.threads_per_core)
                                       : format("{} (SMT off)", counted(machine.cores, "core"));
  if (machine.slow_cores > 0)
    text += format(", {} of them slow (hybrid: tasks go to whoever is free)", machine.slow_cores);
  text += format(", {}, {}", counted(machine.sockets, "socket"),
                 counted(std::max<int64_t>(1, static_cast<int64_t>(machine.nodes.size())), "NUMA node"));
  text +=
      machine.quota > 0 ? format("; quota of {:.3g} CPUs ({})", machine.quota, machine.quota_file) : "; no CPU quota";
  if (machine.memory_limit > 0)
    text += format("; memory limit {} ({})", bytes_text(machine.memory_limit), machine.memory_file);
  findings.push_back({"CPU", Health::kGood, text, ""});
  if (options().threads > machine.threads()) {
    findings.push_back(
        {"CPU", Health::kNote,
         format("KERNEL_PYTORCH_THREADS={} asks for more threads than there are cores or quota for", options().threads),
         ""});
  }
}

void look_at_cpu(std::vector<Finding>& findings) {
  const DeviceInfo& device = device_info(Device{});
  const CpuInfo& cpu = device.cpu;
  const bool is_capped = cpu.isa != cpu.machine_isa;
  findings.push_back({"CPU", Health::kGood, format("{}, memory {}", device.name, bytes_text(device.memory_bytes)), ""});
  look_at_threads(findings);
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

// Whether there is one for NVRTC and a torch for CUDA.
bool look_at_cuda(std::vector<Finding>& findings) {
  bool found = false;
  for (const DeviceInfo& device : devices()) {
    if (!device.is_cuda()) continue;
    found = true;
    findings.push_back({"CUDA", Health::kGood,
                        format("{}: {}, {}, {} multiprocessors, {}, L2 {}, driver {}.{}", to_string(device.device),
                               device.name, device.cuda.architecture(), device.cuda.multiprocessors,
                               bytes_text(device.memory_bytes), bytes_text(device.cuda.l2_bytes),
                               device.cuda.driver_version / 1000, device.cuda.driver_version % 1000 / 10),
                        ""});
  }
  if (!found) findings.push_back({"CUDA", Health::kNote, cuda_absence(), ""});
  return found && !options().amd;
}

void look_at_nvrtc(std::vector<Finding>& findings, bool has_cuda) {
  const jit::NvrtcInfo& nvrtc = jit::nvrtc_info(/*load=*/true);
  if (nvrtc.found) {
    findings.push_back({"NVRTC", Health::kGood,
                        format("{}.{}, {} ({})", nvrtc.major, nvrtc.minor, without_home(nvrtc.path), nvrtc.how), ""});
    return;
  }
  // CUDA kernels are compiled at their first call; without a GPU the compiler is not needed.
  const int driver_major = has_cuda ? device_info(Device{DeviceKind::kCuda, 0}).cuda.driver_version / 1000 : 13;
  const std::string package = driver_major <= 12 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc";
  findings.push_back(
      {"NVRTC", has_cuda ? Health::kProblem : Health::kNote, nvrtc.absence, has_cuda ? "pip install " + package : ""});
}

void look_at_hiprtc(std::vector<Finding>& findings) {
  const jit::HiprtcInfo& hiprtc = jit::hiprtc_info();
  const std::string state = options().amd ? "KERNEL_PYTORCH_AMD=1 runs kernels on AMD GPUs"
                                          : "KERNEL_PYTORCH_AMD=1 would run kernels on AMD GPUs";
  findings.push_back(
      {"AMD", Health::kNote,
       format("{}; {}: compiled and emulated, never run on hardware",
              hiprtc.found ? format("HIPRTC {} ({})", hiprtc.version, without_home(hiprtc.path)) : hiprtc.absence,
              state),
       ""});
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

std::string names_text(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void note_self_test(const SelfTest& test, std::vector<Finding>& findings) {
  int compared = 0;
  std::vector<std::string> reference_only;
  for (const OpTest& op : test.ops) {
    compared += op.failures.empty() && !op.kernel.empty();
    if (op.failures.empty() && op.kernel.empty()) reference_only.push_back(op.op);
    for (const std::string& failure : op.failures) {
      findings.push_back({"self-test", Health::kProblem,
                          format("{}: {} {}: {}", test.device, op.op, op.problem, failure),
                          format("kpt verify {} --device {}", op.op, test.device)});
    }
  }
  findings.push_back({"self-test", Health::kGood,
                      format("{}: {} ops, one of each family, agree with the reference ({:.1f} s); a copy moves {:.1f} "
                             "GB/s",
                             test.device, compared, test.seconds, test.copy_gigabytes_per_second),
                      ""});
  if (!reference_only.empty()) {
    findings.push_back({"self-test", Health::kNote,
                        format("{}: only the reference computes {}", test.device, names_text(reference_only)), ""});
  }
  if (!test.not_reached.empty()) {
    findings.push_back({"self-test", Health::kNote,
                        format("{}: the time was up before {}; a second run finds kernels compiled", test.device,
                               names_text(test.not_reached)),
                        ""});
  }
}

void run_self_tests(Diagnosis& diagnosis) {
  for (const DeviceInfo& device : devices()) {
    diagnosis.self_tests.push_back(test_device(device));
    note_self_test(diagnosis.self_tests.back(), diagnosis.findings);
  }
}

// A line of `python -m kernel_pytorch._environment`: health, section, text and cure, with tabs between them.
std::optional<Finding> finding_in(const std::string& line) {
  std::vector<std::string> fields(1);
  for (const char character : line) {
    if (character == '\t') {
      fields.emplace_back();
    } else {
      fields.back() += character;
    }
  }
  if (fields.size() != 4) return std::nullopt;  // what torch or a warning printed
  const Health health = fields[0] == "good" ? Health::kGood : fields[0] == "note" ? Health::kNote : Health::kProblem;
  return Finding{fields[1], health, without_home(fields[2]), fields[3]};
}

void note_python(const PythonQuestion::Answer& answer, const PythonProgram& python, std::vector<Finding>& findings) {
  for (const std::string& line : answer.lines) {
    if (const std::optional<Finding> finding = finding_in(line)) findings.push_back(*finding);
  }
  if (answer.failure.empty()) return;
  findings.push_back(
      {"Python", Health::kProblem,
       format("{}: {}; nothing is known of torch", without_home(python.program), answer.failure),
       answer.is_late ? "kpt doctor --python-seconds 300" : "export KERNEL_PYTORCH_PYTHON=/a/python/with/torch"});
}

}  // namespace

bool Diagnosis::self_tests_passed() const {
  return std::all_of(self_tests.begin(), self_tests.end(), [](const SelfTest& test) { return test.passed(); });
}

std::string without_home(const std::string& path) {
  const std::string home = environment("HOME");
  return home.size() > 1 && path.starts_with(home) ? "~" + path.substr(home.size()) : path;
}

Diagnosis diagnose(bool with_self_test, double python_seconds) {
  Diagnosis diagnosis;
  diagnosis.findings.push_back({"version", Health::kGood, format("KernelPyTorch {}", kp_version()), ""});
  look_at_cpu(diagnosis.findings);
  const bool has_cuda = look_at_cuda(diagnosis.findings);
  look_at_nvrtc(diagnosis.findings, has_cuda);
  look_at_hiprtc(diagnosis.findings);
  // Importing torch takes seconds: it goes on while kernels are tested.
  const std::optional<PythonProgram> python = find_python();
  std::optional<PythonQuestion> question;
  if (python && python_seconds > 0) {
    question.emplace(*python,
                     std::vector<std::string>{"kernel_pytorch._environment", kp_version(), has_cuda ? "1" : "0"});
  }
  look_at_caches(diagnosis.findings);
  look_at_options(diagnosis.findings);
  if (with_self_test) run_self_tests(diagnosis);
  if (question) {
    note_python(question->wait(python_seconds), *python, diagnosis.findings);
  } else if (!python) {
    diagnosis.findings.push_back({"Python", Health::kNote, "no Python package lies next to this program", ""});
  }
  return diagnosis;
}

}  // namespace kernel_pytorch::cli
