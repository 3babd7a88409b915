// The kernels of the grouped products, best first, the references last, and what the registry asks about their
// problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

// Uneven groups: some empty, one large, the last tenth of the rows in none where there are many.
void set_offsets(const TensorView& offsets, int64_t rows) {
  const int64_t groups = offsets.sizes[0], used = rows > 20 ? rows - rows / 10 : rows;
  int64_t total = 0;
  std::vector<int64_t> shares;
  for (int64_t group = 0; group < groups; ++group) {
    shares.push_back(group % 3 == 1 ? 0 : group % 4 == 2 ? 9 : 1 + group % 5);
    total += shares.back();
  }
  int64_t before = 0;
  for (int64_t group = 0; group < groups; ++group) {
    before += shares[group];
    offsets.as<int32_t>()[group] = static_cast<int32_t>(used * before / std::max<int64_t>(total, 1));
  }
}
void set_gather(const TensorView& gather, int64_t source) {
  for (int64_t i = 0; gather.is_present() && i < gather.sizes[0]; ++i) {
    gather.as<int32_t>()[i] = static_cast<int32_t>(i * 7919 % std::max<int64_t>(source, 1));
  }
}
void set_trial_product(const Product& on_host) {
  set_offsets(on_host.offsets, rows_of(on_host));
  set_gather(on_host.gather, on_host.a.sizes[0]);
}
void set_trial_weight(const WeightGradient& on_host) {
  set_offsets(on_host.offsets, rows_of(on_host));
  set_gather(on_host.gather_a, on_host.a.sizes[0]);
  set_gather(on_host.gather_b, on_host.b.sizes[0]);
}
void set_trial_sums(const Sums& on_host) {
  set_offsets(on_host.offsets, rows_of(on_host));
  set_gather(on_host.gather, on_host.x.sizes[0]);
}

void describe_product(const Product& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem)));
  key.field("b_rows", is_row_major(problem.b));
  key.field("aligned", has_aligned_rows(problem.a) +
                           2 * has_aligned_rows(problem.b, kVectorBytes, is_row_major(problem.b) ? 2 : 1) +
                           4 * (has_aligned_rows(problem.output) && has_aligned_rows(problem.preactivation)));
  key.field("preactivation", problem.preactivation);
}
void describe_weight(const WeightGradient& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem)));
  key.field("output_rows", is_row_major(problem.output));
  key.field("aligned", has_aligned_rows(problem.a) + 2 * has_aligned_rows(problem.b));
}

// Rows that are gathered lie in a tensor of `source` rows, half as many where it is not given.
void set_source(const registry::ProblemRequest& request, TensorView& view, const TensorView& gather) {
  if (!gather.is_present()) return;
  view.sizes[0] = registry::integer_option(request, "source", std::max<int64_t>(gather.sizes[0] / 2, 1));
}
bool is_turned(const registry::ProblemRequest& request) {
  return registry::choice_option(request, "order", {"nn", "nt"}, "nn") == 1;
}

// Options besides those of the lists: order=nn|nt (t: b, or the gradient, is stored transposed), source=ROWS.
void arrange(const registry::ProblemRequest& request, Product& problem) {
  set_source(request, problem.a, problem.gather);
  registry::store_matrices(problem.b, 0, is_turned(request));
}
void arrange(const registry::ProblemRequest& request, WeightGradient& problem) {
  set_source(request, problem.a, problem.gather_a);
  set_source(request, problem.b, problem.gather_b);
  registry::store_matrices(problem.output, 0, is_turned(request));
}
void arrange(const registry::ProblemRequest& request, Sums& problem) {
  set_source(request, problem.x, problem.gather);
}

// Fewer rows; groups and matrices stay.
int64_t fewer_rows(int64_t rows, int64_t columns, int64_t elements) {
  return std::clamp<int64_t>(elements / std::max<int64_t>(columns, 1), std::min<int64_t>(rows, 64), rows);
}
Product shrink_product(const Product& problem, int64_t elements) {
  Product small = problem;
  const int64_t rows = fewer_rows(rows_of(problem), problem.b.sizes[1] * 8, elements);
  (problem.gather.is_present() ? small.gather : small.a).sizes[0] = rows;
  small.output.sizes[0] = rows;
  if (small.preactivation.is_present()) small.preactivation.sizes[0] = rows;
  return small;
}
WeightGradient shrink_weight(const WeightGradient& problem, int64_t elements) {
  WeightGradient small = problem;
  const int64_t rows = fewer_rows(rows_of(problem), problem.b.sizes[1] * 8, elements);
  (problem.gather_a.is_present() ? small.gather_a : small.a).sizes[0] = rows;
  (problem.gather_b.is_present() ? small.gather_b : small.b).sizes[0] = rows;
  return small;
}
Sums shrink_sums(const Sums& problem, int64_t elements) {
  Sums small = problem;
  const int64_t rows = fewer_rows(rows_of(problem), problem.x.sizes[1], elements);
  (problem.gather.is_present() ? small.gather : small.x).sizes[0] = rows;
  if (small.factors.is_present()) small.factors.sizes[0] = rows;
  return small;
}

