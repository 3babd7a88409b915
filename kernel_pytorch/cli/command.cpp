#include "kernel_pytorch/cli/command.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>

#include "kernel_pytorch/c/names.h"
#include "kernel_pytorch/cli/format.h"

namespace kernel_pytorch::cli {
namespace {

std::vector<CLI::App*> subcommands_of(CLI::App& app) {
  return app.get_subcommands([](CLI::App*) { return true; });
}

std::string one_line(std::string text) {
  for (char& character : text) {
    if (character == '\n') character = ' ';
  }
  return text;
}

// "kpt cache clear": the program and the commands that were named before the words went wrong.
std::string command_so_far(const CLI::App& app) {
  std::string completions = app.get_name();
  for (const CLI::App* command : app.get_subcommands()) completions += " " + command_so_far(*command);
  return completions;
}

std::string explain_parse_error(CLI::App& app, const CLI::ParseError& error, int argument_count, char** arguments) {
  const std::string first = argument_count > 1 ? arguments[1] : "";
  const bool names_no_command = app.get_subcommands().empty() && !first.empty() && first.front() != '-';
  if (!names_no_command) return one_line(error.what()) + " (" + command_so_far(app) + " --help shows how)";
  std::vector<std::string> commands;
  for (const CLI::App* command : subcommands_of(app)) commands.push_back(command->get_name());
  const std::string meant = c_interface::nearest_name(first, commands);
  return "unknown command \"" + first + "\"" + (meant.empty() ? "" : "; did you mean " + meant + "?") +
         " (kpt --help lists them)";
}

// What every number of the command line must be. CLI11's own Range lets NaN pass.
CLI::Validator in_range(double least, double greatest) {
  const std::string range = format("a number from {} to {}", least, greatest);
  return CLI::Validator(
      [=](const std::string& text) {
        double number = 0;
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, number);
        const bool is_number = error == std::errc() && stop == end && std::isfinite(number);
        return is_number && number >= least && number <= greatest ? "" : text + " is not " + range;
      },
      range);
}

void collect_completions(CLI::App& app, const std::string& command, std::vector<Command::Completions>& all) {
  Command::Completions completions{command, {}, app.get_option_no_throw("op") != nullptr};
  for (const CLI::App* inner : subcommands_of(app)) completions.following.push_back(inner->get_name());
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) completions.following.push_back("--" + name);
  }
  all.push_back(std::move(completions));
  for (CLI::App* inner : subcommands_of(app)) {
    collect_completions(*inner, command.empty() ? inner->get_name() : command + " " + inner->get_name(), all);
  }
}

}  // namespace

Command Command::subcommand(const std::string& name, const std::string& description, Need need) {
  CLI::App* inner = app_.add_subcommand(name, description);
  if (need == Need::kRequired) inner->require_subcommand(1);
  return Command(*inner, run_);
}

Command& Command::flag(const std::string& names, bool& value, const std::string& help) {
  app_.add_flag(names, value, help);
  return *this;
}

Command& Command::text(const std::string& names, std::string& value, const std::string& help, Need need) {
  CLI::Option* option = app_.add_option(names, value, help)->required(need == Need::kRequired);
  if (!value.empty()) option->capture_default_str();
  return *this;
}

Command& Command::texts(const std::string& names, std::vector<std::string>& values, const std::string& help,
                        Need need) {
  app_.add_option(names, values, help)->required(need == Need::kRequired)->allow_extra_args(false);
  return *this;
}

Command& Command::text_pair(const std::string& names, std::vector<std::string>& values, const std::string& help) {
  app_.add_option(names, values, help)->expected(2)->type_name("BEFORE AFTER");
  return *this;
}

Command& Command::number(const std::string& names, double& value, const std::string& help, double least,
                         double greatest) {
  app_.add_option(names, value, help)->capture_default_str()->check(in_range(least, greatest));
  return *this;
}

Command& Command::choice(const std::string& name, std::string& value, const std::string& help,
                         const std::vector<std::string>& choices, Need need) {
  CLI::Option* option = app_.add_option(name, value, help)->check(CLI::IsMember(choices));
  if (need == Need::kRequired) option->required();
  return *this;
}

Command& Command::also_called(const std::string& name) {
  app_.alias(name);
  return *this;
}

Command& Command::footer(const std::string& text) {
  app_.footer(text);
  return *this;
}

void Command::runs(Run run) {
  app_.callback([&chosen = run_, run = std::move(run)] { chosen = run; });
}

std::vector<Command::Completions> Command::all_completions() const {
  std::vector<Completions> all;
  collect_completions(app_, "", all);
  return all;
}

CommandLine::CommandLine(const std::string& description, const std::string& version)
    : app_(std::make_unique<CLI::App>(description, "kpt")) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->fallthrough();
}

CommandLine::~CommandLine() = default;

Command CommandLine::root() {
  return Command(*app_, run_);
}

Run CommandLine::parse(int argument_count, char** arguments) {
  try {
    app_->parse(argument_count, arguments);
  } catch (const CLI::Success& help) {
    app_->exit(help);
    return {};
  } catch (const CLI::ParseError& error) {
    throw UsageError(explain_parse_error(*app_, error, argument_count, arguments));
  }
  return run_;
}

}  // namespace kernel_pytorch::cli
