// kpt compile: CUDA kernels ahead of time, for one architecture, on a machine that needs NVRTC but no GPU. --strict
// makes register spills and serialised wgmma failures, which is what CI asks.
#include <algorithm>

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

bool is_flawed(const jit::CompiledKernel& kernel) {
  return kernel.spill_bytes > 0 || !kernel.warnings.empty();
}

bool has_failed(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  return compiled.empty() || (arguments.strict && std::any_of(compiled.begin(), compiled.end(), is_flawed));
}

void print_compiled(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  int flawed = 0;
  size_t bytes = 0;
  double seconds = 0;
  for (const jit::CompiledKernel& kernel : compiled) {
    bytes += kernel.cubin.size();
    seconds += kernel.seconds;
    if (!is_flawed(kernel)) continue;
    ++flawed;
    fmt::print("{} {}: spills {} bytes with {} registers\n", paint(Color::kYellow, "!"), kernel.entry,
               kernel.spill_bytes, kernel.registers);
    if (!kernel.warnings.empty()) fmt::print("    {}\n", kernel.warnings);
  }
  const bool failed = has_failed(arguments, compiled);
  fmt::print("{} {} kernels for {} in {:.1f} s, {}; {} with spills or warnings\n",
             failed ? paint(Color::kRed, "✗") : paint(Color::kGreen, "✓"), compiled.size(), arguments.architecture,
             seconds, bytes_text(static_cast<int64_t>(bytes)), flawed);
  if (!compiled.empty()) fmt::print("use it with: export KERNEL_PYTORCH_BUNDLE={}\n", arguments.output);
}

void print_as_json(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  print_line(c_interface::to_text({{"architecture", arguments.architecture},
                                   {"output", arguments.output},
                                   {"kernels", c_interface::report_all(compiled)}},
                                  2));
}

int compile(const CompileArguments& arguments) {
  if (arguments.op.empty() && !arguments.every_op) throw UsageError("compile: name an op, or say --all");
  if (!arguments.op.empty() && arguments.every_op) throw UsageError("compile: an op or --all, not both");
  const auto compiled = compile_with_progress(arguments);
  if (arguments.json) {
    print_as_json(arguments, compiled);
  } else {
    print_compiled(arguments, compiled);
  }
  return has_failed(arguments, compiled) ? kFailure : kSuccess;
}

}  // namespace

void add_compile(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("compile", "Compile CUDA kernels ahead of time (needs NVRTC, not a GPU)");
  auto arguments = std::make_shared<CompileArguments>();
  command->add_option("op", arguments->op, "an op, or the start of its name");
  command->add_flag("--all", arguments->every_op, "every op");
  command->add_option("--arch", arguments->architecture, "as sm_90a, sm_80")->required();
  command->add_option("--output", arguments->output, "folder for the bundle")->required();
  command->add_flag("--strict", arguments->strict,
                    "fail when a kernel spills registers or the compiler warns (serialised wgmma)");
  command->add_flag("--json", arguments->json, "as JSON");
  command->callback([&run, arguments] { run = [arguments] { return compile(*arguments); }; });
}

}  // namespace kernel_pytorch::cli
