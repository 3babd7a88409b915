#include "kernel_pytorch/device/context.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cpu/thread_pool.h"
#include "kernel_pytorch/device/cuda/driver.h"

namespace kernel_pytorch {
namespace {

constexpr size_t kScratchAlignment = 256;

void* allocate_on(Device device, size_t bytes) {
  if (device.kind == DeviceKind::kCuda) return cuda_device::allocate(device.index, bytes);
  void* memory = std::aligned_alloc(kScratchAlignment, bytes);
  if (memory == nullptr) {
    fail(ErrorCode::kDevice, "scratch: ", bytes, " bytes of memory could not be had; free some or use a smaller batch");
  }
  return memory;
}

void release_on(Device device, void* memory) noexcept {
  if (device.kind == DeviceKind::kCuda) {
    cuda_device::release(device.index, memory);
  } else {
    std::free(memory);
  }
}

// Blocks are kept and given out again: calls in a loop ask for the same sizes, and a CUDA allocation would stall the
// device. Reuse is ordered by the one stream that an OwnContext has.
class OwnScratch : public Scratch {
 public:
  explicit OwnScratch(Device device) : device_(device) {}
  ~OwnScratch() override {
    for (const Block& block : blocks_) release_on(device_, block.memory);
  }

  void* allocate(size_t bytes) override {
    KP_CHECK(bytes <= SIZE_MAX / 2, "scratch: ", bytes, " bytes asked for; a size was computed wrongly");
    const size_t rounded = (std::max<size_t>(bytes, 1) + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    Block* best = nullptr;
    for (Block& block : blocks_) {
      const bool fits = !block.in_use && block.bytes >= rounded;
      if (fits && (best == nullptr || block.bytes < best->bytes)) best = &block;
    }
    if (best == nullptr) {
      release_unused();
      blocks_.reserve(blocks_.size() + 1);  // so that what is allocated next cannot be lost
      blocks_.push_back({allocate_on(device_, rounded), rounded, false});
      best = &blocks_.back();
    }
    best->in_use = true;
    return best->memory;
  }

  void enter_call() override { ++depth_; }
  void leave_call() noexcept override {
    if (--depth_ > 0) return;
    for (Block& block : blocks_) block.in_use = false;
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
    bool in_use;
  };

  // None of the unused blocks was large enough, so they would only pile up.
  void release_unused() {
    std::erase_if(blocks_, [&](const Block& block) {
      if (!block.in_use) release_on(device_, block.memory);
      return !block.in_use;
    });
  }

  const Device device_;
  int depth_ = 0;
  std::vector<Block> blocks_;
};

}  // namespace

OwnContext::OwnContext(Device device, void* stream) : scratch_(std::make_unique<OwnScratch>(device)) {
  KP_CHECK(device.kind == DeviceKind::kCuda || stream == nullptr, "context: a stream was given for ", device,
           "; the CPU has none, pass nullptr");
  context_ = Context{.info = &device_info(device),
                     .stream = stream,
                     .threads = &cpu_device::own_threads(),
                     .scratch = scratch_.get(),
                     .kernel_override = {}};
}

OwnContext::~OwnContext() = default;

}  // namespace kernel_pytorch
