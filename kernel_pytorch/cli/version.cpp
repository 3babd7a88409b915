#include <fmt/format.h>

#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {

void add_version(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("version", "The version of kpt and of its library");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "as JSON");
  command->callback([&run, json] {
    run = [json] {
      print_line(*json ? c_interface::to_text({{"version", kp_version()}}) : fmt::format("kpt {}", kp_version()));
      return kSuccess;
    };
  });
}

}  // namespace kernel_pytorch::cli
