// What a front end knows and the core does not, handed to every op call: the device, the stream to work on, where
// scratch memory comes from, and whose threads to run on.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch {

// The caller's threads: torch's pool, XLA's, or our own (device/cpu/thread_pool.h).
class KP_EXPORT Threads {
 public:
  virtual ~Threads() = default;
  virtual int count() const = 0;
  // Calls work(state, worker) once for each worker in [0, workers), workers <= count(), possibly one after another on
  // fewer threads; returns when all are done. `work` does not throw (parallel_for carries exceptions across).
  virtual void run(int workers, void (*work)(void* state, int worker), void* state) = 0;
};

// Memory for the length of one op call, on the op's device, 256-byte aligned, ordered with the op's stream.
class KP_EXPORT Scratch {
 public:
  virtual ~Scratch() = default;
  virtual void* allocate(size_t bytes) = 0;  // throws kDevice when out of memory; freed when the Scratch goes
  // Bracket an op call (ScratchScope), for a Scratch that outlives it: after the outermost leave, memory may be reused
  // by the next call on the same stream.
  virtual void enter_call() {}
  virtual void leave_call() noexcept {}
};

class ScratchScope {
 public:
  explicit ScratchScope(Scratch* scratch) : scratch_(scratch) {
    if (scratch_ != nullptr) scratch_->enter_call();
  }
  ~ScratchScope() {
    if (scratch_ != nullptr) scratch_->leave_call();
  }
  ScratchScope(const ScratchScope&) = delete;
  ScratchScope& operator=(const ScratchScope&) = delete;

 private:
  Scratch* scratch_;
};

struct Context {
  const DeviceInfo* info = nullptr;
  void* stream = nullptr;      // CUstream; null is the default stream, and always null on the CPU
  Threads* threads = nullptr;  // CPU kernels
  Scratch* scratch = nullptr;
  // Tier 1, Override: "kernel" or "kernel config text" for this call alone; empty for none.
  std::string_view kernel_override;

  Device device() const { return info->device; }
};

// A context of our own for callers without a framework (C++, the command line): our thread pool, our scratch memory,
// kept from call to call. For one thread at a time and one stream: make another for another.
class KP_EXPORT OwnContext {
 public:
  explicit OwnContext(Device device = {}, void* stream = nullptr);
  ~OwnContext();
  OwnContext(const OwnContext&) = delete;
  OwnContext& operator=(const OwnContext&) = delete;
  operator Context&() { return context_; }
  Context* operator->() { return &context_; }

 private:
  std::unique_ptr<Scratch> scratch_;
  Context context_;
};

}  // namespace kernel_pytorch
