// kpt kernels: every op and its kernels, in the order in which they are asked.

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

int print_kernels(const std::string& op, bool json) {
  const auto operations = named_operations(op);
  if (json) {
    print_text(kernels_json(operations));
    return kSuccess;
  }
  Table table({"OP", "KERNELS, BEST FIRST"});
  for (const registry::AnyOperation* operation : operations) {
    std::string kernels;
    for (const std::string& kernel : operation->kernel_names)
      kernels.append(kernels.empty() ? "" : ", ").append(kernel);
    table.add({{operation->name, Color::kBold}, kernels});
  }
  print("{}", table.text());
  return kSuccess;
}

}  // namespace

void add_kernels(Command root) {
  struct Arguments {
    std::string op;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  root.subcommand("kernels", "Every op and its kernels, in the order in which they are asked")
      .text("op", arguments->op, "an op, or the start of its name; all when left out")
      .flag("--json", arguments->json, "as JSON")
      .runs([arguments] { return print_kernels(arguments->op, arguments->json); });
}

}  // namespace kernel_pytorch::cli
