// Test support: a processor that is emulated (qemu-user), where an instruction takes some ten to fifty times as long.
// KP_TEST_EMULATED=1 (tools/test_arm64) shrinks what would take minutes. No check is left out by it.
#pragma once

#include <unistd.h>

#include <functional>
#include <thread>

#include "kernel_pytorch/base/options.h"

namespace kernel_pytorch {

inline bool is_emulated() {
  static const bool emulated = environment("KP_TEST_EMULATED") == "1";
  return emulated;
}

template <typename T>
T unless_emulated(T full, T emulated) {
  return is_emulated() ? emulated : full;
}

// fork(), with a child that exits with what the function returns. qemu-user 7.2 counts threads per process: the child
// may not start any unless its one thread was the newest of its parent, so there a new thread forks.
inline pid_t fork_and_run(const std::function<int()>& child) {
  pid_t pid = 0;
  const auto fork_here = [&] {
    pid = fork();
    if (pid == 0) _exit(child());
  };
  if (is_emulated()) {
    std::thread(fork_here).join();
  } else {
    fork_here();
  }
  return pid;
}

}  // namespace kernel_pytorch
