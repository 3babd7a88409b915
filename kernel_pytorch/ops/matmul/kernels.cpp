// The kernels of matmul, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/matmul/shapes.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::matmul {
namespace {

std::span<const registry::Kernel<Product>> kernels() {
  static const registry::Kernel<Product> kKernels[] = {
      // clang-format off
      kRowSums,
      kSm90,
      kMma,
      kTile,
      kThin,  // not measured yet: chosen by tuning or by name alone, since kernels above take every such product
      kCublasLt,
      kCpuThin,
      kCpuAmx,
      kCpuRows,
      kCpu,
      kReference,
      // clang-format on
  };
  return kKernels;
}

// What supports, configs and a tuned choice may depend on.
void describe(const Product& problem, tuning::KeyBuilder& key) {
  const Sizes sizes = sizes_of(problem);
  key.field("batch", tuning::bucket(sizes.batch));
  key.field("m", tuning::bucket(sizes.m));
  key.field("n", tuning::bucket(sizes.n));
  key.field("k", tuning::bucket(sizes.k));
  key.field("dtype", problem.a.dtype);
  key.field("output", problem.output.dtype);
  key.field("precision", static_cast<int64_t>(problem.precision));
  key.field("a_rows", is_row_major(problem.a));
  key.field("b_rows", is_row_major(problem.b));
  key.field("form", static_cast<int64_t>(problem.form));
  key.field("activation", static_cast<int64_t>(problem.activation));
  key.field("bias", problem.bias);
  key.field("saved", problem.saved);
  key.field("residual", problem.residual);
  key.field("preactivation", problem.preactivation);
  key.field("row_sums", problem.row_sums);
  const bool is_aligned = has_aligned_lines(problem.a) && has_aligned_lines(problem.b);
  const bool is_epilogue_aligned = has_aligned_lines(problem.output) && has_aligned_lines(problem.residual) &&
                                   has_aligned_lines(problem.saved) && has_aligned_lines(problem.preactivation);
  key.field("aligned", is_aligned + 2 * is_epilogue_aligned);
  key.field("distinct",
            has_distinct_lines(problem.a) && has_distinct_lines(problem.b) && has_distinct_lines(problem.residual));
}

void visit(Product& problem, registry::TensorVisitor visit, void* state) {
  const registry::PresentTensors each{visit, state};
  using enum registry::Role;
  each("a", kInput, problem.a);
  each("b", kInput, problem.b);
  each("bias", kInput, problem.bias);
  each("saved", kInput, problem.saved);
  each("residual", kInput, problem.residual);
  each("output", kOutput, problem.output);
  each("preactivation", kOutput, problem.preactivation);
  each("row_sums", kOutput, problem.row_sums);
}

// A matrix whose rows (columns, if it lies transposed) are `padding` elements apart from each other.
TensorView matrix(const registry::ProblemRequest& request, DType dtype, int64_t batch, int64_t rows, int64_t columns,
                  int64_t padding, bool transposed = false) {
  TensorView view = contiguous_view(nullptr, dtype, {batch, rows, columns}, request.device);
  const int64_t pitch = (transposed ? rows : columns) + padding;
  view.strides = {pitch * (transposed ? columns : rows), transposed ? 1 : pitch, transposed ? pitch : 1};
  return view;
}

// Options: order=nn|nt|tn|tt (t: stored transposed), alpha, beta, bias=0|1|DTYPE, form, activation=WORD, residual and
// row_sums=0|1|DTYPE, preactivation=0|1, output=DTYPE, precision=WORD, expand_b=0|1, padding=ELEMENTS between rows.
// fp64 is checked as on the CPU, then moved: that a GPU has no kernel for it is a kernel's reason, not a bad request.
Product make(const registry::ProblemRequest& asked) {
  registry::ProblemRequest request = asked;
  if (request.dtype == DType::kFloat64) request.device = Device{};
  registry::check_options(request, {"order", "alpha", "beta", "bias", "form", "activation", "residual", "row_sums",
                                    "preactivation", "output", "precision", "expand_b", "padding"});
  KP_CHECK(request.shape.size() == 3 || request.shape.size() == 4, "matmul: the shape is ", shape_text(request.shape),
           "; it must be [batch, m, n, k] or [m, n, k]");
  const int64_t* shape = request.shape.data() + (request.shape.size() - 3);
  const int64_t batch = request.shape.size() == 4 ? request.shape[0] : 1, m = shape[0], n = shape[1], k = shape[2];
  const int order = registry::choice_option(request, "order", {"nn", "nt", "tn", "tt"}, "nn");
  const auto padding = registry::integer_option(request, "padding", 0);
  const auto type_of = [&](std::string_view name, DType one, bool& is_present) {  // "0", "1" or a type
    for (const auto& [word, value] : request.options) {
      if (word != name || value == "0") continue;
      is_present = true;
      return value == "1" ? one : registry::dtype_option(request, name, one);
    }
    return one;
  };
  Product problem;
  problem.a = matrix(request, request.dtype, batch, m, k, padding, order >= 2);
  problem.b = matrix(request, request.dtype, batch, k, n, padding, order % 2 == 1);
  if (registry::flag_option(request, "expand_b", false)) problem.b.strides[0] = 0;
  problem.alpha = registry::number_option(request, "alpha", 1);
  problem.beta = registry::number_option(request, "beta", 1);
  problem.form = static_cast<Form>(
      registry::choice_option(request, "form", {"plain", "gated", "gradient", "gated_gradient"}, "plain"));
  problem.precision =
      static_cast<Precision>(registry::choice_option(request, "precision", {"full", "tf32", "bf16", "bf16x3"}, "full"));
  problem.activation = static_cast<Kind>(registry::choice_option(request, "activation", kKindNames, "identity"));
  KP_CHECK(problem.form != Form::kGated || n % 2 == 0, "matmul: n is ", n, "; a gated product takes pairs");
  const DType output = registry::dtype_option(request, "output", request.dtype);
  const int64_t columns = output_columns_of(problem.form, n);
  problem.output = matrix(request, output, batch, m, columns, padding);
  bool has_bias = false, has_residual = false, has_sums = false;
  const DType bias = type_of("bias", output, has_bias), residual = type_of("residual", output, has_residual),
              sums = type_of("row_sums", request.dtype, has_sums);
  if (has_bias) problem.bias = contiguous_view(nullptr, bias, {n}, request.device);
  if (has_residual) problem.residual = matrix(request, residual, batch, m, columns, padding);
  if (has_sums) problem.row_sums = contiguous_view(nullptr, sums, {batch, m}, request.device);
  if (is_gradient(problem.form)) problem.saved = matrix(request, output, batch, m, columns, padding);
  if (registry::flag_option(request, "preactivation", false)) {
    problem.preactivation = matrix(request, output, batch, m, n, padding);
  }
  check(problem, request.device);
  for (TensorView* view : {&problem.a, &problem.b, &problem.output, &problem.bias, &problem.residual, &problem.row_sums,
                           &problem.saved, &problem.preactivation}) {
    view->device = asked.device;
  }
  return problem;
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
  const int64_t columns = output_columns_of(problem.form, n);
  cut(small.a, m, sizes.k);
  cut(small.b, sizes.k, n);
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

registry::Cost cost(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  return {.bytes = registry::tensor_bytes(problem, visit), .flops = 2 * sizes.batch * sizes.m * sizes.n * sizes.k};
}

}  // namespace

constinit const registry::Operation<Product> kMultiply{.name = "matmul",
                                                       .kernels = kernels,
                                                       .describe = describe,
                                                       .visit_tensors = visit,
                                                       .make = make,
                                                       .shrink = shrink,
                                                       .cost = cost,
                                                       .shapes = shapes};

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.operations = registry::erased<kMultiply, kPairGradient>};

}  // namespace kernel_pytorch::matmul
