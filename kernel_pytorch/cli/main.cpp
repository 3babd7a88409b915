// kpt: one parse, one run, one place where errors become a line on stderr and an exit code (1 failure, 2 usage).
#include <cstdio>
#include <exception>
#include <string>

#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/cli/command.h"

namespace kernel_pytorch::cli {
namespace {

int say_error(const char* message, int exit_code) {
  std::fprintf(stderr, "kpt: %s\n", message);
  return exit_code;
}

void use_cache_directory(const std::string& directory) {
  Options replaced = options();
  replaced.cache_directory = directory;
  set_options_for_process(replaced);
}

void add_commands(Command root) {
  add_doctor(root);
  add_devices(root);
  add_kernels(root);
  add_explain(root);
  add_tune(root);
  add_bench(root);
  add_verify(root);
  add_cache(root);
  add_optimize(root);
  add_compile(root);
  add_learn(root);
  add_serve_bench(root);
  add_version(root);
  add_completion(root);
}

int run_kpt(int argument_count, char** arguments) {
  CommandLine line("KernelPyTorch: what this machine has, which kernel runs, how fast it is.",
                   std::string("kpt ") + kp_version());
  std::string cache_directory;
  line.root()
      .text("--cache-dir", cache_directory, "where tuning results and compiled kernels are kept")
      .footer("Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted. `kpt COMMAND --help` tells more.");
  add_commands(line.root());
  const Run run = line.parse(argument_count, arguments);
  if (!cache_directory.empty()) use_cache_directory(cache_directory);
  const int exit_code = run ? run() : kSuccess;
  if (std::fflush(stdout) != 0) return say_error("standard output cannot be written", kFailure);
  return exit_code;
}

}  // namespace
}  // namespace kernel_pytorch::cli

int main(int argument_count, char** arguments) {
  using namespace kernel_pytorch::cli;
  try {
    return run_kpt(argument_count, arguments);
  } catch (const UsageError& error) {
    return say_error(error.what(), kUsage);
  } catch (const std::exception& error) {
    return say_error(error.what(), kFailure);
  }
}
