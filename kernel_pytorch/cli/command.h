// What every command of kpt shares: how it is added to the parser, and how it says that the words were wrong. Command
// is a thin face of CLI11, so that one file (command.cpp) pays for compiling it. Parsing and running are apart: a
// command only stores what to run, so that their errors stay distinct.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace kernel_pytorch::cli {

inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;
inline constexpr int kUsage = 2;
inline constexpr int kInterrupted = 130;  // as shells report SIGINT

using Run = std::function<int()>;  // returns the exit code

// The user's words cannot be followed: exit code 2.
class UsageError : public std::exception {
 public:
  explicit UsageError(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

enum class Need { kOptional, kRequired };

// Names are CLI11's: "op" is positional, "--shape,-s" an option. References must outlive the parse.
class Command {
 public:
  Command(CLI::App& app, Run& run) : app_(app), run_(run) {}
  Command subcommand(const std::string& name, const std::string& description, Need need = Need::kOptional);
  Command& flag(const std::string& names, bool& value, const std::string& help);
  Command& text(const std::string& names, std::string& value, const std::string& help, Need need = Need::kOptional);
  Command& texts(const std::string& names, std::vector<std::string>& values, const std::string& help,
                 Need need = Need::kOptional);  // each use of the option adds one
  Command& text_pair(const std::string& names, std::vector<std::string>& values, const std::string& help);
  Command& number(const std::string& names, double& value, const std::string& help, double least, double greatest);
  Command& choice(const std::string& name, std::string& value, const std::string& help,
                  const std::vector<std::string>& choices, Need need = Need::kOptional);
  Command& also_called(const std::string& name);
  Command& footer(const std::string& text);
  void runs(Run run);

  // For completion: the command's name and those of the commands around it ("cache import"), and what may follow it.
  struct Completions {
    std::string command;
    std::vector<std::string> following;  // commands and long options
    bool takes_op = false;
  };
  std::vector<Completions> all_completions() const;  // of this one first, then of every command inside

 private:
  CLI::App& app_;
  Run& run_;
};

class CommandLine {
 public:
  CommandLine(const std::string& description, const std::string& version);
  ~CommandLine();
  Command root();
  // What to run. Help and version were printed when it is empty; throws UsageError.
  Run parse(int argument_count, char** arguments);

 private:
  std::unique_ptr<CLI::App> app_;
  Run run_;
};

void add_doctor(Command root);
void add_devices(Command root);
void add_kernels(Command root);
void add_explain(Command root);
void add_tune(Command root);
void add_bench(Command root);
void add_verify(Command root);
void add_cache(Command root);
void add_optimize(Command root);
void add_compile(Command root);
void add_learn(Command root);
void add_serve_bench(Command root);
void add_version(Command root);
void add_completion(Command root);

}  // namespace kernel_pytorch::cli
