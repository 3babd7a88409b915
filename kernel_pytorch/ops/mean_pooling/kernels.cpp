// The kernels of the two poolings, best first, the reference last, and what the registry asks about their problems.
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::mean_pooling {
namespace {

// Of checked problems.
constexpr auto kForwardProblem = fields<Forward>(
    input<&Forward::x>({.shape = "batch tokens heads columns", .leads = true, .bucketed = "batch tokens heads"}),
    optional_input<&Forward::offsets>(
        {.shape = "bounds", .bucketed = "bounds", .key = KeyPart::kSizes, .content = "offsets x.1"}),
    option<&Forward::chunk_size>({.key = KeyPart::kValue, .trial = "chunk"}), option<&Forward::tokens>(),
    output<&Forward::output>({.shape = "batch ... heads columns", .dtype = "x"}));
constexpr auto kBackwardProblem = fields<Backward>(
    input<&Backward::grad_output>({.shape = "batch means heads columns"}),
    optional_input<&Backward::offsets>(
        {.shape = "bounds", .bucketed = "bounds", .key = KeyPart::kSizes, .content = "offsets grad_input.1"}),
    option<&Backward::chunk_size>({.key = KeyPart::kValue, .trial = "chunk"}), option<&Backward::tokens>(),
    output<&Backward::grad_input>({.shape = "batch tokens heads columns",
                                   .leads = true,
                                   .bucketed = "batch tokens heads",
                                   .dtype = "grad_output"}));
constexpr registry::RequestForm kForwardRequest{.shape = "batch tokens columns", .sizes = "heads=1 bounds=2"};
constexpr registry::RequestForm kBackwardRequest{.shape = "batch tokens columns", .sizes = "heads=1 bounds=2 means=1"};

// A request's means follow from its tokens, and sequences that offsets cut have no batch.
void arrange_means(TensorView& x, TensorView& means, const TensorView& offsets, int64_t chunk_size) {
  means = contiguous_view(nullptr, x.dtype, {Sizes(x, offsets, chunk_size).rows(), x.size(-1)}, x.device);
  if (!offsets.is_present()) return;
  KP_CHECK(x.sizes[0] == 1 && chunk_size == 0, "mean_pool: with offsets the batch is 1 and there is no chunk");
  x.rank = 3;
  std::copy_n(x.sizes.begin() + 1, 3, x.sizes.begin());
  std::copy_n(x.strides.begin() + 1, 3, x.strides.begin());
}
// x is taken out of [batch, heads, tokens, columns].
void arrange(const registry::ProblemRequest&, Forward& problem) {
  const auto& sizes = problem.x.sizes;
  problem.x.strides = {sizes[1] * sizes[2] * sizes[3], sizes[3], sizes[1] * sizes[3], 1};
  arrange_means(problem.x, problem.output, problem.offsets, problem.chunk_size);
}
void arrange(const registry::ProblemRequest&, Backward& problem) {
  arrange_means(problem.grad_input, problem.grad_output, problem.offsets, problem.chunk_size);
}

template <class Problem, const auto& kFields, const auto& kRequest>
constexpr registry::Operation<Problem> operation(std::string_view name,
                                                 std::span<const registry::Kernel<Problem>> (*kernels)(),
                                                 void (*check)(Problem&, Device), const char* shapes) {
  return registry::declared<Problem, kFields>({.name = name,
                                               .kernels = kernels,
                                               .request = kRequest,
                                               .arrange = arrange,
                                               .check = check,
                                               .flops_per_element = 1,
                                               .shapes = shapes});
}

// Shapes that the poolings are tested and measured on: [batch, tokens, columns]; where offsets cut sequences the batch
// is 1.
constexpr const char* kShapes = R"(
  fp32 bf16 fp16: 1x1x1 3x37x7 2x300x520 1x5000x64 5x64x1024 2x0x8
    1x1x1 1x37x7 1x300x520 1x5000x64 1x64x1024 offsets=int32 bounds=2,8; 2x130x64 heads=3
  fp64: 2x33x5
)";
constexpr const char* kChunkShapes = R"(
  fp32 bf16 fp16: 1x1x1 3x37x7 2x300x520 1x5000x64 5x64x1024 2x0x8 chunk=32,1,100; 2x130x64 chunk=32 heads=3
  fp64: 2x33x5 chunk=32
)";

}  // namespace

constinit const registry::Operation<Forward> kForward = operation<Forward, kForwardProblem, kForwardRequest>(
    "mean_pool_forward", registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>, check, kShapes);
constinit const registry::Operation<Forward> kChunkForward = operation<Forward, kForwardProblem, kForwardRequest>(
    "chunk_mean_pool_forward", registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>, check_chunks,
    kChunkShapes);
constinit const registry::Operation<Backward> kBackward = operation<Backward, kBackwardProblem, kBackwardRequest>(
    "mean_pool_backward", registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>, check, kShapes);
constinit const registry::Operation<Backward> kChunkBackward = operation<Backward, kBackwardProblem, kBackwardRequest>(
    "chunk_mean_pool_backward", registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>, check_chunks,
    kChunkShapes);

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
