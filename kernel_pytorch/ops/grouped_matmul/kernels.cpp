// The kernels of the grouped products, best first, the references last, and what the registry asks about their
// problems.
#include <algorithm>
#include <string>
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
  registry::describe_fields(kProductFields, &problem, key);
  key.field("rows", tuning::bucket(rows_of(problem)));
  key.field("b_rows", is_row_major(problem.b));
  key.field("aligned", has_aligned_rows(problem.a) +
                           2 * has_aligned_rows(problem.b, kVectorBytes, is_row_major(problem.b) ? 2 : 1) +
                           4 * (has_aligned_rows(problem.output) && has_aligned_rows(problem.preactivation)));
  key.field("preactivation", problem.preactivation);
}
void describe_weight(const WeightGradient& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kWeightFields, &problem, key);
  key.field("rows", tuning::bucket(rows_of(problem)));
  key.field("output_rows", is_row_major(problem.output));
  key.field("aligned", has_aligned_rows(problem.a) + 2 * has_aligned_rows(problem.b));
}

struct Request {
  const registry::ProblemRequest& given;
  int64_t rows, n, k, groups, source;

  explicit Request(const registry::ProblemRequest& request, std::string_view op) : given(request) {
    KP_CHECK(request.shape.size() == 4, op, ": the shape is ", shape_text(request.shape),
             "; it must be [rows, n, k, groups]");
    rows = request.shape[0], n = request.shape[1], k = request.shape[2], groups = request.shape[3];
    source = registry::integer_option(request, "source", std::max<int64_t>(rows / 2, 1));
  }
  TensorView view(DType dtype, std::initializer_list<int64_t> sizes) const {
    return contiguous_view(nullptr, dtype, sizes, given.device);
  }
  TensorView view(std::initializer_list<int64_t> sizes) const { return view(given.dtype, sizes); }
  bool flag(std::string_view name) const { return registry::flag_option(given, name, false); }
};

TensorView transposed(TensorView view) {
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
  return view;
}

// Options: order=nn|nt (t: b is stored transposed), gather=0|1 (of `source` rows), bias=0|1|TYPE, form, activation,
// limit, slope, preactivation, output=TYPE.
Product make_product(const registry::ProblemRequest& request) {
  registry::check_options(request, {"order", "gather", "source", "bias", "form", "activation", "limit", "slope",
                                    "preactivation", "output"});
  const Request r(request, "grouped_matmul");
  Product problem;
  const bool is_transposed = registry::choice_option(request, "order", {"nn", "nt"}, "nn") == 1;
  problem.form = static_cast<Form>(registry::choice_option(request, "form", registry::words_of(kFormNames), "plain"));
  problem.activation = static_cast<Kind>(
      registry::choice_option(request, "activation", registry::words_of(pointwise::kKindWords), "identity"));
  problem.limit = registry::number_option(request, "limit", 0);
  problem.slope = registry::number_option(request, "slope", problem.slope);
  problem.a = r.view({r.flag("gather") ? r.source : r.rows, r.k});
  problem.b = is_transposed ? transposed(r.view({r.groups, r.n, r.k})) : r.view({r.groups, r.k, r.n});
  problem.offsets = r.view(DType::kInt32, {r.groups});
  if (r.flag("gather")) problem.gather = r.view(DType::kInt32, {r.rows});
  if (r.flag("bias")) problem.bias = r.view({r.groups, r.n});
  const DType output = registry::dtype_option(request, "output", request.dtype);
  problem.output = r.view(output, {r.rows, problem.form == Form::kPlain ? r.n : r.n / 2});
  if (r.flag("preactivation")) problem.preactivation = r.view(output, {r.rows, r.n});
  return problem;
}

// The shape's k is the gradient's m. Options: order=nn|nt (t: the output is stored transposed), gather=none|a|b,
// output=TYPE.
WeightGradient make_weight(const registry::ProblemRequest& request) {
  registry::check_options(request, {"order", "gather", "source", "output"});
  const Request r(request, "grouped_matmul_weight");
  const int gather = registry::choice_option(request, "gather", {"none", "a", "b"}, "none");
  const bool is_transposed = registry::choice_option(request, "order", {"nn", "nt"}, "nn") == 1;
  const DType output = registry::dtype_option(request, "output", request.dtype);
  WeightGradient problem;
  problem.a = r.view({gather == 1 ? r.source : r.rows, r.k});
  problem.b = r.view({gather == 2 ? r.source : r.rows, r.n});
  problem.offsets = r.view(DType::kInt32, {r.groups});
  if (gather == 1) problem.gather_a = r.view(DType::kInt32, {r.rows});
  if (gather == 2) problem.gather_b = r.view(DType::kInt32, {r.rows});
  problem.output =
      is_transposed ? transposed(r.view(output, {r.groups, r.n, r.k})) : r.view(output, {r.groups, r.k, r.n});
  return problem;
}

