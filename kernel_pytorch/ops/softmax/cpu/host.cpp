// The host side of the CPU kernels: what they support, how rows are split into tasks, and which instruction level runs.
#include <algorithm>
#include <string_view>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/device/task_size.h"
#include "kernel_pytorch/ops/softmax/cpu/rows.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::softmax {
namespace {

const RowKernels& kernels_for(const Context& context, DType dtype) {
  const Types type = dtype == DType::kBFloat16  ? Types::kBFloat16
                     : dtype == DType::kFloat16 ? Types::kFloat16
                                                : Types::kFloat;
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels)[static_cast<int>(type)];
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.x.dtype, device, {&problem.x, &problem.mask}));
}
registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.output.dtype, device, {&problem.output, &problem.grad_output}));
}

template <class Problem>
std::vector<std::string> config_texts(const Problem&, const DeviceInfo&) {
  return store_configs();
}
int forward_heuristic(const ForwardProblem& problem, const DeviceInfo&) {
  return problem.output.byte_count() >= kStreamFromBytes ? kStreamStores : kCachedStores;
}
int backward_heuristic(const BackwardProblem& problem, const DeviceInfo&) {
  return problem.grad_input.byte_count() >= kStreamFromBytes ? kStreamStores : kCachedStores;
}

// Blocks of rows that threads take from a counter of their own, since each has a row of scratch: run_rows(first, count,
// buffer). `together`: rows of a block at once; otherwise one by one, where their strides or what they may see differ.
void for_row_blocks(int64_t rows, int64_t row_bytes, bool together, int64_t buffer_floats, Context& context,
                    const auto& run_rows) {
  const int64_t rows_per_block = rows_per_task(rows, row_bytes, context.threads);
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  const int64_t workers = std::min<int64_t>(context.threads == nullptr ? 1 : context.threads->count(), blocks);
  const int64_t stride = (buffer_floats + 31) / 32 * 32;  // and 256-byte aligned, as scratch is
  float* buffers =
      stride == 0
          ? nullptr
          : static_cast<float*>(context.scratch->allocate(static_cast<size_t>(workers * stride) * sizeof(float)));
  TaskQueue queue(blocks);
  parallel_for(context.threads, workers, [&](int64_t worker) {
    float* buffer = buffers + worker * stride;
    for (int64_t block; (block = queue.take()) >= 0;) {
      const int64_t begin = block * rows_per_block, end = std::min(rows, begin + rows_per_block);
      if (together) {
        run_rows(begin, end - begin, buffer);
        continue;
      }
      for (int64_t row = begin; row < end; ++row) run_rows(row, 1, buffer);
    }
  });
}

void run_forward(const ForwardProblem& problem, int config, Context& context) {
  const int64_t rows = rows_of(problem.x), columns = columns_of(problem.x);
  if (rows == 0 || columns == 0) return;
  const RowKernels& kernels = kernels_for(context, problem.x.dtype);
  const bool in_place = problem.x.data == problem.output.data;  // its lines are in the caches already
  const bool stream = config == kStreamStores && !in_place && rows_are_aligned(problem.output);
  const bool together =
      problem.x.rank == 2 && !problem.causal && (!problem.mask.is_present() || problem.mask.rank == 2);
  const int64_t buffer_stride = (columns + 15) / 16 * 16;  // whole lines
  for_row_blocks(rows, columns * size_of(problem.x.dtype), together, 2 * buffer_stride, context,
                 [&](int64_t row, int64_t count, float* buffer) {
                   kernels.forward({.rows = count,
                                    .columns = columns,
                                    .visible = problem.causal ? causal_columns(row, problem.queries, columns) : columns,
                                    .x = row_start(problem.x, row),
                                    .mask = row_start(problem.mask, row),
                                    .output = row_start(problem.output, row),
                                    .x_stride_elements = problem.x.strides[0],
                                    .mask_stride_elements = problem.mask.strides[0],
                                    .buffer = buffer,
                                    .buffer_stride = buffer_stride,
                                    .scale = static_cast<float>(problem.scale),
                                    .mask_kind = mask_kind_of(problem),
                                    .log = problem.log,
                                    .empty_is_zero = removes_scores(problem),
                                    .stream_stores = stream});
                 });
}

void run_backward(const BackwardProblem& problem, int config, Context& context) {
  const int64_t rows = rows_of(problem.output), columns = columns_of(problem.output);
  if (rows == 0 || columns == 0) return;
  const RowKernels& kernels = kernels_for(context, problem.output.dtype);
  const bool in_place =
      problem.grad_input.data == problem.output.data || problem.grad_input.data == problem.grad_output.data;
  const bool stream = config == kStreamStores && !in_place && rows_are_aligned(problem.grad_input);
  for_row_blocks(rows, columns * size_of(problem.output.dtype), problem.output.rank == 2, 0, context,
                 [&](int64_t row, int64_t count, float*) {
                   kernels.backward({.rows = count,
                                     .columns = columns,
                                     .grad_output = row_start(problem.grad_output, row),
                                     .output = row_start(problem.output, row),
                                     .grad_input = row_start(problem.grad_input, row),
                                     .grad_output_stride_elements = problem.grad_output.strides[0],
                                     .output_stride_elements = problem.output.strides[0],
                                     .scale = static_cast<float>(problem.scale),
                                     .log = problem.log,
                                     .masked = problem.masked,
                                     .stream_stores = stream});
                 });
}

uint64_t code_version() {
  return hash_text("softmax cpu 4");
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

}  // namespace kernel_pytorch::softmax
