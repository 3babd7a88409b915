// The host side of the CPU kernels: tasks of a few tokens, or pairs, each.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/moe_mlp/cpu/rows.h"
#include "kernel_pytorch/ops/moe_mlp/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::moe_mlp {
namespace {

constexpr int64_t kTaskElements = 16 << 10;

registry::Support supports_combine(const Combine& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.y.dtype, device));
}
registry::Support supports_combine_backward(const CombineBackward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.y.dtype, device));
}
registry::Support supports_activation(const ActivationBackward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.grad_hidden.dtype, device));
}

const RowKernels& kernels_of(const Context& context, DType dtype) {
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels)[cpu_type_index(dtype)];
}
char* row_at(const TensorView& view, int64_t row) {
  return view.as<char>() + row * view.strides[0] * size_of(view.dtype);
}

// Calls body(index) for every index below count, of which each costs so many elements.
template <class Body>
void for_each(Context& context, int64_t count, int64_t elements, const Body& body) {
  const int64_t each = std::max<int64_t>(kTaskElements / std::max<int64_t>(elements, 1), 1);
  parallel_for(context.threads, (count + each - 1) / each, [&](int64_t task) {
    for (int64_t i = task * each; i < std::min(count, (task + 1) * each); ++i) body(i);
  });
}

void run_combine(const Combine& problem, int, Context& context) {
  const RowKernels& kernels = kernels_of(context, problem.y.dtype);
  const int64_t tokens = problem.row_of_token.sizes[0], k = problem.row_of_token.sizes[1], columns = problem.y.sizes[1];
  constexpr int64_t kMost = 16;  // rows at a time
  for_each(context, tokens, columns * k, [&](int64_t token) {
    const void* rows[kMost];
    float factors[kMost];
    int64_t count = 0;
    for (int64_t pair = token * k; pair < (token + 1) * k; ++pair) {
      const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
      if (row < 0) continue;
      rows[count] = row_at(problem.y, row);
      factors[count++] = problem.weights.is_present() ? problem.weights.as<const float>()[pair] : 1.0f;
    }
    kernels.combine({rows, factors, count, columns, row_at(problem.output, token)});
  });
}

void run_combine_backward(const CombineBackward& problem, int, Context& context) {
  const RowKernels& kernels = kernels_of(context, problem.y.dtype);
  const int64_t pairs = problem.row_of_token.element_count(), k = problem.row_of_token.sizes[1];
  const int64_t rows = problem.y.sizes[0], columns = problem.y.sizes[1];
  if (problem.grad_y.is_present() && columns > 0) {
    const int64_t bytes = columns * size_of(problem.grad_y.dtype);
    for_each(context, rows, columns, [&](int64_t row) { std::fill_n(row_at(problem.grad_y, row), bytes, 0); });
  }
  for_each(context, pairs, columns, [&](int64_t pair) {
    const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
    float product = 0;
    if (row >= 0) {
      product = kernels.scale({.from = row_at(problem.grad_output, pair / k),
                               .with = row_at(problem.y, row),
                               .columns = columns,
                               .factor = problem.weights.is_present() ? problem.weights.as<const float>()[pair] : 1.0f,
                               .to = problem.grad_y.is_present() ? row_at(problem.grad_y, row) : nullptr});
    }
    if (problem.grad_weights.is_present()) problem.grad_weights.as<float>()[pair] = product;
  });
}

void run_activation(const ActivationBackward& problem, int, Context& context) {
  const RowKernels& kernels = kernels_of(context, problem.grad_hidden.dtype);
  const int64_t pairs = problem.row_of_token.element_count(), k = problem.row_of_token.sizes[1];
  const int64_t inner = problem.grad_hidden.sizes[1];
  const TensorView& bias = problem.down_bias;
  for_each(context, pairs, inner * 4, [&](int64_t pair) {
    const int32_t row = problem.row_of_token.as<const int32_t>()[pair];
    float product = 0;
    if (row >= 0) {
      const float weight = problem.weights.as<const float>()[pair];
      product = kernels.activate({.gradient = row_at(problem.grad_hidden, row),
                                  .preactivation = row_at(problem.preactivation, row),
                                  .inner = inner,
                                  .is_gated = problem.form != Form::kPlain,
                                  .is_packed = problem.form == Form::kPackedGated,
                                  .activation = problem.activation,
                                  .limit = static_cast<float>(problem.limit),
                                  .slope = static_cast<float>(problem.slope),
                                  .weight = weight,
                                  .grad_preactivation = row_at(problem.grad_preactivation, row),
                                  .hidden = row_at(problem.hidden, row)});
      if (bias.is_present()) {
        const char* gradient = row_at(problem.grad_output, pair / k);
        const char* of_expert = row_at(bias, problem.experts.as<const int32_t>()[pair]);
        product += bias.dtype == DType::kFloat32
                       ? kernels.dot_floats(gradient, reinterpret_cast<const float*>(of_expert), bias.sizes[1])
                       : kernels.scale({.from = gradient, .with = of_expert, .columns = bias.sizes[1]});
      }
      if (problem.row_weights.is_present()) problem.row_weights.as<float>()[row] = weight;
    }
    problem.grad_weights.as<float>()[pair] = product;
  });
}

uint64_t code_version() {
  return hash_text("moe_mlp cpu 1");
}

}  // namespace

constinit const registry::Kernel<Combine> kCombineCpu{
    .name = "cpu", .supports = supports_combine, .run = run_combine, .source_hash = code_version};
constinit const registry::Kernel<CombineBackward> kCombineBackwardCpu{
    .name = "cpu", .supports = supports_combine_backward, .run = run_combine_backward, .source_hash = code_version};
constinit const registry::Kernel<ActivationBackward> kActivationBackwardCpu{
    .name = "cpu", .supports = supports_activation, .run = run_activation, .source_hash = code_version};

}  // namespace kernel_pytorch::moe_mlp
