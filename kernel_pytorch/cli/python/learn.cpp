// kpt learn: the course. Its pages, sources and its Python program are in learn/, next to the package or the checkout.
#include <filesystem>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/python/python_program.h"

namespace kernel_pytorch::cli {
namespace {

struct LearnArguments {
  std::string step, check, html, json;
  bool cuda = false, quick = false;
};

// PATH/python and PATH/learn of a checkout; the wheel has kernel_pytorch/learn.
std::string course_program(const PythonProgram& python) {
  const std::filesystem::path packages = python.path;
  for (const std::filesystem::path& folder :
       {packages.parent_path() / "learn", packages / "kernel_pytorch" / "learn"}) {
    if (std::filesystem::exists(folder / "course" / "__main__.py")) return (folder / "course").string();
  }
  fail(ErrorCode::kUnsupported, "learn: no folder learn/ lies next to ", packages.string(),
       "; take a clone of the project, or its wheel");
}

int learn(const LearnArguments& arguments) {
  const std::optional<PythonProgram> python = find_python();
  KP_CHECK(python.has_value(),
           "learn: no Python package lies next to this program; run `make build`, or install the wheel");
  std::vector<std::string> words{course_program(*python)};
  const auto add = [&words](const char* name, const std::string& value) {
    if (!value.empty()) words.insert(words.end(), {name, value});
  };
  if (!arguments.step.empty()) words.push_back(arguments.step);
  add("--check", arguments.check);
  add("--html", arguments.html);
  add("--json", arguments.json);
  if (arguments.cuda) words.emplace_back("--cuda");
  if (arguments.quick) words.emplace_back("--quick");
  become_python("learn", *python, words);
}

}  // namespace

void add_learn(Command root) {
  Command command = root.subcommand("learn", "A course in twelve steps: predict a kernel's time, run it, compare");
  auto arguments = std::make_shared<LearnArguments>();
  command.text("step", arguments->step, "1 to 12; without one, the steps are listed")
      .text("--check", arguments->check, "a file with your solutions of the step's exercises")
      .flag("--cuda", arguments->cuda, "on the GPU: a step of the CPU is followed by the shipped kernel there")
      .flag("--quick", arguments->quick, "small sizes: whether it works, not how fast")
      .text("--html", arguments->html, "collect your results, with a roofline of this machine, on one page")
      .text("--json", arguments->json, "write this run's results")
      .runs([arguments] { return learn(*arguments); });
}

}  // namespace kernel_pytorch::cli
