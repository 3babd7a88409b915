#include "kernel_pytorch/cli/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include <unistd.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::cli {
namespace {

struct CloseFile {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

[[noreturn]] void fail_with_errno(std::string_view what, const std::string& path) {
  const int error = errno;
  fail(ErrorCode::kInvalidArgument, what, " ", path, ": ", std::strerror(error));
}

}  // namespace

std::string read_file(const std::string& path, int64_t limit_bytes) {
  const File file(path == "-" ? stdin : std::fopen(path.c_str(), "rb"));
  if (file == nullptr) fail_with_errno("cannot open", path);
  std::string content;
  char block[1 << 16];
  while (const size_t count = std::fread(block, 1, sizeof(block), file.get())) {
    content.append(block, count);
    KP_CHECK(static_cast<int64_t>(content.size()) <= limit_bytes, path, ": larger than ", limit_bytes >> 20,
             " MiB; this is not what kpt writes");
  }
  if (std::ferror(file.get()) != 0) fail_with_errno("cannot read", path);
  return content;
}

void write_file(const std::string& path, std::string_view content) {
  const std::string temporary = path + ".partial." + std::to_string(getpid());
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) fail_with_errno("cannot write", temporary);
  const bool written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int error = errno;
    std::remove(temporary.c_str());
    errno = error;
    fail_with_errno("cannot write", path);
  }
}

}  // namespace kernel_pytorch::cli
