// The kernels of embedding, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::embedding {
namespace {

void describe(const TensorView& rows, const TensorView& table, const TensorView& indices, tuning::KeyBuilder& key) {
  key.field("positions", tuning::bucket(indices.element_count()));
  key.field("rows", tuning::bucket(table.sizes[0]));
  key.field("columns", columns_of(table));
  key.field("dtype", rows.dtype);
  key.field("table", table.dtype);
  key.field("indices", indices.dtype);
}
void describe_forward(const Forward& problem, tuning::KeyBuilder& key) {
  describe(problem.output, problem.weight, problem.indices, key);
}
void describe_backward(const Backward& problem, tuning::KeyBuilder& key) {
  describe(problem.grad_output, problem.grad_weight, problem.indices, key);
}

registry::Filling filling_for(std::string_view tensor, int64_t rows) {
  if (tensor != "indices") return {};
  return {.content = registry::Content::kIndices, .limit = rows};
}
registry::Filling fill_forward(const Forward& problem, std::string_view tensor) {
  return filling_for(tensor, problem.weight.sizes[0]);
}
registry::Filling fill_backward(const Backward& problem, std::string_view tensor) {
  return filling_for(tensor, problem.grad_weight.sizes[0]);
}

struct Wanted {
  TensorView indices, table, rows;
  int64_t padding;
};
Wanted wanted_by(const registry::ProblemRequest& request) {
  registry::check_options(request, {"rows", "indices", "padding"});
  const TensorView rows = registry::rows_view(request);
  const auto table_rows = registry::integer_option(request, "rows", 32000);
  return {.indices = contiguous_view(nullptr, registry::dtype_option(request, "indices", DType::kInt64),
                                     {rows.sizes[0]}, request.device),
          .table = contiguous_view(nullptr, request.dtype, {table_rows, rows.sizes[1]}, request.device),
          .rows = rows,
          .padding = registry::integer_option(request, "padding", -1)};
}

Forward make_forward(const registry::ProblemRequest& request) {
  const Wanted wanted = wanted_by(request);
  return {.indices = wanted.indices, .weight = wanted.table, .output = wanted.rows};
}
Backward make_backward(const registry::ProblemRequest& request) {
  const Wanted wanted = wanted_by(request);
  return {.grad_output = wanted.rows,
          .indices = wanted.indices,
          .padding_index = wanted.padding,
          .grad_weight = wanted.table};
}

// Every position reads a row of the table, however often the same one.
registry::Cost forward_cost(const Forward& problem) {
  return {.bytes = 2 * problem.output.byte_count() + problem.indices.byte_count(), .flops = 0};
}
int64_t backward_flops(const Backward& problem) {
  return problem.grad_output.element_count();
}

// Shapes that embedding is tested and measured on: [positions, columns], rows of the table as an option.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList requests;
  const auto add = [&](int64_t positions, int64_t columns, const char* rows, DType dtype,
                       registry::RequestOptions more = {}) {
    more.emplace_back("rows", rows);
    requests({positions, columns}, dtype, std::move(more));
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add(1, 1, "1", dtype);
    add(0, 64, "10", dtype);
    add(37, 7, "5", dtype);
    add(300, 64, "1000", dtype);
    add(1000, 1032, "77", dtype, {{"indices", "int32"}});
    add(2500, 520, "4000", dtype, {{"padding", "3"}});
    add(5000, 96, "3", dtype, {{"padding", "1"}});
    add(4000, 33, "2", dtype);
    add(64, 4096, "300", dtype);
  }
  add(40, 9, "11", DType::kFloat64, {{"padding", "0"}});
  return std::move(requests.all);
}

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields>(
    {.name = "embedding_forward",
     .kernels = registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>,
     .describe = describe_forward,
     .filling = fill_forward,
     .make = make_forward,
     .check = check,
     .cost = forward_cost,
     .shapes = shapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "embedding_backward",
     .kernels = registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .describe = describe_backward,
     .filling = fill_backward,
     .make = make_backward,
     .check = check,
     .shapes = shapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("embedding", "embedding_forward", kForwardFields),
                   registry::plain<Backward, backward>("embedding_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::embedding
