#define FMT_HEADER_ONLY
#include "kernel_pytorch/cli/format.h"

#include <cstdio>

#include <fmt/format.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::cli {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments) {
  return fmt::vformat(text, arguments);
}

void print_text(const std::string& text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  KP_CHECK(written, "standard output cannot be written");
}

}  // namespace kernel_pytorch::cli
