// {fmt}, at the price of its core header: format strings are checked where they are written, and the formatting itself
// is compiled once, in format.cpp.
#pragma once

#include <string>

#include <fmt/core.h>

namespace kernel_pytorch::cli {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments);
void print_text(const std::string& text);  // to standard output; throws when it cannot be written

template <class... Arguments>
std::string format(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  return format_arguments(text, fmt::make_format_args(arguments...));
}

template <class... Arguments>
void print(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  print_text(format_arguments(text, fmt::make_format_args(arguments...)));
}

}  // namespace kernel_pytorch::cli
