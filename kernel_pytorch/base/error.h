// The one exception of the core. Messages name the op first, show the values that disagree, and end with the cure.
// Thrown anywhere in the core; caught only at the borders (torch, JAX, C, command line).
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

enum class ErrorCode : int {
  kInvalidArgument = 1,  // the caller can change an argument
  kUnsupported = 2,      // no kernel for this on this device
  kDevice = 3,           // a driver, compiler or memory failure
  kInternal = 4,         // a bug here
};

KP_EXPORT std::string_view name_of(ErrorCode code);

class KP_EXPORT Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  std::string message_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(ErrorCode code, const Parts&... parts) {
  throw Error(code, concat(parts...));
}

}  // namespace kernel_pytorch

// KP_CHECK(rank > 0, "rms_norm: x has ", rank, " dimensions; it needs at least one"): an argument the caller can
// correct.
#define KP_CHECK(condition, ...)                                                          \
  do {                                                                                    \
    if (!(condition)) [[unlikely]]                                                        \
      ::kernel_pytorch::fail(::kernel_pytorch::ErrorCode::kInvalidArgument, __VA_ARGS__); \
  } while (false)

// KP_INTERNAL_CHECK: an invariant of ours; its failure is a bug to report.
#define KP_INTERNAL_CHECK(condition, ...)                                          \
  do {                                                                             \
    if (!(condition)) [[unlikely]]                                                 \
      ::kernel_pytorch::fail(::kernel_pytorch::ErrorCode::kInternal, __VA_ARGS__); \
  } while (false)
