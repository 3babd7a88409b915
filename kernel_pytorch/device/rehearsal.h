// A rehearsal of a call: the op's checks are passed, kernels are chosen, on a GPU also compiled and loaded, scratch
// memory is asked for, and nothing is computed. While a Rehearsal lives, what its thread would launch, fill, copy or
// encode for a GPU is left out, CPU kernels are not run, no tensor's values are read, and streams count as capturing,
// so that nothing is tuned. Tensors need addresses, but no memory there.
#pragma once

namespace kernel_pytorch {

class Rehearsal {
 public:
  Rehearsal() { ++depth_; }
  ~Rehearsal() { --depth_; }
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;
  static bool is_running() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

}  // namespace kernel_pytorch
