#include "kernel_pytorch/ops/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <initializer_list>
#include <span>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/causal_conv1d/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::causal_conv1d {
namespace {

constexpr std::string_view kOp = "causal_conv1d";

struct Checks {
  Device device;
  DType dtype;

  void shape(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    KP_CHECK(view.is_present(), kOp, ": ", name, " is missing");
    KP_CHECK(view.device == device, kOp, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.dtype == dtype, kOp, ": ", name, " is ", view.dtype, ", x is ", dtype, "; convert one of them");
    const std::span<const int64_t> wanted{sizes.begin(), sizes.size()};
    KP_CHECK(std::ranges::equal(view.shape(), wanted), kOp, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text(wanted));
  }
  void dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, kOp, ": ", name, " is ", view,
             "; its last dimension must be dense, make it contiguous");
  }
  void contiguous(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    KP_CHECK(is_contiguous(view), kOp, ": ", name, " is ", view, "; it must be contiguous");
  }
};

template <class Problem>
Checks check_inputs(const Problem& problem, Device device) {
  const TensorView& x = problem.x;
  const Checks checks{device, x.dtype};
  KP_CHECK(x.is_present() && x.rank == 3, kOp, ": x has shape ", shape_text(x.shape()),
           "; it must be [batch, tokens, channels]");
  KP_CHECK(x.dtype == DType::kFloat32 || x.dtype == DType::kBFloat16 || x.dtype == DType::kFloat16 ||
               x.dtype == DType::kFloat64,
           kOp, ": x is ", x.dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(x.dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, kOp, ": x is fp64 on ", device,
           "; fp64 is supported on the CPU only, convert it to fp32");
  KP_CHECK(problem.weight.is_present() && problem.weight.rank == 2, kOp, ": weight has shape ",
           shape_text(problem.weight.shape()), "; it must be [channels, width]");
  const Sizes sizes(problem);
  KP_CHECK(sizes.width >= kLeastWidth && sizes.width <= kMostWidth, kOp, ": weight has the width ", sizes.width,
           "; widths of ", kLeastWidth, " to ", kMostWidth, " are supported");
  checks.shape("x", x, {sizes.batch, sizes.tokens, sizes.channels});
  checks.dense("x", x);
  checks.contiguous("weight", problem.weight, {sizes.channels, sizes.width});
  checks.contiguous("bias", problem.bias, {sizes.channels});
  if (problem.cu_seqlens.is_present()) {
    const TensorView& offsets = problem.cu_seqlens;
    KP_CHECK(offsets.device == device, kOp, ": cu_seqlens is on ", offsets.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(offsets.dtype == DType::kInt32 || offsets.dtype == DType::kInt64, kOp, ": cu_seqlens is ", offsets.dtype,
             "; convert it to int32 or int64");
    KP_CHECK(offsets.rank == 1 && offsets.sizes[0] >= 1 && is_contiguous(offsets), kOp, ": cu_seqlens is ", offsets,
             "; it must be contiguous, sequences + 1 long");
    KP_CHECK(sizes.batch == 1, kOp, ": with cu_seqlens the batch is 1, x has ", sizes.batch,
             "; put the sequences one after another");
  }
  checks.contiguous("initial_state", problem.initial_state, {sizes.sequences, sizes.width - 1, sizes.channels});
  return checks;
}

template <class Problem>
void check_offsets(const Problem& problem, const Context& context) {
  if (!problem.cu_seqlens.is_present()) return;
  check_offset_values({.op = kOp,
                       .name = "cu_seqlens",
                       .offsets = problem.cu_seqlens,
                       .tensor = "x",
                       .tokens = problem.x.sizes[1],
                       .begins_with_zero = true},
                      context);
}

}  // namespace

void check(const Forward& problem, Device device) {
  const Checks checks = check_inputs(problem, device);
  const Sizes sizes(problem);
  KP_CHECK(problem.output.is_present(), kOp, ": output is missing");
  checks.contiguous("output", problem.output, {sizes.batch, sizes.tokens, sizes.channels});
  checks.contiguous("final_state", problem.final_state, {sizes.sequences, sizes.width - 1, sizes.channels});
}

void check(const Backward& problem, Device device) {
  const Checks checks = check_inputs(problem, device);
  const Sizes sizes(problem);
  checks.shape("grad_output", problem.grad_output, {sizes.batch, sizes.tokens, sizes.channels});
  checks.dense("grad_output", problem.grad_output);
  checks.contiguous("grad_final_state", problem.grad_final_state, {sizes.sequences, sizes.width - 1, sizes.channels});
  KP_CHECK(problem.grad_x.is_present() && problem.grad_weight.is_present(), kOp, ": grad_x or grad_weight is missing");
  checks.contiguous("grad_x", problem.grad_x, {sizes.batch, sizes.tokens, sizes.channels});
  checks.contiguous("grad_weight", problem.grad_weight, {sizes.channels, sizes.width});
  KP_CHECK(!problem.grad_bias.is_present() || problem.bias.is_present(), kOp,
           ": grad_bias is asked for, but bias is absent");
  KP_CHECK(!problem.grad_initial_state.is_present() || problem.initial_state.is_present(), kOp,
           ": grad_initial_state is asked for, but initial_state is absent");
  checks.contiguous("grad_bias", problem.grad_bias, {sizes.channels});
  checks.contiguous("grad_initial_state", problem.grad_initial_state,
                    {sizes.sequences, sizes.width - 1, sizes.channels});
}

void forward(const Forward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(arguments, context);
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(arguments, context);
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::causal_conv1d
