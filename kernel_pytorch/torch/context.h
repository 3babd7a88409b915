// A Context made of what torch has: its threads on the CPU, its current stream on CUDA, its caching allocator for
// scratch memory. Made anew for every op call; costs no allocation.
#pragma once

#include <vector>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {

class TorchScratch final : public Scratch {
 public:
  explicit TorchScratch(Device device) : device_(device) {}
  void* allocate(size_t bytes) override;

 private:
  Device device_;
  std::vector<Tensor> blocks_;
};

class TorchContext {
 public:
  explicit TorchContext(Device device);
  TorchContext(const TorchContext&) = delete;
  TorchContext& operator=(const TorchContext&) = delete;
  operator Context&() { return context_; }

 private:
  TorchScratch scratch_;
  Context context_;
};

}  // namespace kernel_pytorch::torch_ops
