// kpt completion: scripts for bash, zsh and fish, written from the parser itself, so that they cannot fall behind it.
#include <fmt/format.h>

#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

struct Words {
  std::string command;  // "cache import"; empty for kpt itself
  std::string description;
  std::vector<std::string> completions;
};

bool takes_op(const CLI::App& app) {
  return app.get_option_no_throw("op") != nullptr;
}

std::vector<const CLI::App*> subcommands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

Words words_of(const CLI::App& app, const std::string& command) {
  Words words{command, app.get_description(), {}};
  for (const CLI::App* subcommand : subcommands_of(app)) words.completions.push_back(subcommand->get_name());
  if (takes_op(app)) {
    for (const std::string& op : c_interface::operation_names()) words.completions.push_back(op);
  }
  if (app.get_name() == "completion") words.completions = {"bash", "zsh", "fish"};
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) words.completions.push_back("--" + name);
  }
  return words;
}

// kpt itself first, then every command, then commands of commands.
std::vector<Words> all_words(const CLI::App& root) {
  std::vector<Words> all{words_of(root, "")};
  for (const CLI::App* command : subcommands_of(root)) {
    all.push_back(words_of(*command, command->get_name()));
    for (const CLI::App* inner : subcommands_of(*command)) {
      all.push_back(words_of(*inner, command->get_name() + " " + inner->get_name()));
    }
  }
  return all;
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, " "));
}

std::string dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) names.emplace_back(name_of(static_cast<DType>(i)));
  return joined(names);
}

std::string cases_of(const std::vector<Words>& all, std::string_view line_format) {
  std::string cases;
  for (const Words& words : all) {
    cases += fmt::format(fmt::runtime(line_format), fmt::arg("command", words.command),
                         fmt::arg("words", joined(words.completions)));
  }
  return cases;
}

std::string bash_script(const std::vector<Words>& all) {
  return "_kpt() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command words\n"
         "  case $previous in\n"
         "    --dtype|-t) COMPREPLY=($(compgen -W '" +
         dtype_names() +
         "' -- \"$current\")); return ;;\n"
         "    --device|-d) COMPREPLY=($(compgen -W 'cpu cuda' -- \"$current\")); return ;;\n"
         "    --output|--cache-dir|import|export) COMPREPLY=($(compgen -f -- \"$current\")); return ;;\n"
         "  esac\n"
         "  ((COMP_CWORD > 1)) && command=${COMP_WORDS[1]}\n"
         "  ((COMP_CWORD > 2)) && [[ $command == cache ]] && command+=\" ${COMP_WORDS[2]}\"\n"
         "  case $command in\n" +
         cases_of(all, "    '{command}') words='{words}' ;;\n") +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "}\n"
         "complete -F _kpt kpt\n";
}

std::string zsh_script(const std::vector<Words>& all) {
  return "#compdef kpt\n"
         "_kpt() {\n"
         "  local command\n"
         "  local -a candidates\n"
         "  case ${words[CURRENT-1]} in\n"
         "    --dtype|-t) compadd -- " +
         dtype_names() +
         "; return ;;\n"
         "    --device|-d) compadd -- cpu cuda; return ;;\n"
         "    --output|--cache-dir|import|export) _files; return ;;\n"
         "  esac\n"
         "  (( CURRENT > 2 )) && command=${words[2]}\n"
         "  (( CURRENT > 3 )) && [[ $command == cache ]] && command+=\" ${words[3]}\"\n"
         "  case $command in\n" +
         cases_of(all, "    '{command}') candidates=({words}) ;;\n") +
         "  esac\n"
         "  compadd -- $candidates\n"
         "}\n"
         "compdef _kpt kpt\n";
}

std::string fish_script(const std::vector<Words>& all) {
  std::string script = "complete -c kpt -f\n";
  for (const Words& words : all) {
    std::string condition = "__fish_use_subcommand";
    if (!words.command.empty()) {
      const size_t space = words.command.find(' ');
      condition = "__fish_seen_subcommand_from " + words.command.substr(0, space);
      if (space != std::string::npos)
        condition += "; and __fish_seen_subcommand_from " + words.command.substr(space + 1);
    }
    for (const std::string& word : words.completions) {
      const bool is_option = word.starts_with("--");
      script += fmt::format("complete -c kpt -n '{}' {} {}\n", condition, is_option ? "-l" : "-a",
                            is_option ? word.substr(2) : word);
    }
  }
  return script + "complete -c kpt -l dtype -s t -x -a '" + dtype_names() + "'\n" +
         "complete -c kpt -l device -s d -x -a 'cpu cuda'\n";
}

}  // namespace

void add_completion(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("completion", "A completion script for your shell");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer(
      "bash: eval \"$(kpt completion bash)\"    zsh: eval \"$(kpt completion zsh)\"    fish: kpt completion fish | "
      "source");
  command->callback([&app, &run, shell] {
    run = [&app, shell] {
      const std::vector<Words> all = all_words(app);
      fmt::print("{}", *shell == "bash" ? bash_script(all) : *shell == "zsh" ? zsh_script(all) : fish_script(all));
      return kSuccess;
    };
  });
}

}  // namespace kernel_pytorch::cli
