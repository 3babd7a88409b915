// The kernels of reduce_norm, best first, the reference last, and what the registry asks about a problem.
#include <algorithm>

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

Norm make(const registry::ProblemRequest& request) {
  registry::check_options(request, {});
  KP_CHECK(request.shape.size() == 2, "reduce_norm: the shape is ", shape_text(request.shape),
           "; it must be [tensors, average elements]");
  Norm problem;
  for (int64_t size : uneven_sizes(request.shape[0], request.shape[1])) {
    problem.tensors.push_back(contiguous_view(nullptr, request.dtype, {size}, request.device));
  }
  problem.output = contiguous_view(nullptr, statistic_type(request.dtype), {}, request.device);
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

int64_t flops(const Norm& problem) {
  return 2 * elements_of(problem);
}

// Lists that the norm is tested and measured on: [tensors, average elements].
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x1 1x0 3x7 1x16384 1x16385 7x1000 200x3001 1500x40 5x300000; fp64: 7x1000
)";

}  // namespace

constinit const registry::Operation<Norm> kNorm =
    registry::declared<Norm, kFields, flops>({.name = "reduce_norm",
                                              .kernels = registry::kernel_list<kCuda, kCpu, kReference>,
                                              .describe = describe,
                                              .make = make,
                                              .check = registry::check_only<Norm, check>,
                                              .shrink = shrink,
                                              .shapes = kShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Norm, norm>("reduce_norm", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kNorm>};

}  // namespace kernel_pytorch::reduce_norm
