// The host side of the CPU kernels: what they support, how rows are split into tasks, and which instruction level runs.
#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/cpu/rows.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::pointwise {
namespace {

constexpr int64_t kTaskElements = 32 << 10;  // long enough to hide the atomic, short enough to balance
constexpr int64_t kPieceElements = 4 << 10;  // the rows that dense tensors are cut into where no bias counts columns

constexpr const char* kNotGated = "this function is not built with a gate";

RowKernels kernels_for(const Context& context, DType dtype) {
  return KP_AT_CPU_LEVEL(context.info->cpu.isa, row_kernels)(cpu_type_index(dtype));
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device,
                        std::initializer_list<const TensorView*> views) {
  if (problem.up.is_present() && !is_gate(problem.kind)) return kNotGated;
  return cpu_obstacle(problem.gate.dtype, device, views);
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem, device, {&problem.gate, &problem.up, &problem.residual}));
}
registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem, device, {&problem.gate, &problem.up, &problem.grad_output}));
}

template <class Problem>
std::vector<std::string> config_texts(const Problem&, const DeviceInfo&) {
  return store_configs();
}
template <class Problem>
int heuristic(const Problem& problem, const DeviceInfo&) {
  return problem.gate.byte_count() >= kStreamFromBytes ? kStreamStores : kCachedStores;
}

bool rows_are_end_to_end(const TensorView& view) {
  return !view.is_present() ||
         (view.rank == 2 && (view.sizes[0] <= 1 || view.strides[0] == view.sizes[1] || view.sizes[1] == 0));
}

bool lines_are_whole(const TensorView& output) {
  return !output.is_present() || (output.rank == 2 && has_aligned_rows(output, kLineBytes) &&
                                  output.sizes[1] * size_of(output.dtype) % kLineBytes == 0);
}

// Where rows lie end to end in every tensor and no bias tells columns apart, they are one run of elements: cut into
// pieces of whole lines, whatever the width was. Returns what is left over of the last piece.
int64_t cut_into_pieces(std::initializer_list<TensorView*> views) {
  const int64_t elements = (*views.begin())->element_count(), rest = elements % kPieceElements;
  for (TensorView* view : views) {
    if (!view->is_present()) continue;
    view->rank = 2;
    view->sizes = {elements / kPieceElements, kPieceElements};
    view->strides = {kPieceElements, 1};
  }
  return rest;
}

// The elements behind the whole pieces, as one row.
void take_rest(std::initializer_list<TensorView*> views, int64_t rest) {
  for (TensorView* view : views) {
    if (!view->is_present()) continue;
    view->data = static_cast<char*>(view->data) + view->sizes[0] * kPieceElements * size_of(view->dtype);
    view->sizes = {1, rest};
  }
}

RowsOf rows_at(const TensorView& view, int64_t row) {
  if (!view.is_present()) return {};
  return {static_cast<char*>(view.data) + row_offset(view, row) * size_of(view.dtype), view.strides[0]};
}

template <class Problem>
DropoutRows dropout_of(const Problem& problem, int64_t first_element) {
  const uint32_t threshold = dropout_threshold(problem.dropout);
  if (threshold == 0) return {};
  const int64_t* seed = problem.seed.template as<int64_t>();
  return {static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]), threshold, dropout_scale(problem.dropout),
          first_element};
}

