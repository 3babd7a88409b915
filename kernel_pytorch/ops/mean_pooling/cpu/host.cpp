// The host side of the CPU kernels. Forward: a task sums one part of a mean's tokens over one strip of columns; parts
// are cut by the number of tokens alone and added in their order, so that threads do not show. Backward: a task writes
// the tokens of one part.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/mean_pooling/cpu/rows.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::mean_pooling {
namespace {

constexpr int64_t kPartTokens = 256;
constexpr int64_t kStripColumns = 1024;

const RowKernels& kernels_of(CpuIsa isa, DType dtype) {
  return KP_AT_CPU_LEVEL(isa, kRowKernels)[cpu_type_index(dtype)];
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.x.dtype, device, {&problem.x}));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.grad_input.dtype, device, {&problem.grad_input}));
}

// Which batch, mean and inner position an output row is.
struct Place {
  int64_t batch, mean, inner;
  Place(const Sizes& sizes, int64_t row)
      : batch(row / (sizes.means * sizes.inner)), mean(row / sizes.inner % sizes.means), inner(row % sizes.inner) {}
};

char* token_start(const TensorView& x, const Place& place, int64_t token) {
  const int64_t offset = place.batch * x.strides[0] + token * x.strides[1] + place.inner * x.strides[2];
  return x.as<char>() + offset * size_of(x.dtype);
}

std::vector<Range> ranges_of(const Sizes& sizes, const TensorView& offsets) {
  std::vector<Range> ranges;
  for (int64_t mean = 0; mean < sizes.means; ++mean) ranges.push_back(range_of(sizes, offsets, mean));
  return ranges;
}

int64_t parts_of(const Range& range) {
  return std::max<int64_t>((range.end - range.begin + kPartTokens - 1) / kPartTokens, 1);
}

void run_forward(const Forward& problem, int, Context& context) {
  const Sizes sizes(problem.x, problem.offsets, problem.chunk_size);
  if (problem.output.element_count() == 0) return;
  const RowKernels& kernels = kernels_of(context.info->cpu.isa, problem.x.dtype);
  const std::vector<Range> ranges = ranges_of(sizes, problem.offsets);
  int64_t most_parts = 1;
  for (const Range& range : ranges) most_parts = std::max(most_parts, parts_of(range));
  const int64_t strips = (sizes.columns + kStripColumns - 1) / kStripColumns, element_bytes = size_of(problem.x.dtype);
  // Totals of the parts of one row lie side by side.
  const int64_t total_elements = sizes.rows() * most_parts * sizes.columns;
  auto* totals = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(total_elements) * sizeof(float)));
  parallel_for(context.threads, sizes.rows() * most_parts * strips, [&](int64_t task) {
    const int64_t column = task % strips * kStripColumns, part = task / strips % most_parts;
    const int64_t row = task / strips / most_parts, columns = std::min(kStripColumns, sizes.columns - column);
    const Place place(sizes, row);
    const Range& range = ranges[place.mean];
    const int64_t begin = range.begin + part * kPartTokens, end = std::min(range.end, begin + kPartTokens);
    if (part >= parts_of(range)) return;
    float* target = totals + (row * most_parts + part) * sizes.columns + column;
    std::fill_n(target, columns, 0.0f);
    kernels.add_rows(token_start(problem.x, place, begin) + column * element_bytes, problem.x.strides[1], end - begin,
                     columns, target);
  });
  parallel_for(context.threads, sizes.rows() * strips, [&](int64_t task) {
    const int64_t column = task % strips * kStripColumns, row = task / strips;
    const int64_t columns = std::min(kStripColumns, sizes.columns - column);
    const Range& range = ranges[Place(sizes, row).mean];
    float* first = totals + row * most_parts * sizes.columns + column;
    const int64_t parts = parts_of(range);
    for (int64_t distance = 1; distance < parts; distance *= 2) {  // in pairs, then pairs of pairs: little rounding
      for (int64_t part = 0; part + distance < parts; part += 2 * distance) {
        float* one = first + part * sizes.columns;
        const float* other = one + distance * sizes.columns;
        for (int64_t j = 0; j < columns; ++j) one[j] += other[j];
      }
    }
    const float count = static_cast<float>(std::max<int64_t>(range.end - range.begin, 1));  // no tokens: zeros
    kernels.divide_floats(problem.output.as<char>() + (row * sizes.columns + column) * element_bytes, first, count,
                          columns);
  });
}

// Tokens in no sequence: before the first offset and after the last.
void clear_outside(const Backward& problem, const std::vector<Range>& ranges) {
  if (!problem.offsets.is_present()) return;
  const TensorView& gradient = problem.grad_input;
  const int64_t token_bytes = gradient.strides[1] * size_of(gradient.dtype), tokens = gradient.sizes[1];
  const int64_t first = ranges.empty() ? tokens : ranges.front().begin,
                last = ranges.empty() ? tokens : ranges.back().end;
  std::fill_n(gradient.as<char>(), first * token_bytes, 0);
  std::fill_n(gradient.as<char>() + last * token_bytes, (tokens - last) * token_bytes, 0);
}

void run_backward(const Backward& problem, int, Context& context) {
  const Sizes sizes(problem.grad_input, problem.offsets, problem.chunk_size);
  if (problem.grad_input.element_count() == 0) return;
  const RowKernels& kernels = kernels_of(context.info->cpu.isa, problem.grad_input.dtype);
  const std::vector<Range> ranges = ranges_of(sizes, problem.offsets);
  clear_outside(problem, ranges);
  const int64_t element_bytes = size_of(problem.grad_input.dtype);
  const bool streams = problem.grad_input.byte_count() >= kStreamFromBytes && rows_are_aligned(problem.grad_input);
  constexpr int64_t kTaskTokens = 64;
  int64_t most_parts = 1;
  for (const Range& range : ranges) {
    most_parts = std::max(most_parts, (range.end - range.begin + kTaskTokens - 1) / kTaskTokens);
  }
  parallel_for(context.threads, sizes.rows() * most_parts, [&](int64_t task) {
    const int64_t part = task % most_parts, row = task / most_parts;
    const Place place(sizes, row);
    const Range& range = ranges[place.mean];
    const int64_t begin = range.begin + part * kTaskTokens, end = std::min(range.end, begin + kTaskTokens);
    if (begin >= end) return;
    const char* from = problem.grad_output.as<const char>() + row * sizes.columns * element_bytes;
    kernels.divide_rows(token_start(problem.grad_input, place, begin), problem.grad_input.strides[1], end - begin, from,
                        static_cast<float>(range.end - range.begin), sizes.columns, streams);
  });
}

uint64_t code_version() {
  return hash_text("mean_pooling cpu 2");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports_forward, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports_backward, .run = run_backward, .source_hash = code_version};

}  // namespace kernel_pytorch::mean_pooling
