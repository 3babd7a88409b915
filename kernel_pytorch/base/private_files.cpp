#include "kernel_pytorch/base/private_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch {
namespace {

constexpr char kAnotherFolder[] = "or set KERNEL_PYTORCH_CACHE_DIR to a folder of your own";

bool is_trusted(uid_t owner) {
  return owner == geteuid() || owner == 0;
}

std::string reason_of_owner(const std::string& path, uid_t owner) {
  return concat(path, " belongs to user ", owner, ", this process runs as user ", geteuid(), "; remove it, ",
                kAnotherFolder);
}

}  // namespace

std::string reason_not_private(const std::string& path, const struct stat& facts) {
  if (!is_trusted(facts.st_uid)) return reason_of_owner(path, facts.st_uid);
  if ((facts.st_mode & (S_IWGRP | S_IWOTH)) == 0) return "";
  return concat("other users may write to ", path, "; look at what is in it, then run chmod go-w ", path, ", ",
                kAnotherFolder);
}

std::string reason_not_private(const std::string& path) {
  struct stat link {
  }, target{};
  if (lstat(path.c_str(), &link) != 0) return "";  // not there, or not reachable: using it will say so
  if (!is_trusted(link.st_uid)) return reason_of_owner(path, link.st_uid);
  if (stat(path.c_str(), &target) == 0) return reason_not_private(path, target);
  if (S_ISLNK(link.st_mode)) return concat(path, " is a symbolic link that leads nowhere; remove it, ", kAnotherFolder);
  return "";
}

void make_private_folders(const std::string& path) {
  for (size_t end = 1; end <= path.size(); ++end) {
    if (end == path.size() || path[end] == '/') mkdir(path.substr(0, end).c_str(), 0700);
  }
}

void make_private_file(const std::string& path) {
  const int made = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (made >= 0) {
    close(made);
    return;
  }
  struct stat facts {};
  const bool is_own_file = stat(path.c_str(), &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_uid == geteuid();
  if (is_own_file && (facts.st_mode & 077) != 0) chmod(path.c_str(), 0600);
}

}  // namespace kernel_pytorch
