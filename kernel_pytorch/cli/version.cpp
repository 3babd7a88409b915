
#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {

void add_version(Command root) {
  auto json = std::make_shared<bool>(false);
  root.subcommand("version", "The version of kpt and of its library").flag("--json", *json, "as JSON").runs([json] {
    print_text(*json ? version_json() : format("kpt {}\n", kp_version()));
    return kSuccess;
  });
}

}  // namespace kernel_pytorch::cli
