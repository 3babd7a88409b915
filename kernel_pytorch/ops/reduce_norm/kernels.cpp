// The kernels of reduce_norm, best first, the reference last, and what the registry asks about a problem.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/support/tensor_list.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::reduce_norm {
namespace {

int64_t elements_of(const Norm& problem) {
  int64_t elements = 0;
  for (const TensorView& tensor : problem.tensors) elements += tensor.element_count();
  return elements;
}

void describe(const Norm& problem, tuning::KeyBuilder& key) {
  key.field("tensors", tuning::bucket(static_cast<int64_t>(problem.tensors.size())));
  key.field("elements", tuning::bucket(elements_of(problem)));
  key.field("dtype", problem.tensors.empty() ? DType::kFloat32 : problem.tensors[0].dtype);
}

void visit_tensors(Norm& problem, registry::TensorVisitor visit, void* state) {
  for (size_t i = 0; i < problem.tensors.size(); ++i) {
    visit(state, concat("tensor", i), registry::Role::kInput, problem.tensors[i]);
  }
  visit(state, "output", registry::Role::kOutput, problem.output);
}

Norm make(const registry::ProblemRequest& request) {
  registry::check_options(request, {});
  KP_CHECK(request.shape.size() == 2, "reduce_norm: the shape is ", shape_text(request.shape),
           "; it must be [tensors, average elements]");
  Norm problem;
  for (int64_t size : uneven_sizes(request.shape[0], request.shape[1])) {
    problem.tensors.push_back(contiguous_view(nullptr, request.dtype, {size}, request.device));
  }
  const DType wanted = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  problem.output = contiguous_view(nullptr, wanted, {}, request.device);
  return problem;
}

Norm shrink(const Norm& problem, int64_t elements) {
  Norm small = problem;
  for (TensorView& tensor : small.tensors) {
    const int64_t most = std::max<int64_t>(elements / static_cast<int64_t>(small.tensors.size()), 1);
    tensor = contiguous_view(tensor.data, tensor.dtype, {std::min(most, tensor.element_count())}, tensor.device);
  }
  return small;
}

registry::Cost cost(const Norm& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit_tensors), .flops = 2 * elements_of(problem)};
}

// Lists that the norm is tested and measured on: [tensors, average elements].
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (auto [tensors, average] : {std::pair<int64_t, int64_t>{1, 1},
                                    {1, 0},
                                    {3, 7},
                                    {1, 16384},
                                    {1, 16385},
                                    {7, 1000},
                                    {200, 3001},
                                    {1500, 40},
                                    {5, 300000}}) {
      add({tensors, average}, dtype);
    }
  }
  add({7, 1000}, DType::kFloat64);
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Norm> kNorm{.name = "reduce_norm",
                                                .kernels = registry::kernel_list<kCuda, kCpu, kReference>,
                                                .describe = describe,
                                                .visit_tensors = visit_tensors,
                                                .make = make,
                                                .check = registry::check_only<Norm, check>,
                                                .shrink = shrink,
                                                .cost = cost,
                                                .shapes = shapes};

constexpr auto kDeclarations = registry::join(registry::plain<Norm, norm>("reduce_norm", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kNorm>};

}  // namespace kernel_pytorch::reduce_norm