template <class Problem>
bool bias_is_float(const Problem& problem) {
  return (problem.gate_bias.is_present() ? problem.gate_bias : problem.up_bias).dtype == DType::kFloat32;
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

void run_forward_rows(const ForwardProblem& problem, bool stream, int64_t first_element, Context& context) {
  const int64_t rows = rows_of(problem.gate), columns = columns_of(problem.gate);
  if (rows == 0 || columns == 0) return;
  const RowKernels kernels = kernels_for(context, problem.gate.dtype);
  const int64_t rows_per_task = std::clamp<int64_t>(kTaskElements / columns, 1, rows);
  const bool stream_stores = stream && lines_are_whole(problem.output);
  for_row_blocks(rows, rows_per_task, problem.gate.rank == 2, context.threads,
                 [&](int64_t, int64_t row, int64_t count) {
                   kernels.forward({.kind = problem.kind,
                                    .rows = count,
                                    .columns = columns,
                                    .gate = rows_at(problem.gate, row),
                                    .up = rows_at(problem.up, row),
                                    .residual = rows_at(problem.residual, row),
                                    .output = rows_at(problem.output, row),
                                    .gate_bias = problem.gate_bias.data,
                                    .up_bias = problem.up_bias.data,
                                    .dropout = dropout_of(problem, first_element + row * columns),
                                    .bias_is_float = bias_is_float(problem),
                                    .stream_stores = stream_stores});
                 });
}

void run_forward(const ForwardProblem& problem, int config, Context& context) {
  const bool stream = config == kStreamStores;
  const bool has_bias = problem.gate_bias.is_present() || problem.up_bias.is_present();
  const bool dense =
      rows_are_end_to_end(problem.gate) && rows_are_end_to_end(problem.up) && rows_are_end_to_end(problem.residual);
  if (has_bias || !dense) return run_forward_rows(problem, stream, 0, context);
  ForwardProblem pieces = problem;
  const std::initializer_list<TensorView*> views = {&pieces.gate, &pieces.up, &pieces.residual, &pieces.output};
  const int64_t rest = cut_into_pieces(views);
  run_forward_rows(pieces, stream, 0, context);
  const int64_t done = pieces.gate.element_count();
  take_rest(views, rest);
  run_forward_rows(pieces, stream, done, context);
}

// Sums over rows are kept per block of rows and added in the order of the blocks, so that neither the number of threads
// nor their timing shows in the result.
int64_t partial_blocks(int64_t rows, int64_t columns) {
  constexpr int64_t kPartialElements = 1 << 20, kRowsPerBlock = 16, kMostBlocks = 64;
  return std::clamp<int64_t>(std::min(rows / kRowsPerBlock, kPartialElements / columns), 1, kMostBlocks);
}

class BiasSums {
 public:
  BiasSums(const TensorView& total, int64_t blocks, Context& context) : total_(total), blocks_(blocks) {
    if (!total.is_present()) return;
    const size_t elements = static_cast<size_t>(blocks * total.size(0));
    partials_ = static_cast<float*>(context.scratch->allocate(elements * sizeof(float)));
    std::fill_n(partials_, elements, 0.0f);
  }
  float* of_block(int64_t block) const { return partials_ == nullptr ? nullptr : partials_ + block * total_.size(0); }
  void finish(Threads* threads) const {
    if (partials_ == nullptr) return;
    constexpr int64_t kColumnsPerTask = 512;
    const int64_t columns = total_.size(0);
    parallel_for(threads, (columns + kColumnsPerTask - 1) / kColumnsPerTask, [&](int64_t task) {
      std::array<float, kColumnsPerTask> sums{};
      const int64_t begin = task * kColumnsPerTask, count = std::min(kColumnsPerTask, columns - begin);
      for (int64_t block = 0; block < blocks_; ++block) {
        const float* partial = of_block(block) + begin;
        for (int64_t j = 0; j < count; ++j) sums[static_cast<size_t>(j)] += partial[j];
      }
      for (int64_t j = 0; j < count; ++j) {
        store_element(total_.data, total_.dtype, begin + j, sums[static_cast<size_t>(j)]);
      }
    });
  }

 private:
  const TensorView& total_;
  int64_t blocks_;
  float* partials_ = nullptr;
};

void run_backward_rows(const BackwardProblem& problem, bool stream, int64_t first_element, Context& context) {
  const int64_t rows = rows_of(problem.gate), columns = columns_of(problem.gate);
  if (rows == 0 || columns == 0) return;
  const RowKernels kernels = kernels_for(context, problem.gate.dtype);
  const bool stream_stores = stream && lines_are_whole(problem.grad_gate) && lines_are_whole(problem.grad_up);
  const bool wants_sums = problem.grad_gate_bias.is_present() || problem.grad_up_bias.is_present();
  const int64_t blocks = wants_sums ? partial_blocks(rows, columns) : 1;
  const BiasSums gate_sums(problem.grad_gate_bias, blocks, context), up_sums(problem.grad_up_bias, blocks, context);
  const int64_t rows_per_task =
      wants_sums ? (rows + blocks - 1) / blocks : std::clamp<int64_t>(kTaskElements / columns, 1, rows);
  for_row_blocks(rows, rows_per_task, problem.gate.rank == 2, context.threads,
                 [&](int64_t task, int64_t row, int64_t count) {
                   kernels.backward({.kind = problem.kind,
                                     .rows = count,
                                     .columns = columns,
                                     .grad_output = rows_at(problem.grad_output, row),
                                     .gate = rows_at(problem.gate, row),
                                     .up = rows_at(problem.up, row),
                                     .grad_gate = rows_at(problem.grad_gate, row),
                                     .grad_up = rows_at(problem.grad_up, row),
                                     .gate_bias = problem.gate_bias.data,
                                     .up_bias = problem.up_bias.data,
                                     .gate_partial = wants_sums ? gate_sums.of_block(task) : nullptr,
                                     .up_partial = wants_sums ? up_sums.of_block(task) : nullptr,
                                     .dropout = dropout_of(problem, first_element + row * columns),
                                     .bias_is_float = bias_is_float(problem),
                                     .stream_stores = stream_stores});
                 });
  gate_sums.finish(context.threads);
  up_sums.finish(context.threads);
}

void zero(const TensorView& view) {
  if (view.is_present()) std::fill_n(static_cast<char*>(view.data), view.byte_count(), 0);
}

void run_backward(const BackwardProblem& problem, int config, Context& context) {
  if (problem.gate.element_count() == 0) {
    zero(problem.grad_gate_bias);
    zero(problem.grad_up_bias);
    return;
  }
  const bool stream = config == kStreamStores;
  const bool has_bias = problem.gate_bias.is_present() || problem.up_bias.is_present() ||
                        problem.grad_gate_bias.is_present() || problem.grad_up_bias.is_present();
  const bool dense = rows_are_end_to_end(problem.gate) && rows_are_end_to_end(problem.up) &&
                     rows_are_end_to_end(problem.grad_output) && rows_are_end_to_end(problem.grad_gate) &&
                     rows_are_end_to_end(problem.grad_up);
  if (has_bias || !dense) return run_backward_rows(problem, stream, 0, context);
  BackwardProblem pieces = problem;
  const std::initializer_list<TensorView*> views = {&pieces.gate, &pieces.up, &pieces.grad_output, &pieces.grad_gate,
                                                    &pieces.grad_up};
  const int64_t rest = cut_into_pieces(views);
  run_backward_rows(pieces, stream, 0, context);
  const int64_t done = pieces.gate.element_count();
  take_rest(views, rest);
  run_backward_rows(pieces, stream, done, context);
}

uint64_t code_version() {
  return hash_text("pointwise cpu 3");
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCpu{.name = "cpu",
                                                             .origin = registry::Origin::kOurs,
                                                             .supports = supports_forward,
                                                             .configs = config_texts<ForwardProblem>,
                                                             .heuristic = heuristic<ForwardProblem>,
                                                             .run = run_forward,
                                                             .source_hash = code_version};
constinit const registry::Kernel<BackwardProblem> kBackwardCpu{.name = "cpu",
                                                               .origin = registry::Origin::kOurs,
                                                               .supports = supports_backward,
                                                               .configs = config_texts<BackwardProblem>,
                                                               .heuristic = heuristic<BackwardProblem>,
                                                               .run = run_backward,
                                                               .source_hash = code_version};

}  // namespace kernel_pytorch::pointwise
