#include "kernel_pytorch/jit/hiprtc.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/code_object.h"
#include "kernel_pytorch/jit/hiprtc_library.h"
#include "kernel_pytorch/jit/program.h"

namespace kernel_pytorch::jit {

bool is_amd(const std::string& architecture) {
  return architecture.starts_with("gfx");
}

std::vector<std::string> hip_compile_options(const std::string& architecture) {
  // Units of a tensor are read as words, whatever they hold. How NVRTC spells unrolling, and a loop that is not
  // unrolled as often as asked, are no flaws.
  return {"--offload-arch=" + architecture, "-std=c++20", "-O3", "-fno-strict-aliasing", "-Wno-cuda-compat"};
}

namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// The lines that a release must not have. That a loop was not unrolled as often as asked is no flaw.
std::string warnings_in(std::string_view log) {
  std::string warnings;
  while (!log.empty()) {
    const size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    const bool is_warning = line.find("warning:") != std::string_view::npos;
    if (is_warning && line.find("[-Wpass-failed") == std::string_view::npos) warnings.append(line).append("\n");
  }
  return warnings;
}

}  // namespace

CompiledKernel run_hiprtc(const DeviceCode& code, const std::string& architecture) {
  KP_CHECK(can_run(code, architecture), "jit: ", code.entry, " has no form for ", architecture, ": ",
           obstacle(code, architecture));
  const HipClosure sources = hip_closure_of(code);
  const HiprtcLibrary& hiprtc = require_hiprtc();
  const std::vector<std::string>& known = hiprtc.architectures;
  const std::string processor =
      architecture.substr(0, architecture.find(':'));  // without features, as in gfx90a:xnack-
  KP_CHECK(known.empty() || std::ranges::find(known, processor) != known.end(), "jit: ", hiprtc.description(),
           " does not know ", architecture, ", which ", code.entry, " is to be compiled for; it knows ", joined(known),
           ": use a newer one");
  // HIPRTC 5.2 dies where two threads use it.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto start = std::chrono::steady_clock::now();
  const std::string text = concat("#include \"", kAmdWords, "\"\n#include \"", code.source, "\"\n");
  Program program(hiprtc, {"main.hip", text}, sources.closure.files, code.entry);
  program.compile(hip_compile_options(architecture), architecture);
  CompiledKernel compiled;
  compiled.entry = code.entry;
  compiled.cubin = program.code(hiprtc.code_size, hiprtc.code);
  compiled.log = program.log();
  const CodeObjectSummary summary = summarize_code_object(compiled.cubin, code.entry);
  // HIPRTC 5.2 does not find again the names of templates whose arguments are structures.
  compiled.lowered_name = summary.symbol;
  compiled.registers = summary.vector_registers;
  compiled.spill_bytes = summary.spilled_bytes;
  compiled.private_bytes = summary.private_bytes;
  compiled.warnings = warnings_in(compiled.log);
  compiled.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return compiled;
}

}  // namespace kernel_pytorch::jit
