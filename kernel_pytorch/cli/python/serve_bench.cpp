// kpt serve-bench: a synthetic trace of requests through kernel_pytorch.serving, which is Python's work
// (kernel_pytorch/serving/__main__.py): the words are checked here and the program becomes the Python that
// python_program.h finds.

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/python/python_program.h"

namespace kernel_pytorch::cli {
namespace {

struct ServeBenchArguments {
  std::string model, dtype, device, html, json;
  double requests = 32, rate = 8, prompt = 128, output = 32, seed = 0, batch = 64;
};

int serve_bench(const ServeBenchArguments& arguments) {
  const std::optional<PythonProgram> python = find_python();
  KP_CHECK(python.has_value(),
           "serve-bench: no Python package lies next to this program; run `make build`, or install the wheel");
  std::vector<std::string> words{"-m", "kernel_pytorch.serving"};
  const auto add = [&words](const char* name, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {name, value});
  };
  if (!arguments.model.empty()) words.push_back(arguments.model);
  add("--requests", format("{:.0f}", arguments.requests));
  add("--rate", format("{}", arguments.rate));
  add("--prompt", format("{:.0f}", arguments.prompt));
  add("--output", format("{:.0f}", arguments.output));
  add("--seed", format("{:.0f}", arguments.seed));
  add("--batch", format("{:.0f}", arguments.batch));
  add("--dtype", arguments.dtype);
  add("--device", arguments.device);
  add("--html", arguments.html);
  add("--json", arguments.json);
  become_python("serve-bench", *python, words);
}

}  // namespace

void add_serve_bench(Command root) {
  Command command =
      root.subcommand("serve-bench", "Serve a trace of requests: tokens/s, time to first token and per token");
  auto arguments = std::make_shared<ServeBenchArguments>();
  command
      .text("model", arguments->model,
            "a folder with a Hugging Face causal language model; without one, a small random one")
      .number("--requests,-n", arguments->requests, "of the trace", 1, 1e6)
      .number("--rate,-r", arguments->rate, "requests a second that arrive, by a Poisson process; 0: all at once", 0,
              1e6)
      .number("--prompt", arguments->prompt, "the longest prompt; lengths are Zipf's", 1, 1e6)
      .number("--output", arguments->output, "the most new tokens; lengths are Zipf's", 1, 1e6)
      .number("--batch", arguments->batch, "requests at once", 1, 4096)
      .number("--seed", arguments->seed, "of the trace", 0, 1e9)
      .choice("--dtype", arguments->dtype, "convert the model first", {"float32", "bfloat16", "float16"})
      .text("--device", arguments->device, "cpu or cuda; the GPU where torch has one, by default")
      .text("--html", arguments->html, "write the figures and a plot of every request as one page")
      .text("--json", arguments->json, "write the figures and every request's times")
      .footer("An engine for one machine; the trace is synthetic, and the tokens of a random model mean nothing.")
      .runs([arguments] { return serve_bench(*arguments); });
}

}  // namespace kernel_pytorch::cli
