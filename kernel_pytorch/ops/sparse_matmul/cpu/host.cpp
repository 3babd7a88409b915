// The host side of the CPU kernel. Few rows of x are widened, and tasks read their rows of the weight as they lie. More
// rows are widened and turned once; tasks take some rows of the weight, each of which is widened and its places decoded
// once for all panels of x.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/ops/sparse_matmul/cpu/rows.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

using sparse_compress::kBlockColumns;
using sparse_compress::kWordColumns;

constexpr int64_t kTaskRows = 16;  // of the weight

float element_at(const TensorView& view, int64_t place) {
  return static_cast<float>(load_element(view.data, view.dtype, place));
}

void store_sums(const Product& problem, int64_t column, int64_t first, int64_t count, const float* sums) {
  const double bias = problem.bias.is_present() ? load_element(problem.bias.data, problem.bias.dtype, column) : 0;
  const bool has_activation = problem.activation != pointwise::Kind::kIdentity;
  for (int64_t i = 0; i < count; ++i) {
    double value = double{sums[i]} + bias;
    if (has_activation) value = pointwise::evaluate(problem.activation, value).value;
    store_element(problem.output.data, problem.output.dtype, (first + i) * problem.output.strides[0] + column, value);
  }
}

// From here on a turned panel is faster (NOTES.md).
constexpr int64_t kMostFewRows = 64;

void run_few(const Product& problem, const RowKernels& kernels, Context& context) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.values.sizes[0];
  const int64_t stride = (k + kWordColumns - 1) / kWordColumns * kWordColumns;
  const int64_t chunks = (m + kFewRows - 1) / kFewRows;
  auto* x = static_cast<float*>(
      context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(chunks * kFewRows * stride, 1)) * sizeof(float)));
  std::fill(x, x + chunks * kFewRows * stride, 0.0f);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) x[i * stride + p] = element_at(problem.x, i * problem.x.strides[0] + p);
  }
  const auto few = kernels.few[cpu_type_index(problem.values.dtype)];
  const int64_t bytes = size_of(problem.values.dtype);
  parallel_for(context.threads, (n + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    const int64_t first = task * kTaskRows, rows = std::min(kTaskRows, n - first);
    alignas(64) float sums[kTaskRows * kFewRows];
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t x_rows = std::min(kFewRows, m - chunk * kFewRows);
      few({.x = x + chunk * kFewRows * stride,
           .x_stride = stride,
           .x_rows = x_rows,
           .values = problem.values.as<const char>() + first * (k / 2) * bytes,
           .columns = k,
           .rows = rows,
           .metadata = problem.metadata.as<const uint32_t>() + 2 * first,
           .block_stride = 2 * n,
           .sums = sums});
      for (int64_t row = 0; row < rows; ++row) {
        store_sums(problem, first + row, chunk * kFewRows, x_rows, sums + row * kFewRows);
      }
    }
  });
}

void run(const Product& problem, int, Context& context) {
  const int64_t m = problem.x.sizes[0], k = problem.x.sizes[1], n = problem.values.sizes[0];
  if (m == 0 || n == 0) return;
  const RowKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels);
  if (m <= kMostFewRows) return run_few(problem, kernels, context);
  const int64_t panels = (m + kPanelRows - 1) / kPanelRows;
  auto* turned =
      static_cast<float*>(context.scratch->allocate(static_cast<size_t>(panels * k * kPanelRows) * sizeof(float)));
  parallel_for(context.threads, panels, [&](int64_t panel) {
    float* to = turned + panel * k * kPanelRows;
    const int64_t first = panel * kPanelRows, count = std::min(kPanelRows, m - first);
    std::fill(to, to + k * kPanelRows, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t p = 0; p < k; ++p)
        to[p * kPanelRows + i] = element_at(problem.x, (first + i) * problem.x.strides[0] + p);
    }
  });
  const auto* metadata = problem.metadata.as<const uint32_t>();
  parallel_for(context.threads, (n + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    std::vector<float> values(static_cast<size_t>(k / 2));
    std::vector<int32_t> offsets(static_cast<size_t>(k / 2));
    alignas(64) float sums[kPanelRows];
    for (int64_t j = task * kTaskRows; j < std::min(n, (task + 1) * kTaskRows); ++j) {
      for (int64_t kept = 0; kept < k / 2; ++kept) {
        const int64_t first = kept / 2 * 4;
        const uint32_t word = metadata[(first / kBlockColumns * n + j) * 2 + first % kBlockColumns / kWordColumns];
        const int64_t column = first + (word >> (first % kWordColumns + kept % 2 * 2) & 3);
        values[static_cast<size_t>(kept)] = element_at(problem.values, j * (k / 2) + kept);
        offsets[static_cast<size_t>(kept)] = static_cast<int32_t>(column * kPanelRows);
      }
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t first = panel * kPanelRows, count = std::min(kPanelRows, m - first);
        kernels.multiply({.panel = turned + panel * k * kPanelRows,
                          .vectors = (count + kernels.lanes - 1) / kernels.lanes,
                          .values = values.data(),
                          .offsets = offsets.data(),
                          .count = k / 2,
                          .sums = sums});
        store_sums(problem, j, first, count, sums);
      }
    }
  });
}

constexpr const char* kLarge = "k is 2^24 or more";

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(problem.x.sizes[1] >= int64_t{1} << 24 ? kLarge : nullptr);
}

uint64_t code_version() {
  return hash_text("sparse_matmul cpu 2");
}

}  // namespace

constinit const registry::Kernel<Product> kCpu{
    .name = "cpu", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::sparse_matmul
