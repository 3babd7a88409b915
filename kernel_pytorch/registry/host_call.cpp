#include "kernel_pytorch/registry/host_call.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::registry {
namespace {

// Ops whose lists have a kernel for fp64 on CUDA; ops/requests_test.cpp compares. NAME_forward and NAME_backward, too.
constexpr std::string_view kDoubleOnGpu[] = {"matmul",  "matmul_add_", "gated_pairs",      "linear",
                                             "mlp",     "activation",  "gated_activation", "gated_activation_packed",
                                             "dropout", "attention"};

// Memory of the GPU that tensors of a call lie in. Tensors that share memory, as an output that is its input or parts
// of one buffer, share the copy.
struct Range {
  uintptr_t begin, end;
  bool is_written;
  DeviceBuffer copy{};
  void* at(uintptr_t address) const { return static_cast<char*>(copy.data()) + (address - begin); }
};

struct Seen {
  TensorView* view;
  bool is_written;
};

uintptr_t begin_of(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data);
}
uintptr_t end_of(const TensorView& view) {
  return begin_of(view) + static_cast<uintptr_t>(span_elements(view) * size_of(view.dtype));
}

std::vector<Range> ranges_of(const std::vector<Seen>& tensors) {
  std::vector<Range> ranges;
  for (const Seen& tensor : tensors) {
    if (end_of(*tensor.view) == begin_of(*tensor.view)) continue;
    ranges.push_back({begin_of(*tensor.view), end_of(*tensor.view), tensor.is_written});
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  std::vector<Range> merged;
  for (Range& range : ranges) {
    if (merged.empty() || range.begin >= merged.back().end) {
      merged.push_back(std::move(range));
      continue;
    }
    merged.back().end = std::max(merged.back().end, range.end);
    merged.back().is_written |= range.is_written;
  }
  return merged;
}

// The source of a call whose tensors are on the host: those of another source, copied there, where fp64 asks for it.
class HostSource final : public ArgumentSource {
 public:
  HostSource(const Declaration& declaration, ArgumentSource& given) : declaration_(declaration), given_(given) {}

  void fill(void* arguments) override {
    given_.fill(arguments);
    Context& context = given_.context();
    if (!context.info->is_cuda() || !has_double(arguments) || is_taken_there(arguments)) return;
    KP_CHECK(Rehearsal::is_running() || !cuda_device::is_capturing(context.stream), declaration_.name, ": fp64 on ",
             context.device(), " is computed on the host, which a capture cannot record; convert it to fp32");
    move_to_host(arguments);
    host_.emplace();
    (*host_)->kernel_override = context.kernel_override;
    if (context.threads != nullptr) (*host_)->threads = context.threads;
  }
  Context& context() override { return host_ ? static_cast<Context&>(*host_) : given_.context(); }

  // What the call has written, back onto the device.
  void finish() {
    if (!host_) return;
    const Context& context = given_.context();
    for (const Range& range : ranges_) {
      if (!range.is_written) continue;
      cuda_device::copy_to_device(context.device().index, reinterpret_cast<void*>(range.begin), range.copy.data(),
                                  range.copy.bytes(), context.stream);
    }
    cuda_device::synchronize(context.device().index, context.stream);
  }

 private:
  bool has_double(void* arguments) const {
    return std::ranges::any_of(declaration_.fields.all, [&](const Field& field) {
      if (field.is_tensor()) return is_double(field.tensor(arguments));
      return field.kind == FieldKind::kTensorList &&
             std::ranges::any_of(field.value<std::vector<TensorView>>(arguments), is_double);
    });
  }
  bool is_taken_there(const void* arguments) const {
    if (!computes_double_on_gpu(declaration_.name)) return false;
    const auto takes = declaration_.variant.double_on_gpu;
    return takes == nullptr || takes(arguments, *given_.context().info);
  }
  static bool is_double(const TensorView& view) { return view.is_present() && view.dtype == DType::kFloat64; }

  void move_to_host(void* arguments) {
    std::vector<Seen> tensors;
    const auto see = [](void* found, std::string_view, Role role, TensorView& view) {
      if (view.device.kind != DeviceKind::kCuda) return;  // a tensor that is the host's already
      static_cast<std::vector<Seen>*>(found)->push_back({&view, role != Role::kInput});
    };
    visit_fields(declaration_.fields, arguments, see, &tensors);
    ranges_ = ranges_of(tensors);
    const Context& context = given_.context();
    for (Range& range : ranges_) {
      range.copy = DeviceBuffer(Device{}, range.end - range.begin);
      cuda_device::copy_to_host(context.device().index, range.copy.data(), reinterpret_cast<const void*>(range.begin),
                                range.copy.bytes(), context.stream);
    }
    cuda_device::synchronize(context.device().index, context.stream);
    for (const Seen& tensor : tensors) {
      const auto range = std::ranges::find_if(ranges_, [&](const Range& one) {
        return begin_of(*tensor.view) >= one.begin && begin_of(*tensor.view) < one.end;
      });
      if (range != ranges_.end()) tensor.view->data = range->at(begin_of(*tensor.view));
      tensor.view->device = Device{};
    }
  }

  const Declaration& declaration_;
  ArgumentSource& given_;
  std::vector<Range> ranges_;
  std::optional<OwnContext> host_;
};

}  // namespace

bool computes_double_on_gpu(std::string_view op) {
  for (const std::string_view end : {"_forward", "_backward"}) {
    if (op.ends_with(end)) op.remove_suffix(end.size());
  }
  return std::ranges::find(kDoubleOnGpu, op) != std::end(kDoubleOnGpu);
}

void call_declared(const Declaration& declaration, ArgumentSource& source) {
  HostSource either(declaration, source);
  declaration.call(either);
  either.finish();
}

}  // namespace kernel_pytorch::registry
