// A lock between processes (and threads) on a small file, with a time limit. The kernel drops it when its holder dies,
// so a crash never blocks anybody. The files stay: removing one would let two holders lock different inodes.
#pragma once

#include <string>

namespace kernel_pytorch::jit {

class FileLock {
 public:
  // Not held after the time limit, or where the file cannot be made: the caller goes on without.
  FileLock(const std::string& path, double limit_seconds);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool is_held() const { return held_; }

 private:
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace kernel_pytorch::jit
