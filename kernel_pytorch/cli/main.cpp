// kpt: one parse, one run, one place where errors become a line on stderr and an exit code (1 failure, 2 usage).
#include <cstdio>
#include <exception>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/cli/command.h"

namespace kernel_pytorch::cli {
namespace {

int say_error(std::string_view message, int exit_code) {
  std::string line(message.substr(0, message.find_last_not_of(" \n") + 1));
  fmt::print(stderr, "kpt: {}\n", line);
  return exit_code;
}

std::string one_line(std::string text) {
  for (char& character : text) {
    if (character == '\n') character = ' ';
  }
  return text;
}

std::string explain_parse_error(const CLI::App& app, const CLI::ParseError& error, int argument_count,
                                char** arguments) {
  std::vector<std::string> commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(command->get_name());
  }
  const std::string first = argument_count > 1 ? arguments[1] : "";
  const bool names_no_command = app.get_subcommands().empty() && !first.empty() && first.front() != '-';
  if (!names_no_command) return one_line(error.what()) + " (kpt --help shows how)";
  const std::string meant = c_interface::nearest_name(first, commands);
  return "unknown command \"" + first + "\"" + (meant.empty() ? "" : "; did you mean " + meant + "?") +
         " (kpt --help lists them)";
}

void use_cache_directory(const std::string& directory) {
  Options replaced = options();
  replaced.cache_directory = directory;
  set_options_for_process(replaced);
}

void add_commands(CLI::App& app, Run& run) {
  add_doctor(app, run);
  add_devices(app, run);
  add_kernels(app, run);
  add_explain(app, run);
  add_tune(app, run);
  add_bench(app, run);
  add_verify(app, run);
  add_cache(app, run);
  add_compile(app, run);
  add_version(app, run);
  add_completion(app, run);
}

int run_guarded(const Run& run) {
  try {
    const int exit_code = run();
    if (std::fflush(stdout) != 0) return say_error("standard output cannot be written", kFailure);
    return exit_code;
  } catch (const UsageError& error) {
    return say_error(error.what(), kUsage);
  } catch (const Error& error) {
    return say_error(error.what(), kFailure);
  } catch (const std::exception& error) {
    return say_error(error.what(), kFailure);
  }
}

int run_kpt(int argument_count, char** arguments) {
  CLI::App app("KernelPyTorch: what this machine has, which kernel runs, how fast it is.", "kpt");
  Run run;
  std::string cache_directory;
  app.set_version_flag("--version", fmt::format("kpt {}", kp_version()));
  app.add_option("--cache-dir", cache_directory, "where tuning results and compiled kernels are kept");
  app.footer("Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted. `kpt COMMAND --help` tells more.");
  app.require_subcommand(1);
  app.fallthrough();
  add_commands(app, run);
  try {
    app.parse(argument_count, arguments);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return say_error(explain_parse_error(app, error, argument_count, arguments), kUsage);
  }
  if (!cache_directory.empty()) use_cache_directory(cache_directory);
  return run_guarded(run);
}

}  // namespace
}  // namespace kernel_pytorch::cli

int main(int argument_count, char** arguments) {
  try {
    return kernel_pytorch::cli::run_kpt(argument_count, arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kpt: %s\n", error.what());
    return kernel_pytorch::cli::kFailure;
  }
}
