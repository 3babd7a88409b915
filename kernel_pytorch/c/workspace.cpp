// A call in rehearsal, to learn how much scratch memory it takes and which kernels.
#include <algorithm>
#include <list>
#include <vector>

#include "kernel_pytorch/c/call.h"
#include "kernel_pytorch/device/cpu/thread_pool.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/device/workspace.h"

namespace kernel_pytorch::c_interface {
namespace {

// Arguments whose tensors have addresses of their own and no memory: nobody will read there.
class Addressed {
 public:
  Addressed(std::span<const kp_argument> given, size_t offset) : arguments_(given.begin(), given.end()) {
    constexpr uintptr_t kNowhere = uintptr_t{1} << 45;
    uintptr_t address = kNowhere + offset;
    for (kp_argument& one : arguments_) {
      if (one.kind != KP_TENSOR && one.kind != KP_TENSORS) continue;
      const size_t count = one.value.tensors == nullptr ? 0 : one.kind == KP_TENSOR ? 1 : one.count;
      const auto given_tensors = std::span(one.value.tensors, count);
      std::vector<kp_tensor>& tensors = tensors_.emplace_back(given_tensors.begin(), given_tensors.end());
      for (kp_tensor& tensor : tensors) {
        tensor.data = reinterpret_cast<void*>(address);
        address += workspace_piece(bytes_of(tensor));
      }
      if (count > 0) one.value.tensors = tensors.data();
    }
  }
  std::span<const kp_argument> arguments() const { return arguments_; }

 private:
  // From the first element to the last, of 8 bytes each; of tensors that view_of refuses, some.
  static size_t bytes_of(const kp_tensor& tensor) {
    size_t elements = 1;
    if (tensor.sizes == nullptr) return 8;
    for (int i = tensor.rank - 1; i >= 0; --i) {
      const int64_t size = std::max<int64_t>(tensor.sizes[i], 1);
      const int64_t stride = tensor.strides == nullptr ? 0 : std::max<int64_t>(tensor.strides[i], 0);
      elements = tensor.strides == nullptr ? elements * static_cast<size_t>(size)
                                           : elements + static_cast<size_t>((size - 1) * stride);
    }
    return 8 * elements;
  }
  std::vector<kp_argument> arguments_;
  std::list<std::vector<kp_tensor>> tensors_;
};

// Returns the bytes of scratch memory that it asked for.
size_t rehearse(Device device, const char* op, std::span<const kp_argument> arguments, size_t offset) {
  const Addressed addressed(arguments, offset);
  CountingScratch scratch;
  Context context{.info = &device_info(device),
                  .stream = nullptr,
                  .threads = &cpu_device::own_threads(),
                  .scratch = &scratch,
                  .kernel_override = {}};
  const Rehearsal rehearsal;
  call_op(context, op, addressed.arguments());
  return scratch.bytes();
}

}  // namespace

size_t workspace_bytes(Device device, const char* op, std::span<const kp_argument> arguments) {
  // A choice may depend on alignment: memory that a framework allocates begins at a multiple of 256 bytes, parts of it
  // at least of 16.
  size_t most = 0;
  for (const size_t offset : {0, 16}) {
    most = std::max(most, rehearse(device, op, arguments, offset));
  }
  return device.kind == DeviceKind::kCuda ? most : 0;  // CPU kernels, which were not run, take the context's
}

std::vector<registry::Explanation> explain_call(Device device, const char* op, std::span<const kp_argument> arguments) {
  std::vector<registry::Explanation> explanations;
  const registry::Explaining explaining(explanations);
  rehearse(device, op, arguments, 0);
  return explanations;
}

}  // namespace kernel_pytorch::c_interface
