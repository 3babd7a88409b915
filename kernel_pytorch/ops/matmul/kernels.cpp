// The kernels of matmul, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::matmul {
namespace {

// What supports, configs and a tuned choice may depend on.
void describe(const Product& problem, tuning::KeyBuilder& key) {
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

// Options besides those of the list: order=nn|nt|tn|tt (t: stored transposed), expand_b=0|1, padding=ELEMENTS between
// rows. A gradient's form has `saved`.
void arrange(const registry::ProblemRequest& request, Product& problem) {
  const int order = registry::choice_option(request, "order", {"nn", "nt", "tn", "tt"}, "nn");
  const auto padding = registry::integer_option(request, "padding", 0);
  if (is_gradient(problem.form)) problem.saved = problem.output;
  registry::store_matrices(problem.a, padding, order >= 2);
  registry::store_matrices(problem.b, padding, order % 2 == 1);
  if (problem.form == Form::kGatedTwice) problem.up = problem.b;
  for (TensorView* view : {&problem.output, &problem.saved, &problem.residual, &problem.preactivation}) {
    registry::store_matrices(*view, padding);
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

// [batch, m, n, k]: edges of tiles, odd tails, all transpositions, every form and option.
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x128x256x64 1x67x130x37 2x200x136x264 order=nn,nt,tn,tt; 1x1,2,3,5,8,15,17x328x520 order=nt
    1x3x136x1100 1x600x3x100 1x1x1x1 1x0x8x8; 1x7x9x0 bias=1 residual=1 row_sums=1; 1x520x512x1088 order=nt
    1x330x40x1030 order=nt bias=1 residual=1
    2x600x72x100 order=nt bias=1  # rows are what many workers can share
    3x40x72x56 expand_b=1 padding=8; 1x72x104x88 padding=3 alpha=0.5 residual=1 beta=-2
    1x130x264x96 activation=gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh bias=1 order=nt preactivation=1
    form=gradient activation=gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh
    1x130x528x96 2x33x70x40 1x5x272x520 form=gated activation=gelu,silu bias=1 order=nt preactivation=1 residual=1
    1x130x264x96 form=gated_gradient activation=gelu,silu
    2x9x34x40 form=gated_gradient activation=gelu,silu residual=1; 1x192x320x128 order=tn row_sums=1 bias=1
    2x50x70x300 order=tn row_sums=fp32 output=fp32 residual=1; 1x12x264x2100 row_sums=1 output=fp32 bias=1 order=nt
    1x264x0x2100 order=tn row_sums=fp32; 2x40x0x72 row_sums=1; 1x136x264x96 activation=silu bias=fp32 residual=fp32
    bf16 fp16: 1x1,13,130,300x264x136 form=gated_twice activation=silu order=nt residual=1
    fp32: 1x67x130x37 order=nn,nt,tn,tt precision=bf16,bf16x3
    2x96x160x600 order=nn,nt,tn,tt precision=bf16,bf16x3 row_sums=1
    1x4x130x70 precision=bf16,bf16x3 bias=1 activation=gelu
    fp64: 2x20x30x40 bias=1 activation=gelu residual=1 row_sums=1; 1x20x30x40 order=tt form=gated activation=silu
)";

}  // namespace

constinit const registry::Operation<Product> kMultiply = registry::declared<Product, kProductFields, flops>(
    {.name = "matmul",
     .kernels = registry::kernel_list<kRowSums, kThin, kSm90, kMma, kSm90Float, kMmaFloat, kTile, kMmaDouble, kCublasLt,
                                      kCpuThin, kCpuAmx, kCpuDots, kCpuRows, kCpu, kReference>,
     .describe = describe,
     .request = {.shape = "... m n k", .options = "order expand_b padding"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink,
     .shapes = kShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Product, multiply>("matmul", "matmul_forward", kProductFields),
                   registry::plain<Product, accumulate>(
                       "matmul_add_", kProductFields, {.without = "precision", .shown = "alpha", .updated = "output"}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kMultiply, kPairGradient>};

}  // namespace kernel_pytorch::matmul
