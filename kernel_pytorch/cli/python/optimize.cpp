// kpt optimize: makes a model faster, which is Python's work (kernel_pytorch/_optimize): the words are checked here and
// the program becomes the Python that python_program.h finds.

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/python/python_program.h"

namespace kernel_pytorch::cli {
namespace {

struct OptimizeArguments {
  std::string target, demo, goal = "inference", accuracy = "exact", tune = "model", html, json, dtype, device;
  std::vector<std::string> inputs;
  double budget_seconds = 60;
  bool compiled = false;
};

std::vector<std::string> command_line_of(const OptimizeArguments& arguments) {
  std::vector<std::string> command_line{"-m", "kernel_pytorch._optimize"};
  const auto add = [&command_line](const char* name, const std::string& value) {
    if (!value.empty()) command_line.insert(command_line.end(), {name, value});
  };
  if (!arguments.target.empty()) command_line.push_back(arguments.target);
  for (const std::string& input : arguments.inputs) add("--input", input);
  add("--demo", arguments.demo);
  add("--goal", arguments.goal);
  add("--accuracy", arguments.accuracy);
  add("--budget", format("{}", arguments.budget_seconds));
  add("--tune", arguments.tune);
  add("--html", arguments.html);
  add("--json", arguments.json);
  add("--dtype", arguments.dtype);
  add("--device", arguments.device);
  if (arguments.compiled) command_line.emplace_back("--compile");
  return command_line;
}

int optimize(const OptimizeArguments& arguments) {
  if (arguments.target.empty() == arguments.demo.empty()) {
    throw UsageError("optimize: name a model as module:factory, or one of the bundled ones with --demo");
  }
  if (!arguments.target.empty() && arguments.inputs.empty()) {
    throw UsageError("optimize: give the sample with --input, e.g. --input 1x2048:int64");
  }
  const std::optional<PythonProgram> python = find_python();
  KP_CHECK(python.has_value(),
           "optimize: no Python package lies next to this program; run `make build`, or install the wheel");
  become_python("optimize", *python, command_line_of(arguments));
}

}  // namespace

void add_optimize(Command root) {
  Command command = root.subcommand("optimize", "Make a PyTorch model faster, and show what was done and gained");
  auto arguments = std::make_shared<OptimizeArguments>();
  command.text("model", arguments->target, "module:factory, a function without arguments that returns an nn.Module")
      .texts("--input,-i", arguments->inputs,
             "shape and type of an argument, e.g. 1x2048:int64 or 8x512x768:float32; "
             "ids=1x2048:int64 for a named one, int64<32000 for a bound")
      .choice("--demo", arguments->demo, "a bundled model instead", {"llama", "gpt", "bert", "vit"})
      .choice("--goal,-g", arguments->goal, "what is measured: forward, or forward and backward",
              {"inference", "train"})
      .choice("--accuracy,-a", arguments->accuracy, "whether products may round more", {"exact", "tolerant"})
      .number("--budget,-b", arguments->budget_seconds, "seconds, about", 0.1, 1e6)
      .choice("--tune", arguments->tune, "measure our kernels on its shapes; cache: and remember that on disk",
              {"model", "cache", "off"})
      .text("--html", arguments->html, "write the report as one page")
      .text("--json", arguments->json, "write the report as JSON")
      .choice("--dtype", arguments->dtype, "convert the model first", {"float32", "bfloat16", "float16"})
      .text("--device", arguments->device, "cpu or cuda; the GPU where torch has one, by default")
      .flag("--compile", arguments->compiled, "for use under torch.compile")
      .footer(
          "The model's own weights and state_dict do not change; nothing is written but the reports (and --tune "
          "cache).")
      .runs([arguments] { return optimize(*arguments); });
}

}  // namespace kernel_pytorch::cli
