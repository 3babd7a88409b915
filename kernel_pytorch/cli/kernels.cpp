// kpt kernels: every op and its kernels, in the order in which they are asked.
#include <fmt/format.h>

#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

int print_kernels(const std::string& op, bool json) {
  const auto operations = named_operations(op);
  if (json) {
    print_line(c_interface::to_text(c_interface::report_kernels(operations), 2));
    return kSuccess;
  }
  Table table({"OP", "KERNELS, BEST FIRST"});
  for (const registry::AnyOperation* operation : operations) {
    std::string kernels;
    for (const std::string& kernel : operation->kernel_names)
      kernels.append(kernels.empty() ? "" : ", ").append(kernel);
    table.add({{operation->name, Color::kBold}, kernels});
  }
  fmt::print("{}", table.text());
  return kSuccess;
}

}  // namespace

void add_kernels(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("kernels", "Every op and its kernels, in the order in which they are asked");
  struct Arguments {
    std::string op;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  command->add_option("op", arguments->op, "an op, or the start of its name; all when left out");
  command->add_flag("--json", arguments->json, "as JSON");
  command->callback([&run, arguments] { run = [arguments] { return print_kernels(arguments->op, arguments->json); }; });
}

}  // namespace kernel_pytorch::cli
