// The host side of the CPU kernels: what they support, how rows are split into tasks, and which instruction level runs.
#include <algorithm>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/device/task_size.h"
#include "kernel_pytorch/ops/engines/row_norm/cpu/rows.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::row_norm {
namespace {

// `mixed_type` is x's type, or the 16-bit type of a mixed-precision norm.
Types types_of(DType x, const TensorView& weight, DType mixed_type) {
  if (mixed_type != x) return mixed_type == DType::kBFloat16 ? Types::kFloatWithBFloat16 : Types::kFloatWithFloat16;
  const bool is_mixed = weight.is_present() && weight.dtype != x;
  switch (x) {
    case DType::kFloat64:
      return Types::kDouble;
    case DType::kBFloat16:
      return is_mixed ? Types::kBFloat16Float : Types::kBFloat16;
    case DType::kFloat16:
      return is_mixed ? Types::kFloat16Float : Types::kFloat16;
    default:
      return Types::kFloat;
  }
}

const RowKernels& kernels_for(const Context& context, DType x, const TensorView& weight, DType mixed_type) {
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels)[static_cast<int>(types_of(x, weight, mixed_type))];
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  if (problem.residual.is_present() && problem.residual.dtype != problem.x.dtype &&
      problem.output.dtype != problem.x.dtype && problem.output.dtype != problem.residual.dtype) {
    return registry::Support::no("bf16 and fp16 beside fp32 at once");
  }
  if (problem.activation != Activation::kIdentity && problem.x.dtype == DType::kFloat64) {
    return registry::Support::no("an activation of fp64 rows: the reference has it");
  }
  return registry::Support::unless(strided_obstacle({&problem.x, &problem.residual}));
}

registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(strided_obstacle({&problem.grad_output, &problem.value, &problem.grad_sum}));
}

template <class Problem>
std::vector<std::string> config_texts(const Problem&, const DeviceInfo&) {
  return store_configs();
}

int forward_heuristic(const ForwardProblem& problem, const DeviceInfo&) {
  return problem.output.byte_count() >= kStreamFromBytes ? kStreamStores : kCachedStores;
}
int backward_heuristic(const BackwardProblem& problem, const DeviceInfo&) {
  return problem.grad_input.is_present() && problem.grad_input.byte_count() >= kStreamFromBytes ? kStreamStores
                                                                                                : kCachedStores;
}

void* element(const TensorView& vector, int64_t index) {
  return vector.is_present() ? static_cast<char*>(vector.data) + index * size_of(vector.dtype) : nullptr;
}

// Rows of a task. Where the leading dimensions did not merge into one stride, rows are handed over one by one.
void for_row_blocks(int64_t rows, int64_t rows_per_task, bool is_merged, Threads* threads, const auto& run_rows) {
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  parallel_for(threads, tasks, [&](int64_t task) {
    const int64_t begin = task * rows_per_task, end = std::min(rows, begin + rows_per_task);
    if (is_merged) return run_rows(task, begin, end - begin);
    for (int64_t row = begin; row < end; ++row) run_rows(task, row, 1);
  });
}

void run_forward(const ForwardProblem& problem, int config, Context& context) {
  const int64_t rows = rows_of(problem.x), columns = columns_of(problem.x);
  if (rows == 0 || columns == 0) return;
  const DType dtype = problem.x.dtype;
  const bool narrow_output = problem.output.dtype != dtype;
  const bool narrow_residual = problem.residual.is_present() && problem.residual.dtype != dtype;
  const RowKernels& kernels = kernels_for(context, dtype, problem.weight.is_present() ? problem.weight : problem.bias,
                                          narrow_output     ? problem.output.dtype
                                          : narrow_residual ? problem.residual.dtype
                                                            : dtype);
  const bool stream = config == kStreamStores && rows_are_aligned(problem.output);
  const int64_t task_rows = rows_per_task(rows, columns * size_of(problem.x.dtype), context.threads);
  for_row_blocks(rows, task_rows, problem.x.rank == 2, context.threads, [&](int64_t, int64_t row, int64_t count) {
    kernels.forward({.rows = count,
                     .columns = columns,
                     .x = row_start(problem.x, row),
                     .residual = row_start(problem.residual, row),
                     .weight = problem.weight.data,
                     .bias = problem.bias.data,
                     .output = row_start(problem.output, row),
                     .sum = row_start(problem.sum, row),
                     .mean = element(problem.mean, row),
                     .rstd = element(problem.rstd, row),
                     .x_stride_elements = problem.x.strides[0],
                     .residual_stride_elements = problem.residual.strides[0],
                     .eps = *problem.eps,
                     .weight_offset = problem.weight_offset,
                     .centered = problem.norm == Norm::kLayer,
                     .stream_stores = stream,
                     .narrow_residual = narrow_residual,
                     .narrow_output = narrow_output,
                     .activation = problem.activation});
  });
}

