// The kernels of embedding, best first, the reference last, and what the registry asks about its problems.
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::embedding {
namespace {

// Every position reads a row of the table, however often the same one.
registry::Cost forward_cost(const Forward& problem) {
  return {.bytes = 2 * problem.output.byte_count() + problem.indices.byte_count(), .flops = 0};
}
// Shapes that embedding is tested and measured on: [positions, columns], rows of the table as an option.
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 1x1 rows=1; 0x64 rows=10; 37x7 rows=5; 300x64 rows=1000; 1000x1032 rows=77 indices=int32
    2500x520 rows=4000 padding=3; 5000x96 rows=3 padding=1; 4000x33 rows=2; 64x4096 rows=300
    fp64: 40x9 rows=11 padding=0
)";

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields>(
    {.name = "embedding_forward",
     .kernels = registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>,
     .request = {.sizes = "rows=32000"},
     .check = check,
     .cost = forward_cost,
     .shapes = kShapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields>(
    {.name = "embedding_backward",
     .kernels = registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .request = {.sizes = "rows=32000"},
     .check = check,
     .flops_per_element = 1,
     .shapes = kShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("embedding", "embedding_forward", kForwardFields),
                   registry::plain<Backward, backward>("embedding_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::embedding