// The shape is [rows, n, 1, groups]. Options: gather=0|1, factors=0|1, output=TYPE.
Sums make_sums(const registry::ProblemRequest& request) {
  registry::check_options(request, {"gather", "source", "factors", "output"});
  const Request r(request, "group_sums");
  Sums problem;
  problem.x = r.view({r.flag("gather") ? r.source : r.rows, r.n});
  problem.offsets = r.view(DType::kInt32, {r.groups});
  if (r.flag("gather")) problem.gather = r.view(DType::kInt32, {r.rows});
  if (r.flag("factors")) problem.factors = r.view(statistic_type(request.dtype), {r.rows});
  problem.output = r.view(registry::dtype_option(request, "output", request.dtype), {r.groups, r.n});
  return problem;
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
std::vector<registry::ProblemRequest> product_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* order : {"nn", "nt"}) {
      add({300, 136, 72, 5}, dtype, {{"order", order}});
      add({300, 136, 72, 5}, dtype, {{"order", order}, {"gather", "1"}, {"bias", "1"}});
      add({67, 37, 33, 3}, dtype, {{"order", order}, {"gather", "1"}});
    }
    add({513, 264, 200, 9}, dtype, {{"order", "nt"}, {"preactivation", "1"}, {"activation", "gelu"}});
    for (const char* form : {"gated", "packed_gated"}) {
      add({200, 256, 64, 4}, dtype,
          {{"form", form}, {"activation", "silu"}, {"gather", "1"}, {"preactivation", "1"}, {"order", "nt"}});
      add({200, 384, 72, 4}, dtype,
          {{"form", form}, {"activation", "silu"}, {"limit", "0.5"}, {"bias", "1"}, {"preactivation", "1"}});
      add({70, 36, 24, 2}, dtype, {{"form", form}, {"activation", "gelu"}});
    }
    add({5, 64, 64, 40}, dtype);
    add({1, 8, 8, 1}, dtype);
    add({0, 8, 8, 2}, dtype);
    add({16, 8, 0, 2}, dtype, {{"bias", "1"}});
  }
  add({300, 136, 72, 5}, DType::kBFloat16, {{"output", "fp32"}, {"bias", "1"}, {"order", "nt"}});
  add({20, 6, 5, 3}, DType::kFloat64, {{"form", "packed_gated"}, {"activation", "silu"}, {"gather", "1"}});
  return std::move(add.all);
}
std::vector<registry::ProblemRequest> weight_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* order : {"nn", "nt"}) {
      for (const char* gather : {"none", "a", "b"}) {
        add({300, 136, 72, 5}, dtype, {{"order", order}, {"gather", gather}});
        add({67, 37, 33, 3}, dtype, {{"order", order}, {"gather", gather}});
      }
    }
    add({700, 264, 200, 4}, dtype, {{"output", "fp32"}});
    add({5, 64, 64, 40}, dtype);
    add({0, 8, 8, 2}, dtype);
  }
  add({20, 6, 5, 3}, DType::kFloat64);
  return std::move(add.all);
}
std::vector<registry::ProblemRequest> sums_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({300, 136, 1, 5}, dtype);
    add({67, 33, 1, 3}, dtype, {{"gather", "1"}, {"factors", "1"}, {"output", "fp32"}});
    add({0, 8, 1, 2}, dtype);
  }
  add({20, 6, 1, 3}, DType::kFloat64, {{"factors", "1"}});
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Product> kMultiply = registry::declared<Product, kProductFields, product_flops>(
    {.name = "grouped_matmul",
     .kernels = registry::kernel_list<kSm90, kMma, kTile, kCpu, kReference>,
     .describe = describe_product,
     .set_trial_inputs = set_trial_product,
     .make = make_product,
     .check = check,
     .shrink = shrink_product,
     .shapes = product_shapes});
constinit const registry::Operation<WeightGradient> kWeightGradient =
    registry::declared<WeightGradient, kWeightFields, weight_flops>(
        {.name = "grouped_matmul_weight",
         .kernels = registry::kernel_list<kWeightSm90, kWeightMma, kWeightTile, kWeightCpu, kWeightReference>,
         .describe = describe_weight,
         .set_trial_inputs = set_trial_weight,
         .make = make_weight,
         .check = check,
         .shrink = shrink_weight,
         .shapes = weight_shapes});
constinit const registry::Operation<Sums> kSums = registry::declared<Sums, kSumsFields, sums_flops>(
    {.name = "group_sums",
     .kernels = registry::kernel_list<kSumsCuda, kSumsCpu, kSumsReference>,
     .set_trial_inputs = set_trial_sums,
     .make = make_sums,
     .check = check,
     .shrink = shrink_sums,
     .shapes = sums_shapes});

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Product, multiply>("grouped_matmul", "grouped_matmul_forward", kProductFields),
    registry::plain<WeightGradient, weight_gradient>("grouped_matmul_weight", kWeightFields),
    registry::plain<Sums, sum>("group_sums", kSumsFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kMultiply, kWeightGradient, kSums>};

}  // namespace kernel_pytorch::grouped_matmul
