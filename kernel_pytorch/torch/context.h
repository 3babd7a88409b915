// A Context made of what torch has: its threads on the CPU, its current stream on CUDA, its caching allocator for
// scratch memory. Made anew for every op call; costs no allocation.
#pragma once

#include <vector>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/torch/tensor_view.h"

namespace kernel_pytorch::torch_ops {

// On the CPU a thread keeps a few MB of what its last calls needed: memory that malloc gives back to the system between
// calls costs a page fault each 4 KB.
class TorchScratch final : public Scratch {
 public:
  explicit TorchScratch(Device device) : device_(device) {}
  ~TorchScratch() override;
  TorchScratch(const TorchScratch&) = delete;
  TorchScratch& operator=(const TorchScratch&) = delete;
  void* allocate(size_t bytes) override;

 private:
  Device device_;
  std::vector<NewTensor> blocks_;
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
