// The host side of the CPU kernels: what they support, how rows are split among threads, and which instruction level
// runs. Every thread has a row of scratch, so threads take blocks of rows from a counter of their own.
#include <algorithm>
#include <string_view>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/cross_entropy/cpu/rows.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::cross_entropy {
namespace {

const RowKernels& kernels_for(const Context& context, DType dtype) {
  const Types type = dtype == DType::kBFloat16  ? Types::kBFloat16
                     : dtype == DType::kFloat16 ? Types::kFloat16
                                                : Types::kFloat;
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels)[static_cast<int>(type)];
}

registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.logits.dtype, device, {&problem.logits}));
}

std::vector<std::string> config_texts(const Problem&, const DeviceInfo&) {
  return store_configs();
}
int heuristic(const Problem& problem, const DeviceInfo&) {
  return problem.grad_logits.byte_count() >= kStreamFromBytes ? kStreamStores : kCachedStores;
}

template <class T>
T* element(const TensorView& vector, int64_t index) {
  return vector.is_present() ? vector.as<T>() + index : nullptr;
}
// Weights as floats, whatever their type: there are few against the logits.
const float* weights_of(const Problem& problem, Context& context) {
  if (!problem.weight.is_present() || problem.weight.dtype == DType::kFloat32) return element<float>(problem.weight, 0);
  const int64_t count = problem.weight.element_count();
  auto* weights = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(float)));
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = static_cast<float>(load_element(problem.weight.data, problem.weight.dtype, i));
  }
  return weights;
}

double divisor_of(const Problem& problem, const float* weights) {
  if (problem.reduction != Reduction::kMean) return 1;
  double divisor = 0;
  for (int64_t row = 0; row < problem.target.element_count(); ++row) {
    const int64_t target = target_at(problem.target, row);
    if (target != problem.options.ignore_index) divisor += weights == nullptr ? 1 : weights[target];
  }
  return divisor;
}

Rows whole_block(const Problem& problem, const float* weights, double divisor) {
  const Options& options = problem.options;
  double weight_sum = static_cast<double>(options.vocabulary);
  if (weights != nullptr) {
    weight_sum = 0;
    for (int64_t i = 0; i < options.vocabulary; ++i) weight_sum += weights[i];
  }
  Rows block;
  block.columns = columns_of(problem.logits);
  block.first_column = options.first_column;
  block.logits_stride_elements = problem.logits.strides[0];
  block.ignore_index = options.ignore_index;
  block.weight = weights;
  block.grad_loss_step = problem.grad_loss.element_count() == 1 ? 0 : 1;
  block.label_smoothing = static_cast<float>(options.label_smoothing);
  block.share = static_cast<float>(options.label_smoothing / static_cast<double>(options.vocabulary));
  block.weight_sum = static_cast<float>(weight_sum);
  block.z_loss = static_cast<float>(options.z_loss);
  block.softcap = static_cast<float>(options.softcap);
  block.scale = static_cast<float>(problem.gradient_scale / divisor);
  return block;
}

Rows block_at(const Problem& problem, const Rows& whole, int64_t row, int64_t count) {
  Rows block = whole;
  block.rows = count;
  block.logits = row_start(problem.logits, row);
  block.target = problem.target.as<const char>() + row * size_of(problem.target.dtype);
  block.target_is_wide = problem.target.dtype == DType::kInt64;
  block.given_lse = element<const float>(problem.given_lse, row);
  block.grad_loss = element<const float>(problem.grad_loss, row * whole.grad_loss_step);
  block.loss = element<float>(problem.loss, row);
  block.lse = element<float>(problem.lse, row);
  block.partials = element<float>(problem.partials, 4 * row);
  block.gradient = row_start(problem.grad_logits, row);
  return block;
}

void store_total(const Problem& problem, double divisor) {
  if (!problem.total.is_present()) return;
  double total = 0;
  for (int64_t row = 0; row < problem.loss.element_count(); ++row) total += problem.loss.as<const float>()[row];
  *problem.total.as<float>() = static_cast<float>(total / divisor);
}

void run(const Problem& problem, int config, Context& context) {
  const int64_t rows = rows_of(problem.logits), columns = columns_of(problem.logits);
  const float* weights = weights_of(problem, context);
  const double divisor = divisor_of(problem, weights);
  if (rows == 0) return store_total(problem, divisor);
  const RowKernels& kernels = kernels_for(context, problem.logits.dtype);
  Rows whole = whole_block(problem, weights, divisor);
  whole.stream_stores = config == kStreamStores && problem.grad_logits.is_present() &&
                        problem.grad_logits.data != problem.logits.data && rows_are_aligned(problem.grad_logits);
  const int64_t rows_per_block =
      problem.logits.rank != 2 ? 1
                               : std::clamp<int64_t>(kTaskBytes / (columns * size_of(problem.logits.dtype)), 1, rows);
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  const int64_t workers = std::min<int64_t>(context.threads == nullptr ? 1 : context.threads->count(), blocks);
  const int64_t buffer_floats = (columns + 31) / 32 * 32;  // and 256-byte aligned, as scratch is
  auto* buffers =
      static_cast<float*>(context.scratch->allocate(static_cast<size_t>(workers * buffer_floats) * sizeof(float)));
  TaskQueue queue(blocks);
  parallel_for(context.threads, workers, [&](int64_t worker) {
    for (int64_t taken; (taken = queue.take()) >= 0;) {
      const int64_t row = taken * rows_per_block;
      Rows block = block_at(problem, whole, row, std::min(rows_per_block, rows - row));
      block.buffer = buffers + worker * buffer_floats;
      kernels.rows(block);
    }
  });
  store_total(problem, divisor);
}

registry::Support supports_rescale(const RescaleProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.tensor.dtype, device));
}

void run_rescale(const RescaleProblem& problem, int, Context& context) {
  const float scale = *problem.scale.as<const float>();
  if (scale == 1) return;
  const RowKernels& kernels = kernels_for(context, problem.tensor.dtype);
  const int64_t elements = problem.tensor.element_count(), element_bytes = size_of(problem.tensor.dtype);
  const int64_t per_task = kTaskBytes / element_bytes;
  parallel_for(context.threads, (elements + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t begin = task * per_task;
    kernels.rescale({.elements = std::min(per_task, elements - begin),
                     .tensor = static_cast<char*>(problem.tensor.data) + begin * element_bytes,
                     .factor = scale});
  });
}

uint64_t code_version() {
  return hash_text("cross_entropy cpu 2");
}

}  // namespace

constinit const registry::Kernel<Problem> kCpu{.name = "cpu",
                                               .supports = supports,
                                               .configs = config_texts,
                                               .heuristic = heuristic,
                                               .run = run,
                                               .source_hash = code_version};
constinit const registry::Kernel<RescaleProblem> kRescaleCpu{
    .name = "cpu", .supports = supports_rescale, .run = run_rescale, .source_hash = code_version};

}  // namespace kernel_pytorch::cross_entropy
