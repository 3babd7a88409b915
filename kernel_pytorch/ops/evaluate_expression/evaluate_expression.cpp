#include "kernel_pytorch/ops/evaluate_expression/evaluate_expression.h"

#include <memory>
#include <new>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/expression/gradient.h"
#include "kernel_pytorch/expression/text.h"
#include "kernel_pytorch/expression/tile.h"
#include "kernel_pytorch/ops/engines/expression/tiles.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::evaluate_expression {
namespace {

constexpr const char* kOp = "evaluate_expression";

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete (memory, std::align_val_t{64}); }
};

}  // namespace

DType result_dtype(const std::string& program) {
  const expression::Type type = expression::parse(program).result_type();
  KP_CHECK(type != expression::Type::kInt, kOp,
           ": the function gives an integer; it should give a score (float) or whether one is kept (bool)");
  return type == expression::Type::kBool ? DType::kBool : DType::kFloat32;
}

void forward(const Forward& arguments, Context& context) {
  const TensorView& score = arguments.score;
  KP_CHECK(score.rank == 4 && is_contiguous(score) && score.dtype == DType::kFloat32 &&
               score.device.kind == DeviceKind::kCpu,
           kOp, ": score is ", score,
           "; it takes a contiguous fp32 tensor of [batch, heads, queries, keys] on the CPU");
  expression::Program program = expression::parse(arguments.program);
  if (arguments.derivative) {
    program = expression::differentiate(program).program;
    program.results.resize(1);
  }
  KP_CHECK(program.results.size() == 1, kOp, ": the program has ", program.results.size(), " results; it takes one");
  const expression::TilePlan plan(program, arguments.captured, kOp);
  const int64_t heads = score.sizes[1], queries = score.sizes[2], keys = score.sizes[3];
  const expression::TileKernels<float>& kernels = expression::tile_kernels<float>(context.info->cpu.isa);
  const int64_t element_bytes = size_of(arguments.output.dtype);
  parallel_for(context.threads, score.sizes[0] * heads, [&](int64_t task) {
    const std::unique_ptr<void, FreeAligned> workspace(
        ::operator new (plan.workspace_bytes<float>(), std::align_val_t{64}));
    const int64_t first = task * queries * keys;
    const expression::Rows rows{arguments.output.as<unsigned char>() + first * element_bytes, keys};
    kernels.evaluate(plan, {.batch = task / heads, .head = task % heads, .rows = queries, .columns = keys},
                     score.as<float>() + first, keys, std::span(&rows, 1), workspace.get());
  });
}

constexpr auto kDeclarations = registry::plain<Forward, forward>("evaluate_expression", kFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations};

}  // namespace kernel_pytorch::evaluate_expression
