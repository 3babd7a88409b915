// What every command of kpt shares: how it is added to the parser, and how it says that the words were wrong. Parsing
// and running are apart: a command's callback only stores what to run, so that errors of either are told apart.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

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

void add_doctor(CLI::App& app, Run& run);
void add_devices(CLI::App& app, Run& run);
void add_kernels(CLI::App& app, Run& run);
void add_explain(CLI::App& app, Run& run);
void add_tune(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_verify(CLI::App& app, Run& run);
void add_cache(CLI::App& app, Run& run);
void add_compile(CLI::App& app, Run& run);
void add_version(CLI::App& app, Run& run);
void add_completion(CLI::App& app, Run& run);

}  // namespace kernel_pytorch::cli
