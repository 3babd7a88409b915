#include "kernel_pytorch/device/workspace.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/device/cuda/driver.h"

namespace kernel_pytorch {

WorkspaceScratch::WorkspaceScratch(void* memory, size_t bytes, Context& context)
    : memory_(static_cast<char*>(memory)),
      bytes_(bytes),
      own_(context.scratch),
      device_(context.device()),
      stream_(context.stream) {
  KP_CHECK(memory != nullptr || bytes == 0, "workspace: ", bytes, " bytes are given, and no memory");
  const size_t beyond = reinterpret_cast<uintptr_t>(memory) % kWorkspaceAlignment;
  if (beyond == 0) return;
  const size_t skipped = std::min(kWorkspaceAlignment - beyond, bytes_);
  memory_ += skipped;
  bytes_ -= skipped;
}

void* WorkspaceScratch::allocate(size_t bytes) {
  const size_t piece = workspace_piece(bytes);
  if (piece <= bytes_ - used_) {
    char* address = memory_ + used_;
    used_ += piece;
    return address;
  }
  if (device_.kind != DeviceKind::kCuda || !cuda_device::is_capturing(stream_)) return own_->allocate(bytes);
  KP_LOG(kWarning, "workspace: ", bytes_, " bytes are too few for a call that is being captured; ", piece,
         " more are allocated on ", device_, " and kept for good");
  return cuda_device::allocate(device_.index, piece);
}

}  // namespace kernel_pytorch