// Column sums are kept per block of rows and added in the order of the blocks, so that neither the number of threads
// nor their timing shows in the result. Few enough blocks that the partial sums stay in cache.
int64_t partial_blocks(int64_t rows, int64_t columns) {
  constexpr int64_t kPartialElements = 1 << 20, kRowsPerBlock = 16, kMostBlocks = 64;
  return std::clamp<int64_t>(std::min(rows / kRowsPerBlock, kPartialElements / columns), 1, kMostBlocks);
}

struct Partials {
  char* weight = nullptr;
  char* bias = nullptr;
  int64_t blocks = 1;
  int64_t block_bytes = 0;
  void* block(char* first, int64_t index) const { return first == nullptr ? nullptr : first + index * block_bytes; }
};

Partials allocate_partials(const BackwardProblem& problem, int64_t blocks, Context& context) {
  const int64_t element_bytes = problem.value.dtype == DType::kFloat64 ? 8 : 4;
  Partials partials{.blocks = blocks, .block_bytes = columns_of(problem.value) * element_bytes};
  const auto allocate = [&](const TensorView& wanted) -> char* {
    if (!wanted.is_present()) return nullptr;
    const size_t bytes = static_cast<size_t>(blocks * partials.block_bytes);
    char* memory = static_cast<char*>(context.scratch->allocate(bytes));
    std::fill_n(memory, bytes, 0);
    return memory;
  };
  partials.weight = allocate(problem.grad_weight);
  partials.bias = allocate(problem.grad_bias);
  return partials;
}

void add_partials(const RowKernels& kernels, const Partials& partials, char* first, const TensorView& total,
                  Context& context) {
  if (!total.is_present()) return;
  constexpr int64_t kColumnsPerTask = 2048;
  const int64_t columns = total.size(0), element_bytes = partials.block_bytes / columns;
  parallel_for(context.threads, (columns + kColumnsPerTask - 1) / kColumnsPerTask, [&](int64_t task) {
    const int64_t begin = task * kColumnsPerTask;
    kernels.add_partials({.blocks = partials.blocks,
                          .columns = std::min(kColumnsPerTask, columns - begin),
                          .block_stride_elements = columns,
                          .partials = first + begin * element_bytes,
                          .total = element(total, begin)});
  });
}

void zero(const TensorView& view) {
  if (view.is_present()) std::fill_n(static_cast<char*>(view.data), view.byte_count(), 0);
}

void run_backward(const BackwardProblem& problem, int config, Context& context) {
  const int64_t rows = rows_of(problem.value), columns = columns_of(problem.value);
  if (rows == 0 || columns == 0) {
    zero(problem.grad_weight);
    zero(problem.grad_bias);
    return;
  }
  const TensorView& weights = problem.weight.is_present() ? problem.weight : problem.grad_bias;
  const RowKernels& kernels = kernels_for(context, problem.value.dtype, weights, problem.grad_output.dtype);
  const bool stream =
      problem.grad_input.is_present() && config == kStreamStores && rows_are_aligned(problem.grad_input);
  const int64_t blocks = partial_blocks(rows, columns);
  const Partials partials = allocate_partials(problem, blocks, context);
  const bool is_merged = problem.value.rank == 2;
  for_row_blocks(rows, (rows + blocks - 1) / blocks, is_merged, context.threads,
                 [&](int64_t block, int64_t row, int64_t count) {
                   kernels.backward({.rows = count,
                                     .columns = columns,
                                     .grad_output = row_start(problem.grad_output, row),
                                     .value = row_start(problem.value, row),
                                     .weight = problem.weight.data,
                                     .mean = element(problem.mean, row),
                                     .rstd = element(problem.rstd, row),
                                     .grad_sum = row_start(problem.grad_sum, row),
                                     .grad_input = row_start(problem.grad_input, row),
                                     .weight_partial = partials.block(partials.weight, block),
                                     .bias_partial = partials.block(partials.bias, block),
                                     .grad_output_stride_elements = problem.grad_output.strides[0],
                                     .value_stride_elements = problem.value.strides[0],
                                     .grad_sum_stride_elements = problem.grad_sum.strides[0],
                                     .weight_offset = problem.weight_offset,
                                     .centered = problem.norm == Norm::kLayer,
                                     .stream_stores = stream});
                 });
  add_partials(kernels, partials, partials.weight, problem.grad_weight, context);
  add_partials(kernels, partials, partials.bias, problem.grad_bias, context);
}

uint64_t code_version() {
  return hash_text("row_norm cpu 4");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCpu{.name = "cpu",
                                                             .supports = supports_forward,
                                                             .configs = config_texts<ForwardProblem>,
                                                             .heuristic = forward_heuristic,
                                                             .run = run_forward,
                                                             .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardCpu{.name = "cpu",
                                                               .supports = supports_backward,
                                                               .configs = config_texts<BackwardProblem>,
                                                               .heuristic = backward_heuristic,
                                                               .run = run_backward,
                                                               .source_hash = code_version};

}  // namespace kernel_pytorch::row_norm
