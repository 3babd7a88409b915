// kpt compile: kernels ahead of time, for one architecture, on a machine that needs NVRTC (HIPRTC for AMD's) but no
// GPU.
// --strict makes register spills and serialised wgmma failures, which is what CI asks. With --source it compiles a file
// of the user's, which may include our primitives, into one cubin.
#include <algorithm>
#include <map>

#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/files.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/known_kernels.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::cli {
namespace {

struct CompileArguments {
  std::string op;
  std::string architecture;
  std::string output;
  std::string source, entry;
  std::string known, again;
  bool record = false;
  bool every_op = false;
  bool sample = false;
  bool strict = false;
  bool json = false;
};

ProgressLine* compile_progress = nullptr;  // write_bundle's progress is a plain function

void show_progress(const jit::CompiledKernel& kernel, int done, int total) {
  if (compile_progress != nullptr) compile_progress->show("compile", done, total, kernel.entry);
}

// What another compiler or architecture may refuse is in a source's text, of which one instantiation shows most: the
// first that the architecture can run.
std::vector<DeviceCode> first_of_each_source(const std::vector<DeviceCode>& codes, const std::string& architecture) {
  std::vector<DeviceCode> first;
  for (const DeviceCode& code : codes) {
    const auto is_same = [&code](const DeviceCode& other) { return other.source == code.source; };
    const auto other = std::find_if(first.begin(), first.end(), is_same);
    if (other == first.end()) {
      first.push_back(code);
    } else if (!jit::can_run(*other, architecture) && jit::can_run(code, architecture)) {
      *other = code;
    }
  }
  return first;
}

// What AMD's GPUs have no form of: each reason, and how many kernels it concerns.
void print_refused(const std::vector<DeviceCode>& codes, const std::string& architecture) {
  std::map<std::string, int> reasons;
  for (const DeviceCode& code : codes) {
    if (const std::string reason = jit::obstacle(code, architecture); !reason.empty()) ++reasons[reason];
  }
  for (const auto& [reason, count] : reasons) {
    print("{} {} kernels left out: {}\n", paint(Color::kYellow, "○"), count, reason);
  }
}

bool is_flawed(const jit::CompiledKernel& kernel) {
  return kernel.spill_bytes > 0 || !kernel.warnings.empty();
}

std::vector<jit::CompiledKernel> compile_with_progress(const CompileArguments& arguments) {
  std::vector<DeviceCode> codes = c_interface::device_code_of(named_operations(arguments.op));
  if (arguments.sample) codes = first_of_each_source(codes, arguments.architecture);
  if (jit::is_amd(arguments.architecture) && !arguments.json) print_refused(codes, arguments.architecture);
  KnownKernels known(arguments.known, arguments.again, arguments.architecture);
  codes = known.left_of(codes);
  const auto runs_there = [&](const DeviceCode& code) { return jit::can_run(code, arguments.architecture); };
  const bool nothing_is_left = known.skipped() > 0 && std::none_of(codes.begin(), codes.end(), runs_there);
  if (known.skipped() > 0 && !arguments.json) {
    print("{} kernels are known from {}\n", known.skipped(), arguments.known);
  }
  ProgressLine line;
  compile_progress = &line;
  std::vector<jit::CompiledKernel> compiled;
  if (!nothing_is_left) compiled = jit::write_bundle(codes, arguments.architecture, arguments.output, &show_progress);
  compile_progress = nullptr;
  if (arguments.record && std::none_of(compiled.begin(), compiled.end(), is_flawed)) {
    known.record(compiled, arguments.every_op && !arguments.sample);
  }
  return compiled;
}

bool has_failed(const CompileArguments& arguments, const std::vector<jit::CompiledKernel>& compiled) {
  return arguments.strict && std::any_of(compiled.begin(), compiled.end(), is_flawed);
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
    print("{} {}: spills {} bytes with {} registers\n", paint(Color::kYellow, "!"), kernel.entry, kernel.spill_bytes,
          kernel.registers);
    if (!kernel.warnings.empty()) print("    {}\n", kernel.warnings);
  }
  const bool failed = has_failed(arguments, compiled);
  print("{} {} kernels for {} in {:.1f} s, {}; {} with spills or warnings\n",
        failed ? paint(Color::kRed, "✗") : paint(Color::kGreen, "✓"), compiled.size(), arguments.architecture, seconds,
        bytes_text(static_cast<int64_t>(bytes)), flawed);
  if (compiled.empty()) return;
  if (arguments.source.empty()) {
    const bool is_amd = jit::is_amd(arguments.architecture);
    print("use it with: export {}KERNEL_PYTORCH_BUNDLE={}{}\n", is_amd ? "KERNEL_PYTORCH_AMD=1 " : "", arguments.output,
          is_amd ? " (compiled and emulated, never run on hardware)" : "");
  } else {
    print("{}: {} registers, function {}\n", arguments.output, compiled[0].registers, compiled[0].lowered_name);
  }
}