int64_t product_flops(const Product& problem) {
  return 2 * rows_of(problem) * problem.b.sizes[1] * problem.b.sizes[2];
}
int64_t weight_flops(const WeightGradient& problem) {
  return 2 * rows_of(problem) * problem.a.sizes[1] * problem.b.sizes[1];
}
int64_t sums_flops(const Sums& problem) {
  return 2 * rows_of(problem) * problem.x.sizes[1];
}

// Shapes [rows, n, k, groups] that are tested and measured: edges of tiles, odd tails, every form and option.
constexpr const char* kProductShapes = R"(
  fp32 bf16 fp16: 300x136x72x5 order=nn,nt; order=nn,nt gather=1 bias=1; 67x37x33x3 order=nn,nt gather=1
    513x264x200x9 order=nt preactivation=1 activation=gelu
    200x256x64x4 form=gated,packed_gated activation=silu gather=1 preactivation=1 order=nt
    200x384x72x4 form=gated,packed_gated activation=silu limit=0.5 bias=1 preactivation=1
    70x36x24x2 form=gated,packed_gated activation=gelu; 5x64x64x40 1x8x8x1 0x8x8x2 order=-; 16x8x0x2 bias=1
  bf16: 300x136x72x5 output=fp32 bias=1 order=nt
  fp64: 20x6x5x3 form=packed_gated activation=silu gather=1
)";
constexpr const char* kWeightShapes = R"(
  fp32 bf16 fp16: 300x136x72x5 67x37x33x3 order=nn,nt gather_a=-,1; order=nn,nt gather_b=1; 700x264x200x4 output=fp32; 5x64x64x40 0x8x8x2
  fp64: 20x6x5x3
)";
constexpr const char* kSumsShapes = R"(
  fp32 bf16 fp16: 300x136x5 0x8x2; 67x33x3 gather=1 factors=1 output=fp32
  fp64: 20x6x3 factors=1
)";

}  // namespace

constinit const registry::Operation<Product> kMultiply = registry::declared<Product, kProductFields, product_flops>(
    {.name = "grouped_matmul",
     .kernels = registry::kernel_list<kSm90, kMma, kTile, kCpu, kReference>,
     .describe = describe_product,
     .set_trial_inputs = set_trial_product,
     .request = {.shape = "rows n k groups", .sizes = "source=rows", .options = "order"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink_product,
     .shapes = kProductShapes});
constinit const registry::Operation<WeightGradient> kWeightGradient =
    registry::declared<WeightGradient, kWeightFields, weight_flops>(
        {.name = "grouped_matmul_weight",
         .kernels = registry::kernel_list<kWeightSm90, kWeightMma, kWeightTile, kWeightCpu, kWeightReference>,
         .describe = describe_weight,
         .set_trial_inputs = set_trial_weight,
         .request = {.shape = "rows n m groups", .sizes = "source=rows other=rows", .options = "order"},
         .arrange = arrange,
         .check = check,
         .shrink = shrink_weight,
         .shapes = kWeightShapes});
constinit const registry::Operation<Sums> kSums = registry::declared<Sums, kSumsFields, sums_flops>(
    {.name = "group_sums",
     .kernels = registry::kernel_list<kSumsCuda, kSumsCpu, kSumsReference>,
     .set_trial_inputs = set_trial_sums,
     .request = {.shape = "rows n groups", .sizes = "source=rows factor_rows=rows"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink_sums,
     .shapes = kSumsShapes});

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Product, multiply>("grouped_matmul", "grouped_matmul_forward", kProductFields),
    registry::plain<WeightGradient, weight_gradient>("grouped_matmul_weight", kWeightFields),
    registry::plain<Sums, sum>("group_sums", kSumsFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kMultiply, kWeightGradient, kSums>};

}  // namespace kernel_pytorch::grouped_matmul
