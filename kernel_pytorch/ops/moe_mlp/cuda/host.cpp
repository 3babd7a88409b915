// Host side of the combination and of the activation's gradient on the GPU: a launch each.
#include <string>
#include <vector>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/moe_mlp/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::moe_mlp {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/moe_mlp/cuda/kernel.cuh";
constexpr int kTypes = std::size(kCudaTypes);

registry::Support supports_combine(const Combine& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.y.dtype, device));
}
registry::Support supports_combine_backward(const CombineBackward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.y.dtype, device));
}
registry::Support supports_activation(const ActivationBackward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.grad_hidden.dtype, device));
}

DeviceCode code_of(std::string_view function, DType dtype, bool has_vectors) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::moe_mlp::", function, "<", element_type_name(dtype), ", ",
                          bool_name(has_vectors), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// Whether rows of all of them are whole vectors of 16 bytes; absent ones are.
bool have_vectors(std::initializer_list<const TensorView*> views) {
  for (const TensorView* view : views) {
    if (!view->is_present()) continue;
    if (!has_aligned_rows(*view) || view->sizes[1] * size_of(view->dtype) % kVectorBytes != 0) return false;
  }
  return true;
}

template <class Arguments>
void launch(std::string_view function, const std::string& label, KernelTable<kTypes * 2>& table, DType dtype,
            bool has_vectors, int64_t blocks, Arguments& arguments, Context& context) {
  CUkern_st* kernel = table.get(cuda_type_index(dtype) * 2 + has_vectors, context,
                                [&] { return code_of(function, dtype, has_vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void run_combine(const Combine& problem, int, Context& context) {
  static const std::string kLabel = "moe_combine";
  static KernelTable<kTypes * 2> table;
  if (problem.output.element_count() == 0) return;
  CombineArguments arguments{.y = problem.y.data,
                             .y_stride = problem.y.strides[0],
                             .row_of_token = problem.row_of_token.as<const int32_t>(),
                             .weights = problem.weights.as<const float>(),
                             .output = problem.output.data,
                             .k = static_cast<int32_t>(problem.row_of_token.sizes[1]),
                             .columns = static_cast<int32_t>(problem.y.sizes[1])};
  launch("combine", kLabel, table, problem.y.dtype, have_vectors({&problem.y, &problem.output}),
         problem.output.sizes[0], arguments, context);
}

void run_combine_backward(const CombineBackward& problem, int, Context& context) {
  static const std::string kLabel = "moe_combine backward";
  static KernelTable<kTypes * 2> table;
  const int64_t pairs = problem.row_of_token.element_count();
  if (problem.grad_y.is_present() && problem.grad_y.byte_count() > 0) {
    cuda_device::fill_bytes(context.info->device.index, problem.grad_y.data, 0,
                            static_cast<size_t>(problem.grad_y.byte_count()), context.stream);
  }
  if (pairs == 0) return;
  CombineBackwardArguments arguments{.grad_output = problem.grad_output.data,
                                     .y = problem.y.data,
                                     .grad_stride = problem.grad_output.strides[0],
                                     .y_stride = problem.y.strides[0],
                                     .row_of_token = problem.row_of_token.as<const int32_t>(),
                                     .weights = problem.weights.as<const float>(),
                                     .grad_y = problem.grad_y.data,
                                     .grad_weights = problem.grad_weights.as<float>(),
                                     .pairs = static_cast<int32_t>(pairs),
                                     .k = static_cast<int32_t>(problem.row_of_token.sizes[1]),
                                     .columns = static_cast<int32_t>(problem.y.sizes[1])};
  launch("combine_backward", kLabel, table, problem.y.dtype,
         have_vectors({&problem.y, &problem.grad_output, &problem.grad_y}), divide_up(pairs, kThreads / 32), arguments,
         context);
}

void run_activation(const ActivationBackward& problem, int, Context& context) {
  static const std::string kLabel = "moe_activation_backward";
  static KernelTable<kTypes * 2> table;
  const int64_t pairs = problem.row_of_token.element_count();
  if (pairs == 0) return;
  const TensorView& bias = problem.down_bias;
  ActivationArguments arguments{.grad_hidden = problem.grad_hidden.data,
                                .preactivation = problem.preactivation.data,
                                .grad_stride = problem.grad_hidden.strides[0],
                                .preactivation_stride = problem.preactivation.strides[0],
                                .row_of_token = problem.row_of_token.as<const int32_t>(),
                                .weights = problem.weights.as<const float>(),
                                .grad_output = problem.grad_output.data,
                                .down_bias = bias.data,
                                .experts = problem.experts.as<const int32_t>(),
                                .output_stride = problem.grad_output.is_present() ? problem.grad_output.strides[0] : 0,
                                .bias_stride = bias.is_present() ? bias.strides[0] : 0,
                                .pairs = static_cast<int32_t>(pairs),
                                .k = static_cast<int32_t>(problem.row_of_token.sizes[1]),
                                .inner = static_cast<int32_t>(problem.grad_hidden.sizes[1]),
                                .columns = static_cast<int32_t>(bias.is_present() ? bias.sizes[1] : 0),
                                .is_gated = problem.form != Form::kPlain,
                                .is_packed = problem.form == Form::kPackedGated,
                                .is_float_bias = bias.is_present() && bias.dtype == DType::kFloat32,
                                .kind = problem.activation,
                                .limit = static_cast<float>(problem.limit),
                                .slope = static_cast<float>(problem.slope),
                                .grad_preactivation = problem.grad_preactivation.data,
                                .hidden = problem.hidden.data,
                                .grad_preactivation_stride = problem.grad_preactivation.strides[0],
                                .hidden_stride = problem.hidden.strides[0],
                                .row_weights = problem.row_weights.as<float>(),
                                .grad_weights = problem.grad_weights.as<float>()};
  // Packed ups begin half a row behind: whole vectors of the activation's columns put them at a multiple of 16 bytes.
  const bool vectors =
      have_vectors({&problem.grad_hidden, &problem.preactivation, &problem.grad_preactivation, &problem.hidden});
  launch("activation_backward", kLabel, table, problem.grad_hidden.dtype, vectors, divide_up(pairs, kThreads / 32),
         arguments, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> all_code(std::string_view function) {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) {
    for (const bool vectors : {false, true}) codes.push_back(code_of(function, dtype, vectors));
  }
  return codes;
}
std::vector<DeviceCode> combine_code() {
  return all_code("combine");
}
std::vector<DeviceCode> combine_backward_code() {
  return all_code("combine_backward");
}
std::vector<DeviceCode> activation_code() {
  return all_code("activation_backward");
}

}  // namespace

constinit const registry::Kernel<Combine> kCombineCuda{.name = "cuda",
                                                       .supports = supports_combine,
                                                       .run = run_combine,
                                                       .source_hash = source_hash,
                                                       .device_code = combine_code};
constinit const registry::Kernel<CombineBackward> kCombineBackwardCuda{.name = "cuda",
                                                                       .supports = supports_combine_backward,
                                                                       .run = run_combine_backward,
                                                                       .source_hash = source_hash,
                                                                       .device_code = combine_backward_code};
constinit const registry::Kernel<ActivationBackward> kActivationBackwardCuda{.name = "cuda",
                                                                             .supports = supports_activation,
                                                                             .run = run_activation,
                                                                             .source_hash = source_hash,
                                                                             .device_code = activation_code};

}  // namespace kernel_pytorch::moe_mlp
