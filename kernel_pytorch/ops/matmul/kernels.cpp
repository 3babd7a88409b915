// The kernels of matmul, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/matmul/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::matmul {
namespace {

std::span<const registry::Kernel<Product>> kernels() {
  static const registry::Kernel<Product> kKernels[] = {
      // clang-format off
      kRowSums,
      kThin,
      kSm90,
      kMma,
      kTile,
      kCublasLt,
      kCpuThin,
      kCpuAmx,
      kCpuDots,
      kCpuRows,
      kCpu,
      kReference,
      // clang-format on
  };
  return kKernels;
}

// What supports, configs and a tuned choice may depend on.
void describe(const Product& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kProductFields, &problem, key);
  key.field("b_rows", is_row_major(problem.b));
  const bool is_aligned = has_aligned_lines(problem.a) && has_aligned_lines(problem.b);
  const bool is_epilogue_aligned = has_aligned_lines(problem.output) && has_aligned_lines(problem.residual) &&
                                   has_aligned_lines(problem.saved) && has_aligned_lines(problem.preactivation);
  key.field("aligned", is_aligned + 2 * is_epilogue_aligned);
  key.field("up_lines", problem.up.is_present() * (1 + has_aligned_lines(problem.up)));
  key.field("up_place", problem.up.is_present() && is_like_b(problem.up, problem) ? 1 + is_far(problem) : 0);
  key.field("distinct",
            has_distinct_lines(problem.a) && has_distinct_lines(problem.b) && has_distinct_lines(problem.residual));
}

// Rows (columns, if it is stored transposed) that are `padding` elements apart from each other.
void pad(TensorView& matrix, int64_t padding, bool transposed = false) {
  if (!matrix.is_present()) return;
  const auto rank = static_cast<size_t>(matrix.rank);
  const int64_t rows = matrix.size(-2), columns = matrix.size(-1), pitch = (transposed ? rows : columns) + padding;
  matrix.strides[rank - 2] = transposed ? 1 : pitch;
  matrix.strides[rank - 1] = transposed ? pitch : 1;
  int64_t stride = pitch * (transposed ? columns : rows);
  for (int i = matrix.rank - 3; i >= 0; --i) {
    matrix.strides[static_cast<size_t>(i)] = stride;
    stride *= matrix.size(i);
  }
}

// Options besides those of the list: order=nn|nt|tn|tt (t: stored transposed), expand_b=0|1, padding=ELEMENTS between
// rows. A gradient's form has `saved`.
void arrange(const registry::ProblemRequest& request, Product& problem) {
  const int order = registry::choice_option(request, "order", {"nn", "nt", "tn", "tt"}, "nn");
  const auto padding = registry::integer_option(request, "padding", 0);
  if (is_gradient(problem.form)) problem.saved = problem.output;
  pad(problem.a, padding, order >= 2);
  pad(problem.b, padding, order % 2 == 1);
  if (problem.form == Form::kGatedTwice) problem.up = problem.b;
  for (TensorView* view : {&problem.output, &problem.saved, &problem.residual, &problem.preactivation}) {
    pad(*view, padding);
  }
  if (registry::flag_option(request, "expand_b", false) && problem.b.rank > 2) problem.b.strides[0] = 0;
}

// Fewer rows, then fewer columns: no tensor may have more elements than asked for, nor the work more than 256 times
// that.
Product shrink(const Product& problem, int64_t elements) {
  Product small = problem;
  const Sizes sizes = sizes_of(problem);
  const auto limit = [](int64_t size, int64_t most) {
    if (size <= most) return size;
    return most < 16 ? std::max<int64_t>(most - most % 2, std::min<int64_t>(size, 2)) : most / 16 * 16;
  };
  const int64_t k = std::max<int64_t>(sizes.k, 1), work = elements * 256;
  const int64_t batch = limit(sizes.batch, std::max<int64_t>(elements / (k * std::max<int64_t>(sizes.n, 1)), 1));
  const int64_t n = limit(sizes.n, std::max<int64_t>(std::min(elements / k, work / (batch * k * 8)), 2));
  const int64_t widest = std::max({k, 2 * n, int64_t{1}}) * std::max<int64_t>(batch, 1);
  const int64_t m =
      limit(sizes.m, std::max<int64_t>(std::min(elements / widest, work / (batch * k * std::max<int64_t>(n, 1))), 1));
  const auto cut = [&](TensorView& view, int64_t rows, int64_t columns) {
    if (view.is_present()) view.sizes = {batch, rows, columns};
  };
  const int64_t columns_of_b = problem.form == Form::kGatedTwice ? n / 2 : n;
  const int64_t columns = output_columns_of(problem.form, columns_of_b);
  cut(small.a, m, sizes.k);
  cut(small.b, sizes.k, columns_of_b);
  cut(small.up, sizes.k, columns_of_b);
  cut(small.output, m, columns);
  cut(small.saved, m, columns);
  cut(small.residual, m, columns);
  cut(small.preactivation, m, n);
  if (small.bias.is_present()) small.bias.sizes[0] = n;
  if (small.row_sums.is_present()) {
    small.row_sums = contiguous_view(nullptr, small.row_sums.dtype, {batch, m}, small.row_sums.device);
  }
  return small;
}

int64_t flops(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  return 2 * sizes.batch * sizes.m * sizes.n * sizes.k;
}

}  // namespace

constinit const registry::Operation<Product> kMultiply = registry::declared<Product, kProductFields, flops>(
    {.name = "matmul",
     .kernels = kernels,
     .describe = describe,
     .request = {.shape = "... m n k", .options = "order expand_b padding"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink,
     .shapes = shapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Product, multiply>("matmul", "matmul_forward", kProductFields),
                   registry::plain<Product, accumulate>(
                       "matmul_add_", kProductFields, {.without = "precision", .shown = "alpha", .updated = "output"}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kMultiply, kPairGradient>};

}  // namespace kernel_pytorch::matmul
