// kpt compile: CUDA kernels ahead of time, for one architecture, on a machine that needs NVRTC but no GPU. --strict
// makes register spills and serialised wgmma failures, which is what CI asks.
#include <fmt/format.h>

#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::cli {
namespace {

struct CompileArguments {
  std::string op;
  std::string architecture;
  std::string output;
  bool every_op = false;
  bool strict = false;
  bool json = false;
};

ProgressLine* compile_progress = nullptr;  // write_bundle's progress is a plain function

void show_progress(const jit::CompiledKernel& kernel, int done, int total) {
  if (compile_progress != nullptr) compile_progress->show("compile", done, total, kernel.entry);
}

std::vector<jit::CompiledKernel> compile_with_progress(const CompileArguments& arguments) {
  const std::vector<DeviceCode> codes = c_interface::device_code_of(named_operations(arguments.op));
  ProgressLine line;
  compile_progress = &line;
  auto compiled = jit::write_bundle(codes, arguments.architecture, arguments.output, &show_progress);
  compile_progress = nullptr;
  return compiled;
}

int report_compiled(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  int spilled = 0, serialized = 0;
  size_t bytes = 0;
  double seconds = 0;
  for (const jit::CompiledKernel& kernel : compiled) {
    bytes += kernel.cubin.size();
    seconds += kernel.seconds;
    if (kernel.spill_bytes > 0) {
      ++spilled;
      fmt::print("{} {}: spills {} bytes with {} registers\n", paint(Color::kYellow, "!"), kernel.entry,
                 kernel.spill_bytes, kernel.registers);
    }
    if (c_interface::is_serialized(kernel)) {
      ++serialized;
      fmt::print("{} {}: wgmma is serialised\n", paint(Color::kYellow, "!"), kernel.entry);
    }
  }
  const bool failed = compiled.empty() || (arguments.strict && spilled + serialized > 0);
  fmt::print("{} {} kernels for {} in {:.1f} s, {}; {} spill, {} serialised\n",
             failed ? paint(Color::kRed, "✗") : paint(Color::kGreen, "✓"), compiled.size(), arguments.architecture,
             seconds, bytes_text(static_cast<int64_t>(bytes)), spilled, serialized);
  if (!compiled.empty()) fmt::print("use it with: export KERNEL_PYTORCH_BUNDLE={}\n", arguments.output);
  return failed ? kFailure : kSuccess;
}

int report_as_json(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  bool failed = compiled.empty();
  for (const jit::CompiledKernel& kernel : compiled) {
    if (arguments.strict && (kernel.spill_bytes > 0 || c_interface::is_serialized(kernel))) failed = true;
  }
  print_line(c_interface::to_text({{"architecture", arguments.architecture},
                                   {"output", arguments.output},
                                   {"kernels", c_interface::report_all(compiled)}},
                                  2));
  return failed ? kFailure : kSuccess;
}

int compile(const CompileArguments& arguments) {
  if (arguments.op.empty() && !arguments.every_op) throw UsageError("compile: name an op, or say --all");
  if (!arguments.op.empty() && arguments.every_op) throw UsageError("compile: an op or --all, not both");
  const auto compiled = compile_with_progress(arguments);
  return arguments.json ? report_as_json(arguments, compiled) : report_compiled(arguments, compiled);
}

}  // namespace

void add_compile(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("compile", "Compile CUDA kernels ahead of time (needs NVRTC, not a GPU)");
  auto arguments = std::make_shared<CompileArguments>();
  command->add_option("op", arguments->op, "an op, or the start of its name");
  command->add_flag("--all", arguments->every_op, "every op");
  command->add_option("--arch", arguments->architecture, "as sm_90a, sm_80")->required();
  command->add_option("--output", arguments->output, "folder for the bundle")->required();
  command->add_flag("--strict", arguments->strict, "fail when a kernel spills registers or ptxas serialises wgmma");
  command->add_flag("--json", arguments->json, "as JSON");
  command->callback([&run, arguments] { run = [arguments] { return compile(*arguments); }; });
}

}  // namespace kernel_pytorch::cli
