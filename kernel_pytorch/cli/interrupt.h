// Ctrl-C as a question: while an InterruptGuard lives, the first SIGINT or SIGTERM only sets a flag, so that work can
// stop at a good place and keep what it has; a second one ends the process as usual.
#pragma once

#include <csignal>

namespace kernel_pytorch::cli {

class InterruptGuard {
 public:
  InterruptGuard() {
    flag() = 0;
    struct sigaction action {};
    action.sa_handler = [](int) { flag() = 1; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigaction(SIGINT, &action, &previous_interrupt_);
    sigaction(SIGTERM, &action, &previous_terminate_);
  }
  ~InterruptGuard() {
    sigaction(SIGINT, &previous_interrupt_, nullptr);
    sigaction(SIGTERM, &previous_terminate_, nullptr);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  static bool interrupted() { return flag() != 0; }

 private:
  static volatile std::sig_atomic_t& flag() {
    static volatile std::sig_atomic_t value = 0;  // constant-initialised: no guard, so the handler may call this
    return value;
  }
  struct sigaction previous_interrupt_ {};
  struct sigaction previous_terminate_ {};
};

}  // namespace kernel_pytorch::cli
