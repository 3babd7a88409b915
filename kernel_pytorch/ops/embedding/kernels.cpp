// The kernels of embedding, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/embedding/shapes.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::embedding {
namespace {

std::span<const registry::Kernel<Forward>> forward_kernels() {
  static const registry::Kernel<Forward> kKernels[] = {kForwardCuda, kForwardCpu, kForwardReference};
  return kKernels;
}
std::span<const registry::Kernel<Backward>> backward_kernels() {
  static const registry::Kernel<Backward> kKernels[] = {kBackwardCuda, kBackwardCpu, kBackwardReference};
  return kKernels;
}

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

}  // namespace

constinit const registry::Operation<Forward> kForward =
    registry::declared<Forward, kForwardFields>({.name = "embedding_forward",
                                                 .kernels = forward_kernels,
                                                 .describe = describe_forward,
                                                 .filling = fill_forward,
                                                 .make = make_forward,
                                                 .check = check,
                                                 .cost = forward_cost,
                                                 .shapes = shapes});
constinit const registry::Operation<Backward> kBackward =
    registry::declared<Backward, kBackwardFields, backward_flops>({.name = "embedding_backward",
                                                                   .kernels = backward_kernels,
                                                                   .describe = describe_backward,
                                                                   .filling = fill_backward,
                                                                   .make = make_backward,
                                                                   .check = check,
                                                                   .shapes = shapes});

namespace {

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("embedding", "embedding_forward", kForwardFields),
                   registry::plain<Backward, backward>("embedding_backward", kBackwardFields));

}  // namespace

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                         .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::embedding
