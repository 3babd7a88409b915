// The causal convolution on a GPU: launches of conv.cuh.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/causal_conv1d/cuda/conv_cuda.h"
#include "kernel_pytorch/ops/causal_conv1d/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::causal_conv1d {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/causal_conv1d/cuda/conv.cuh";
constexpr int kTypes = std::size(kCudaTypes);
constexpr int kWidths = kMostWidth - kLeastWidth + 1;

DeviceCode code_of(std::string_view function, DType dtype, int64_t width) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::causal_conv1d::", function, "<", element_type_name(dtype), ", ", width, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.x.dtype, device));
}

using Table = KernelTable<kTypes * kWidths>;
void launch(std::string_view function, Table& table, DType dtype, int64_t width, int64_t grid_x, int64_t grid_y,
            int threads, ConvArguments& arguments, Context& context) {
  static const std::string kLabel = "causal_conv1d";
  if (grid_x == 0 || grid_y == 0) return;
  KP_CHECK(grid_x < int64_t{1} << 31 && grid_y < int64_t{1} << 16, "causal_conv1d: the tensors need ", grid_x, " x ",
           grid_y, " blocks; at most 2^31 - 1 x 2^16 - 1 are supported, split the batch");
  const int entry = cuda_type_index(dtype) * kWidths + static_cast<int>(width - kLeastWidth);
  CUkern_st* kernel = table.get(entry, context, [&] { return code_of(function, dtype, width); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(grid_x);
  shape.grid_y = static_cast<unsigned>(grid_y);
  shape.block_x = static_cast<unsigned>(threads);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

template <class Problem>
ConvArguments arguments_of(const Problem& problem, const Sizes& sizes) {
  ConvArguments arguments{};
  arguments.x = problem.x.data;
  arguments.x_batch_stride = problem.x.strides[0];
  arguments.x_stride = problem.x.strides[1];
  arguments.weight = problem.weight.data;
  arguments.bias = problem.bias.data;
  arguments.initial = problem.initial_state.data;
  arguments.offsets = problem.cu_seqlens.data;
  arguments.offsets_are_wide = problem.cu_seqlens.dtype == DType::kInt64;
  arguments.batch = sizes.batch;
  arguments.tokens = sizes.tokens;
  arguments.channels = sizes.channels;
  arguments.sequences = sizes.sequences;
  arguments.parts = divide_up(sizes.tokens, kPartTokens);
  arguments.silu = problem.activation == Activation::kSilu;
  return arguments;
}

void run_forward(const Forward& problem, int, Context& context) {
  static Table outputs, states;
  const Sizes sizes(problem);
  const DType dtype = problem.x.dtype;
  const int64_t blocks = divide_up(sizes.channels, kThreads);
  ConvArguments arguments = arguments_of(problem, sizes);
  arguments.output = problem.output.data;
  arguments.final = problem.final_state.data;
  launch("convolve", outputs, dtype, sizes.width, sizes.batch * arguments.parts, blocks, kThreads, arguments, context);
  if (!problem.final_state.is_present()) return;
  launch("keep_inputs", states, dtype, sizes.width, sizes.sequences, blocks, kThreads, arguments, context);
}

void run_backward(const Backward& problem, int, Context& context) {
  static Table inputs, states, parts;
  const Sizes sizes(problem);
  const DType dtype = problem.x.dtype;
  const int64_t blocks = divide_up(sizes.channels, kThreads);
  ConvArguments arguments = arguments_of(problem, sizes);
  arguments.grad_output = problem.grad_output.data;
  arguments.grad_batch_stride = problem.grad_output.strides[0];
  arguments.grad_stride = problem.grad_output.strides[1];
  arguments.grad_final = problem.grad_final_state.data;
  arguments.output = problem.grad_x.data;
  arguments.grad_weight = problem.grad_weight.data;
  arguments.grad_bias = problem.grad_bias.data;
  arguments.grad_initial = problem.grad_initial_state.data;
  const int64_t all_parts = sizes.batch * arguments.parts;
  arguments.sums = static_cast<float*>(
      context.scratch->allocate(static_cast<size_t>(all_parts * (sizes.width + 1) * sizes.channels) * sizeof(float)));
  launch("differentiate", inputs, dtype, sizes.width, all_parts, blocks, kThreads, arguments, context);
  launch("sum_parts", parts, dtype, sizes.width, divide_up(sizes.channels, kSumThreads), sizes.width + 1, kSumThreads,
         arguments, context);
  if (!problem.grad_initial_state.is_present()) return;
  launch("differentiate_states", states, dtype, sizes.width, sizes.sequences, blocks, kThreads, arguments, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> codes_of(std::initializer_list<std::string_view> functions) {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (int64_t width = kLeastWidth; width <= kMostWidth; ++width) {
      for (std::string_view function : functions) codes.push_back(code_of(function, dtype, width));
    }
  }
  return codes;
}
std::vector<DeviceCode> forward_code() {
  return codes_of({"convolve", "keep_inputs"});
}
std::vector<DeviceCode> backward_code() {
  return codes_of({"differentiate", "sum_parts", "differentiate_states"});
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda",
                                                       .supports = supports<Forward>,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda",
                                                         .supports = supports<Backward>,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::causal_conv1d
