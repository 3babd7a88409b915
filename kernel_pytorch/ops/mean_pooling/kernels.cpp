// The kernels of the two poolings, best first, the reference last, and what the registry asks about their problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::mean_pooling {
namespace {

// Lists of their own for the second op: a list is an op's identity.
std::span<const registry::Kernel<Forward>> chunk_forward_kernels() {
  static const registry::Kernel<Forward> kKernels[] = {kForwardCuda, kForwardCpu, kForwardReference};
  return kKernels;
}
std::span<const registry::Kernel<Backward>> chunk_backward_kernels() {
  static const registry::Kernel<Backward> kKernels[] = {kBackwardCuda, kBackwardCpu, kBackwardReference};
  return kKernels;
}

void describe(const TensorView& x, const TensorView& offsets, int64_t chunk_size, tuning::KeyBuilder& key) {
  const Sizes sizes(x, offsets, chunk_size);
  key.field("batch", tuning::bucket(sizes.batch));
  key.field("tokens", tuning::bucket(sizes.tokens));
  key.field("inner", tuning::bucket(sizes.inner));
  key.field("columns", sizes.columns);
  key.field("means", tuning::bucket(sizes.means));
  key.field("dtype", x.dtype);
  key.field("offsets", offsets);
}
void describe_forward(const Forward& problem, tuning::KeyBuilder& key) {
  describe(problem.x, problem.offsets, problem.chunk_size, key);
}
void describe_backward(const Backward& problem, tuning::KeyBuilder& key) {
  describe(problem.grad_input, problem.offsets, problem.chunk_size, key);
}

registry::Filling filling_for(std::string_view tensor, int64_t tokens) {
  if (tensor != "offsets") return {};
  return {.content = registry::Content::kOffsets, .limit = tokens};
}
registry::Filling fill_forward(const Forward& problem, std::string_view tensor) {
  return filling_for(tensor, problem.x.sizes[1]);
}
registry::Filling fill_backward(const Backward& problem, std::string_view tensor) {
  return filling_for(tensor, problem.grad_input.sizes[1]);
}

// Sequences that offsets cut have no batch.
TensorView without_batch(TensorView x) {
  std::copy_n(x.sizes.begin() + 1, 3, x.sizes.begin());
  std::copy_n(x.strides.begin() + 1, 3, x.strides.begin());
  x.rank = 3;
  return x;
}

// heads=N: x is [batch, tokens, heads, columns] taken out of [batch, heads, tokens, columns].
Forward make_forward(const registry::ProblemRequest& request) {
  registry::check_options(request, {"sequences", "chunk", "heads", "offsets"});
  const auto number = [&](std::string_view name) { return registry::integer_option(request, name, 0); };
  KP_CHECK(request.shape.size() == 3, "mean pooling: the shape is ", shape_text(request.shape),
           "; it must be [batch, tokens, columns]");
  const int64_t batch = request.shape[0], tokens = request.shape[1], columns = request.shape[2];
  const int64_t heads = std::max<int64_t>(number("heads"), 1);
  Forward problem;
  problem.chunk_size = number("chunk");
  problem.x = contiguous_view(nullptr, request.dtype, {batch, heads, tokens, columns}, request.device);
  std::swap(problem.x.sizes[1], problem.x.sizes[2]);
  std::swap(problem.x.strides[1], problem.x.strides[2]);
  if (number("sequences") > 0) {
    KP_CHECK(batch == 1 && problem.chunk_size == 0, "mean_pool: with sequences the batch is 1 and there is no chunk");
    const DType dtype = registry::dtype_option(request, "offsets", DType::kInt32);
    problem.offsets = contiguous_view(nullptr, dtype, {number("sequences") + 1}, request.device);
  }
  const Sizes sizes(problem.x, problem.offsets, problem.chunk_size);
  problem.output = contiguous_view(nullptr, request.dtype, {sizes.rows(), columns}, request.device);
  if (problem.offsets.is_present()) problem.x = without_batch(problem.x);
  return problem;
}
Backward make_backward(const registry::ProblemRequest& request) {
  const Forward forward = make_forward(request);
  return {.grad_output = forward.output,
          .offsets = forward.offsets,
          .chunk_size = forward.chunk_size,
          .grad_input = contiguous_view(nullptr, request.dtype, forward.x.shape(), request.device)};
}

Forward shrink_forward(const Forward& problem, int64_t elements) {
  Forward small = problem;
  small.x.sizes[0] = registry::batches_within(problem.x, elements);
  small.output.sizes[0] = Sizes(small.x, small.offsets, small.chunk_size).rows();
  return small;
}
Backward shrink_backward(const Backward& problem, int64_t elements) {
  Backward small = problem;
  small.grad_input.sizes[0] = registry::batches_within(problem.grad_input, elements);
  small.grad_output.sizes[0] = Sizes(small.grad_input, small.offsets, small.chunk_size).rows();
  return small;
}

int64_t forward_flops(const Forward& problem) {
  return problem.x.element_count();
}
int64_t backward_flops(const Backward& problem) {
  return problem.grad_input.element_count();
}

constexpr registry::Operation<Forward> forward_operation(std::string_view name,
                                                         std::span<const registry::Kernel<Forward>> (*kernels)(),
                                                         void (*check)(Forward&, Device),
                                                         std::vector<registry::ProblemRequest> (*requests)()) {
  return registry::declared<Forward, kForwardFields, forward_flops>({.name = name,
                                                                     .kernels = kernels,
                                                                     .describe = describe_forward,
                                                                     .filling = fill_forward,
                                                                     .make = make_forward,
                                                                     .check = check,
                                                                     .shrink = shrink_forward,
                                                                     .shapes = requests});
}
constexpr registry::Operation<Backward> backward_operation(std::string_view name,
                                                           std::span<const registry::Kernel<Backward>> (*kernels)(),
                                                           void (*check)(Backward&, Device),
                                                           std::vector<registry::ProblemRequest> (*requests)()) {
  return registry::declared<Backward, kBackwardFields, backward_flops>({.name = name,
                                                                        .kernels = kernels,
                                                                        .describe = describe_backward,
                                                                        .filling = fill_backward,
                                                                        .make = make_backward,
                                                                        .check = check,
                                                                        .shrink = shrink_backward,
                                                                        .shapes = requests});
}

// Shapes that the poolings are tested and measured on: [batch, tokens, columns]; with sequences=N the batch is 1.
std::vector<registry::ProblemRequest> shapes_of(const std::string& name, std::initializer_list<const char*> values) {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* value : values) {
      const bool is_packed = name == "sequences" && std::string(value) != "0";
      for (auto [batch, tokens, columns] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                            {3, 37, 7},
                                            {2, 300, 520},
                                            {1, 5000, 64},
                                            {5, 64, 1024},
                                            {2, 0, 8}}) {
        if (is_packed && tokens == 0) continue;
        add({is_packed ? 1 : batch, tokens, columns}, dtype, {{name, value}});
      }
    }
    add({2, 130, 64}, dtype, {{name, *values.begin()}, {"heads", "3"}});
  }
  add({2, 33, 5}, DType::kFloat64, {{name, *values.begin()}});
  return std::move(add.all);
}
std::vector<registry::ProblemRequest> shapes() {
  return shapes_of("sequences", {"0", "1", "7"});
}
std::vector<registry::ProblemRequest> chunk_shapes() {
  return shapes_of("chunk", {"32", "1", "100"});
}

}  // namespace

