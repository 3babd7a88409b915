// Where the microseconds of a tiny call go below torch: prints the parts of a warm rms_norm of 4x64, from the choice of
// a kernel to the driver's launch. benchmarks/call_path.py shows these lines under what Python and torch add to them.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/rms_norm/operation.h"
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::rms_norm {
namespace {

constexpr int64_t kRows = 4, kColumns = 64;
constexpr double kLooseBoundMicroseconds = 200;

// The quickest of many short turns, which the device finishes before the next: its queue never fills up.
template <class Body>
double report(const char* device, const char* what, void* stream, const Body& body) {
  constexpr int kCalls = 100;
  double best = 1e9;
  for (int turn = 0; turn < 30; ++turn) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) body();
    const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
    if (stream != nullptr) cuda_device::synchronize(0, stream);
    best = std::min(best, elapsed.count() / kCalls);
  }
  std::printf("call path, %s: %-52s %6.2f us\n", device, what, best);
  return best;
}

class Tensors {
 public:
  explicit Tensors(Device device) : device_(device), memory_(device, (3 * kRows + 2) * kColumns * sizeof(float)) {
    memory_.fill(0, nullptr);
  }
  Forward forward() const { return {.x = rows(0), .weight = row(0), .output = rows(1)}; }
  Backward backward() const {
    return {.grad_output = rows(0),
            .value = rows(1),
            .weight = row(0),
            .rstd = contiguous_view(rows(0).data, DType::kFloat32, {kRows}, device_),
            .grad_input = rows(2),
            .grad_weight = row(1)};
  }

 private:
  TensorView rows(int64_t index) const {
    return contiguous_view(at(index * kRows), DType::kFloat32, {kRows, kColumns}, device_);
  }
  TensorView row(int64_t index) const {
    return contiguous_view(at(3 * kRows + index), DType::kFloat32, {kColumns}, device_);
  }
  float* at(int64_t row) const { return static_cast<float*>(memory_.data()) + row * kColumns; }

  Device device_;
  registry::DeviceBuffer memory_;
};

TEST(CallPath, Cpu) {
  const Tensors tensors{Device{}};
  const Forward forward_arguments = tensors.forward();
  const Backward backward_arguments = tensors.backward();
  OwnContext context;
  const double us = report("cpu", "rms_norm::forward", nullptr, [&] { forward(forward_arguments, context); });
  report("cpu", "rms_norm::backward", nullptr, [&] { backward(backward_arguments, context); });
  EXPECT_LT(us, kLooseBoundMicroseconds);
}

TEST(CallPath, Cuda) {
  if (devices().size() < 2) GTEST_SKIP() << cuda_absence();
  const Tensors tensors{{DeviceKind::kCuda, 0}};
  const Forward forward_arguments = tensors.forward();
  const Backward backward_arguments = tensors.backward();
  const cuda_device::Stream stream(0);
  OwnContext own({DeviceKind::kCuda, 0}, stream.handle());
  Context& context = own;
  row_norm::ForwardProblem problem{.x = forward_arguments.x, .output = forward_arguments.output};
  report("cuda", "rms_norm::forward", stream.handle(), [&] { forward(forward_arguments, context); });
  report("cuda", "rms_norm::backward", stream.handle(), [&] { backward(backward_arguments, context); });
  report("cuda", "registry::choose", nullptr, [&] {
    const auto choice = registry::choose(kForward, problem, context);
    asm volatile("" : : "r"(choice.kernel) : "memory");
  });

  // The launch alone: of no rows, so that the kernel ends at once, by our launch and by the driver's with either
  // handle.
  CUkern_st* kernel = jit::get_kernel(row_norm::kForwardCudaWarp.device_code()[0], *context.info, context.stream);
  alignas(64) char no_rows[4096] = {};
  void* arguments[] = {no_rows};
  const cuda_device::CurrentDevice current(0);
  const cuda_device::DriverTable& driver = cuda_device::require_driver();
  CUfunc_st* function = nullptr;
  ASSERT_EQ(driver.kernel_function(&function, kernel), cuda_device::kSuccess);
  report("cuda", "cuda_device::launch", context.stream,
         [&] { cuda_device::launch(context, kernel, {.block_x = 128}, arguments, "call path"); });
  const auto launch = [&](CUfunc_st* handle, void* on) {
    const cuda_device::LaunchConfiguration configuration{.grid = {1, 1, 1},
                                                         .block = {128, 1, 1},
                                                         .shared_bytes = 0,
                                                         .stream = static_cast<CUstream_st*>(on),
                                                         .attributes = nullptr,
                                                         .attribute_count = 0};
    ASSERT_EQ(driver.launch_kernel(&configuration, handle, arguments, nullptr), cuda_device::kSuccess);
  };
  report("cuda", "cuLaunchKernelEx of a CUkernel", context.stream,
         [&] { launch(reinterpret_cast<CUfunc_st*>(kernel), context.stream); });
  const double us =
      report("cuda", "cuLaunchKernelEx of a CUfunction", context.stream, [&] { launch(function, context.stream); });
  report("cuda", "cuLaunchKernelEx of a CUfunction, default stream", context.stream,
         [&] { launch(function, nullptr); });
  report("cuda", "cuCtxGetCurrent", nullptr, [&] {
    CUctx_st* found = nullptr;
    driver.context_current(&found);
  });
  EXPECT_LT(us, kLooseBoundMicroseconds);
}

}  // namespace
}  // namespace kernel_pytorch::rms_norm
