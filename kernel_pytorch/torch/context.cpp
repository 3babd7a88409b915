#include "kernel_pytorch/torch/context.h"

#include <dlfcn.h>
#include <pthread.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cpu/thread_pool.h"

namespace kernel_pytorch::torch_ops {
namespace {

// torch's threads are GNU OpenMP's, whose parallel regions hang in a child of fork() once the parent has used one.
// The child therefore works on our own pool, which starts anew there, no wider than torch asks for.
std::atomic<bool> in_forked_child{false};
[[maybe_unused]] const int kForkHandler = pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

class TorchThreads final : public Threads {
 public:
  int count() const override {
    uint32_t threads = 1;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
    const int count = std::max(static_cast<int>(threads), 1);
    return in_forked_child && count > 1 ? std::min(count, cpu_device::own_threads().count()) : count;
  }

  void run(int workers, void (*work)(void* state, int worker), void* state) override {
    if (in_forked_child) return cpu_device::own_threads().run(workers, work, state);
    struct Call {
      void (*work)(void*, int);
      void* state;
    } call{work, state};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(
        0, workers, 1,
        [](int64_t begin, int64_t end, void* context) {
          const Call& call = *static_cast<Call*>(context);
          for (int64_t worker = begin; worker < end; ++worker) call.work(call.state, static_cast<int>(worker));
        },
        &call));
  }
};

TorchThreads torch_threads;

// Found in the library that the process already has (libtorch_hip of a torch for ROCm): linking it would tie this
// library to CUDA builds of torch.
void* current_cuda_stream(int device_index) {
  using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);
  static const GetStream kGetStream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) library = dlopen("libtorch_hip.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (kGetStream == nullptr || kGetStream(device_index, &stream) != TORCH_SUCCESS) {
    fail(ErrorCode::kDevice, "kernel_pytorch: torch gives no current stream for cuda:", device_index,
         "; a CUDA build of torch is needed for CUDA tensors");
  }
  return stream;
}

// A thread's blocks between calls, the oldest first.
class KeptBlocks {
 public:
  // The smallest that serves without wasting most of itself.
  std::optional<NewTensor> take(int64_t bytes) {
    auto best = blocks_.end();
    for (auto one = blocks_.begin(); one != blocks_.end(); ++one) {
      const int64_t size = one->view.byte_count();
      const bool serves = size >= bytes && size / 4 <= bytes;
      if (serves && (best == blocks_.end() || size < best->view.byte_count())) best = one;
    }
    if (best == blocks_.end()) return std::nullopt;
    bytes_ -= best->view.byte_count();
    std::optional<NewTensor> block(std::move(*best));
    blocks_.erase(best);
    return block;
  }
  void keep(NewTensor block) {
    if (block.view.byte_count() > kMostBytes) return;
    bytes_ += block.view.byte_count();
    blocks_.push_back(std::move(block));
    while (bytes_ > kMostBytes) {
      bytes_ -= blocks_.front().view.byte_count();
      blocks_.erase(blocks_.begin());
    }
  }

 private:
  static constexpr int64_t kMostBytes = 16 << 20;
  std::vector<NewTensor> blocks_;
  int64_t bytes_ = 0;
};

thread_local KeptBlocks kept_blocks;

}  // namespace

TorchScratch::~TorchScratch() {
  if (device_.kind != DeviceKind::kCpu) return;
  for (NewTensor& block : blocks_) kept_blocks.keep(std::move(block));
}

void* TorchScratch::allocate(size_t bytes) {
  constexpr size_t kAlignmentBytes = 256;  // torch promises 64 on the CPU
  const auto padded = static_cast<int64_t>(bytes + kAlignmentBytes - 1);
  std::optional<NewTensor> kept;
  if (device_.kind == DeviceKind::kCpu) kept = kept_blocks.take(padded);
  blocks_.push_back(kept ? std::move(*kept) : make_tensor(contiguous_view(nullptr, DType::kInt8, {padded}), device_));
  const auto address = reinterpret_cast<uintptr_t>(blocks_.back().view.data);
  return reinterpret_cast<void*>((address + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes);
}

TorchContext::TorchContext(Device device) : scratch_(device) {
  context_.info = &device_info(device);
  context_.scratch = &scratch_;
  if (device.kind == DeviceKind::kCpu) {
    context_.threads = &torch_threads;
  } else {
    context_.stream = current_cuda_stream(device.index);
  }
}

}  // namespace kernel_pytorch::torch_ops