constinit const registry::Operation<Forward> kForward = forward_operation(
    "mean_pool_forward", registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>, check, shapes);
constinit const registry::Operation<Forward> kChunkForward =
    forward_operation("chunk_mean_pool_forward", chunk_forward_kernels, check_chunks, chunk_shapes);
constinit const registry::Operation<Backward> kBackward = backward_operation(
    "mean_pool_backward", registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>, check, shapes);
constinit const registry::Operation<Backward> kChunkBackward =
    backward_operation("chunk_mean_pool_backward", chunk_backward_kernels, check_chunks, chunk_shapes);

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Forward, forward>("mean_pool", "mean_pool_forward", kForwardFields,
                                               {.without = "chunk_size"}),
    registry::plain<Backward, backward>("mean_pool_backward", kBackwardFields, {.without = "chunk_size"}),
    registry::differentiable<Forward, chunk_forward>("chunk_mean_pool", "chunk_mean_pool_forward", kForwardFields,
                                                     {.never = "offsets"}),
    registry::plain<Backward, chunk_backward>("chunk_mean_pool_backward", kBackwardFields, {.never = "offsets"}));

extern constinit const registry::OpEntry kEntry{
    .declarations = kDeclarations, .operations = registry::erased<kForward, kBackward, kChunkForward, kChunkBackward>};

}  // namespace kernel_pytorch::mean_pooling
