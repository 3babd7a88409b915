// The roof of memory-bound work: a copy that moves a given number of bytes, half read and half written, on buffers
// rotated as a problem's are. On the CPU once through the cache and once past it; the faster is the roof.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/device_buffer.h"
#include "kernel_pytorch/tuning/autotuner.h"

namespace kernel_pytorch::registry {

class CopyRoof {
 public:
  CopyRoof(int64_t bytes_moved, int rotations, const Context& context);
  std::vector<tuning::Candidate> candidates() const;  // valid while this lives

 private:
  void copy(int rotation, bool streaming) const;

  const Context& context_;
  size_t bytes_ = 0;
  std::vector<DeviceBuffer> sources_, targets_;
};

}  // namespace kernel_pytorch::registry