constexpr int64_t kSourceLimitBytes = 1 << 20;

std::vector<jit::CompiledKernel> compile_source(const CompileArguments& arguments) {
  DeviceCode code{.source = "kernel_pytorch/jit/given_source.cuh", .entry = arguments.entry};
  code.generated = read_file(arguments.source, kSourceLimitBytes);
  std::vector<jit::CompiledKernel> compiled{jit::compile(code, arguments.architecture)};
  write_file(arguments.output, compiled[0].cubin);
  return compiled;
}

int compile(const CompileArguments& arguments) {
  if (arguments.source.empty() != arguments.entry.empty()) {
    throw UsageError("compile: --source FILE and --entry FUNCTION go together");
  }
  if (!arguments.source.empty() && (arguments.every_op || !arguments.op.empty())) {
    throw UsageError("compile: an op, --all or --source, not two of them");
  }
  if (arguments.op.empty() && !arguments.every_op && arguments.source.empty()) {
    throw UsageError("compile: name an op, or say --all");
  }
  if (arguments.known.empty() && (arguments.record || !arguments.again.empty())) {
    throw UsageError("compile: --record and --again need --known FILE");
  }
  if (!arguments.op.empty() && arguments.every_op) throw UsageError("compile: an op or --all, not both");
  const auto compiled = arguments.source.empty() ? compile_with_progress(arguments) : compile_source(arguments);
  if (arguments.json) {
    print_text(compiled_json(arguments.architecture, arguments.output, compiled));
  } else {
    print_compiled(arguments, compiled);
  }
  return has_failed(arguments, compiled) ? kFailure : kSuccess;
}

}  // namespace

void add_compile(Command root) {
  Command command = root.subcommand("compile", "Compile GPU kernels ahead of time (needs NVRTC or HIPRTC, not a GPU)");
  auto arguments = std::make_shared<CompileArguments>();
  command.text("op", arguments->op, "an op, or the start of its name")
      .flag("--all", arguments->every_op, "every op")
      .text("--arch", arguments->architecture, "as sm_90a, sm_80; gfx90a for AMD: never run on hardware",
            Need::kRequired)
      .text("--output", arguments->output, "folder for the bundle; with --source the cubin's file", Need::kRequired)
      .text("--source", arguments->source,
            "a CUDA C++ file of your own instead of an op; it may include our primitives")
      .text("--entry", arguments->entry, "its kernel, e.g. scale or scale<4>")
      .flag("--sample", arguments->sample, "one kernel of each source file, instead of every one")
      .flag("--strict", arguments->strict,
            "fail when a kernel spills registers or the compiler warns (serialised wgmma)")
      .text("--known", arguments->known, "leave out the kernels whose keys this file lists: they have compiled before")
      .text("--again", arguments->again, "of those the kernels of one part all the same, as 3/16")
      .flag("--record", arguments->record, "add the keys of what has compiled to --known's file, when none has a flaw")
      .flag("--json", arguments->json, "as JSON")
      .runs([arguments] { return compile(*arguments); });
}

}  // namespace kernel_pytorch::cli
