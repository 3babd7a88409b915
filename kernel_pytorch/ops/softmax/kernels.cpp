// The kernels of softmax, best first, the reference last, and how problems of its kind are made.
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::softmax {
namespace {

// A mask has rows of its own.
ForwardProblem shrink_forward(const ForwardProblem& problem, int64_t elements) {
  ForwardProblem small = problem;
  if (!problem.mask.is_present()) registry::shrink_fields(kForwardFields, &small, elements);
  return small;
}

// What must move: of a broadcast mask only its own elements, and nothing of the half that causality removes.
registry::Cost forward_cost(const ForwardProblem& problem) {
  const int64_t mask_bytes = problem.mask.is_present() ? span_elements(problem.mask) * size_of(problem.mask.dtype) : 0;
  return {.bytes = 2 * problem.x.byte_count() + mask_bytes, .flops = 5 * problem.x.element_count()};
}
// mask=TYPE: one [queries, columns] for all.
void arrange(const registry::ProblemRequest&, ForwardProblem& problem) {
  for (int i = 0; i + 2 < problem.mask.rank; ++i) problem.mask.strides[static_cast<size_t>(i)] = 0;
}
void arrange(const registry::ProblemRequest& request, BackwardProblem& problem) {
  if (registry::has_option(request, "mask")) problem.masked = true;
}

// Shapes that softmax is tested and measured on: the edges of every kernel's range, odd tails, the options.
constexpr const char* kShapes = R"(
  fp32 bf16 fp16: 
    19x1,2,7,8,33,64,127,128,520,1000,1024,2048 5x4096,8192,16384,32768 2x65536,100001,131072,262144 0x128
    700x256 2x65536 log=1; 5x4096 log=1 scale=-0.5; 3x40x72 causal=1 scale=0.125; 3x72x40 causal=1
    2x9x1030 causal=1 mask=bool log=1; 3x6x256 2x2x65536 3x6x333 mask=bool,1,fp32
    2x3x4096 mask=bool,1,fp32 causal=1; fp64: 11x1,5,1000; 2x11x30 causal=1 mask=1
)";

}  // namespace

constinit const registry::Operation<ForwardProblem> kForward = registry::declared<ForwardProblem, kForwardFields>(
    {.name = "softmax_forward",
     .kernels =
         registry::kernel_list<kForwardCudaRows, kForwardCudaCluster, kForwardCudaAny, kForwardCpu, kForwardReference>,
     .request = {.shape = "... columns"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink_forward,
     .cost = forward_cost,
     .shapes = kShapes});
constinit const registry::Operation<BackwardProblem> kBackward = registry::declared<BackwardProblem, kBackwardFields>(
    {.name = "softmax_backward",
     .kernels = registry::kernel_list<kBackwardCudaRows, kBackwardCudaCluster, kBackwardCudaAny, kBackwardCpu,
                                      kBackwardReference>,
     .request = {.shape = "... columns", .options = "mask"},
     .arrange = arrange,
     .check = check,
     .flops_per_element = 4,
     .shapes = kShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("softmax", "softmax_forward", kForwardFields),
                   registry::plain<Forward, forward>("softmax_", kForwardFields, {.in_place = true}),
                   registry::plain<Backward, backward>("softmax_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::softmax
