// kpt completion: scripts for bash, zsh and fish, written from the parser itself, so that they cannot fall behind it.

#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/terminal.h"

namespace kernel_pytorch::cli {
namespace {

using Completions = Command::Completions;

std::string joined(const std::vector<std::string>& completion) {
  std::string text;
  for (const std::string& word : completion) text.append(text.empty() ? "" : " ").append(word);
  return text;
}

// What may follow each command: its options and commands, and the ops or shells where one is its argument.
std::vector<Completions> completions_of(const Command& root) {
  std::vector<Completions> all = root.all_completions();
  for (Completions& completion : all) {
    std::vector<std::string> arguments;
    if (completion.takes_op) arguments = c_interface::operation_names();
    if (completion.command == "completion") arguments = {"bash", "zsh", "fish"};
    completion.following.insert(completion.following.begin(), arguments.begin(), arguments.end());
  }
  return all;
}

std::string dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) names.emplace_back(name_of(static_cast<DType>(i)));
  return joined(names);
}

std::string cases_of(const std::vector<Completions>& all, const char* before_list, const char* after_list) {
  std::string cases;
  for (const Completions& completion : all) {
    cases += "    '" + completion.command + "') " + before_list + joined(completion.following) + after_list + " ;;\n";
  }
  return cases;
}

std::string bash_script(const std::vector<Completions>& all) {
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
         cases_of(all, "words='", "'") +
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "}\n"
         "complete -F _kpt kpt\n";
}

std::string zsh_script(const std::vector<Completions>& all) {
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
         cases_of(all, "candidates=(", ")") +
         "  esac\n"
         "  compadd -- $candidates\n"
         "}\n"
         "compdef _kpt kpt\n";
}

std::string fish_script(const std::vector<Completions>& all) {
  std::string script = "complete -c kpt -f\n";
  for (const Completions& completion : all) {
    std::string condition = "__fish_use_subcommand";
    if (!completion.command.empty()) {
      const size_t space = completion.command.find(' ');
      condition = "__fish_seen_subcommand_from " + completion.command.substr(0, space);
      if (space != std::string::npos)
        condition += "; and __fish_seen_subcommand_from " + completion.command.substr(space + 1);
    }
    for (const std::string& word : completion.following) {
      const bool is_option = word.starts_with("--");
      script += format("complete -c kpt -n '{}' {} {}\n", condition, is_option ? "-l" : "-a",
                       is_option ? word.substr(2) : word);
    }
  }
  return script + "complete -c kpt -l dtype -s t -x -a '" + dtype_names() + "'\n" +
         "complete -c kpt -l device -s d -x -a 'cpu cuda'\n";
}

}  // namespace

void add_completion(Command root) {
  Command command = root.subcommand("completion", "A completion script for your shell");
  auto shell = std::make_shared<std::string>();
  command.choice("shell", *shell, "bash, zsh or fish", {"bash", "zsh", "fish"}, Need::kRequired)
      .footer("bash, zsh: eval \"$(kpt completion bash)\"    fish: kpt completion fish | source")
      .runs([root, shell] {
        const std::vector<Completions> all = completions_of(root);
        print_text(*shell == "bash" ? bash_script(all) : *shell == "zsh" ? zsh_script(all) : fish_script(all));
        return kSuccess;
      });
}

}  // namespace kernel_pytorch::cli
