// Reading and writing whole files for the commands that take one: a limit before reading, a rename after writing, so
// that a reader never sees half of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kernel_pytorch::cli {

std::string read_file(const std::string& path, int64_t limit_bytes);  // "-" is standard input
void write_file(const std::string& path, std::string_view content);

}  // namespace kernel_pytorch::cli
