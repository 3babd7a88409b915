// Rounds attention's operands to e4m3 in blocks of 128 rows, on the host and on the GPU.
#pragma once

#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/ops/attention/fp8/operation.h"
#include "kernel_pytorch/ops/attention/fp8/rounding_cuda.h"

namespace kernel_pytorch::attention::fp8 {

// A tensor [batch, heads, rows, columns] and where it goes.
struct Rounding {
  TensorView source{};
  Target kind = Target::kValues;
  int64_t target_columns = 0;
  bool rotates = false;
  TensorView target{};
  float* scales = nullptr;
  float* norms = nullptr;
};

// Codes times scale in the source's type, contiguous, in memory of the call.
struct RoundedOperands {
  TensorView query{}, key{}, value{};
};
RoundedOperands round_on_host(const Forward& problem, Context& context);
RoundedOperands round_on_gpu(const Forward& problem, Context& context);

// One launch for all three.
void launch_rounding(const Rounding (&tensors)[3], Context& context);
std::vector<DeviceCode> rounding_code();

}  // namespace kernel_pytorch::attention::fp8
