// Leveled log to stderr, one line a call: KP_LOG(kWarning, "tuning store ", path, " is damaged"). The level comes from
// Options; arguments of a level that is off are not evaluated. log_once keeps repeated conditions to one line a
// process.
#pragma once

#include <string>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

enum class LogLevel : int { kError, kWarning, kInfo, kDebug };

KP_EXPORT bool log_enabled(LogLevel level);
KP_EXPORT void log_line(LogLevel level, std::string_view message);
// Writes the line the first time this key is seen in the process.
KP_EXPORT void log_once(LogLevel level, std::string_view key, std::string_view message);

// Tests look at what was said: redirects every line to the sink until it is cleared with nullptr.
KP_EXPORT void set_log_sink(void (*sink)(LogLevel level, std::string_view message));

}  // namespace kernel_pytorch

#define KP_LOG(level, ...)                                                                                  \
  do {                                                                                                      \
    if (::kernel_pytorch::log_enabled(::kernel_pytorch::LogLevel::level))                                   \
      ::kernel_pytorch::log_line(::kernel_pytorch::LogLevel::level, ::kernel_pytorch::concat(__VA_ARGS__)); \
  } while (false)
