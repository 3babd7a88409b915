// The kernels of rope, best first, the reference last, and how tests and the tuner make problems.
#include <algorithm>

#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/rope/rope.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::rope {
namespace {

constexpr auto kProblemFields = fields<Problem>(
    option<&Problem::rotary_dim>({.key = KeyPart::kValue}), option<&Problem::interleaved>({.key = KeyPart::kValue}),
    option<&Problem::inverse>(), option<&Problem::in_place>({.key = KeyPart::kValue}), option<&Problem::scale>(),
    input<&Problem::query>({.shape = "batch sequence heads head_dim", .leads = true, .bucketed = "batch sequence"}),
    optional_input<&Problem::key>(
        {.shape = "batch sequence key_heads head_dim", .key = KeyPart::kSizes, .usual = true}),
    optional_input<&Problem::cos>(), optional_input<&Problem::sin>(), optional_input<&Problem::inverse_frequencies>(),
    optional_input<&Problem::positions>({.shape = "batch sequence", .content = "indices cos.1 1000"}),
    output<&Problem::query_output>({.shape = "like query", .dtype = "query", .in_place = "query"}),
    output<&Problem::key_output>({.shape = "like key", .dtype = "key", .in_place = "key"}));

registry::Cost cost(const Problem& problem) {
  Problem copy = problem;
  for (TensorView* view : {&copy.cos, &copy.sin}) {  // one row for each token is what must be read
    if (!view->is_present() || view->strides[0] != 0) continue;
    view->sizes[0] = 1;
    view->sizes[1] = std::min(view->sizes[1], problem.sequence());
  }
  const int64_t elements = problem.query.element_count() + problem.key.element_count();
  return {.bytes = registry::bytes_of_fields(kProblemFields, &copy), .flops = 3 * elements};
}

// Options besides those of the list: heads_first, packed=0|1: query and key lie in memory with the heads before the
// sequence, or as slices of rows three times as wide; table=half|full|batch|computed, table_dtype=TYPE.
void arrange(const registry::ProblemRequest& request, Problem& problem) {
  if (problem.rotary_dim == 0) problem.rotary_dim = problem.head_dim();
  if (problem.key.sizes[2] == 0) problem.key = problem.key_output = {};
  if (problem.in_place) problem.query_output = problem.key_output = {};
  for (TensorView* view : {&problem.query, &problem.key}) {
    const int64_t sequence = view->sizes[1], heads = view->sizes[2], dim = view->sizes[3];
    if (registry::flag_option(request, "heads_first", false)) {
      view->strides = {heads * sequence * dim, dim, sequence * dim, 1};
    }
    if (registry::flag_option(request, "packed", false)) {
      view->strides = {3 * sequence * heads * dim, 3 * heads * dim, dim, 1};
    }
  }
  const int table = registry::choice_option(request, "table", {"half", "full", "batch", "computed"}, "half");
  const auto view = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  if (table == 3) {
    problem.inverse_frequencies = view(statistic_type(request.dtype), {problem.pairs()});
    problem.scale = 1.25;
    return;
  }
  const DType dtype = registry::dtype_option(request, "table_dtype", request.dtype);
  const int64_t width = table == 1 ? problem.rotary_dim : problem.pairs(), sequence = problem.sequence();
  problem.cos = problem.sin =
      table == 2 ? view(dtype, {problem.batch(), sequence, width}) : view(dtype, {sequence + 3, width});
}

// Shapes that rope is tested and measured on: [batch, sequence, heads, head_dim], every option.
constexpr const char* kShapes = R"(
    fp32 bf16 fp16 fp64: 2x17x8x128 interleaved=0,1; 1x33x4x64 interleaved=0,1 inverse=1 key_heads=1 table=full
    2x9x6x80 interleaved=0,1 rotary_dim=32 key_heads=2
    2x9x3x96 interleaved=0,1 rotary_dim=64 in_place=1 positions=int64
    3x5x2x10 interleaved=0,1 rotary_dim=6 positions=int32
    2x7x5x72 interleaved=0,1 key_heads=0 table=computed positions=int32
    2x31x8x128 interleaved=0,1 packed=1 key_heads=2 table_dtype=wide
    2x13x4x64 interleaved=0,1 heads_first=1 table=computed; 2x13x4x48 interleaved=0,1 heads_first=1 table=batch
    0x16x4x64 2x0x4x64 1x1x1x2; 1x300x32x128 key_heads=8
)";

}  // namespace

constinit const registry::Operation<Problem> kRotate = registry::declared<Problem, kProblemFields>(
    {.name = "rope",
     .kernels = registry::kernel_list<kCudaVector, kCudaAny, kCpu, kReference>,
     .request = {.shape = "batch sequence heads head_dim",
                 .sizes = "key_heads=heads",
                 .options = "heads_first packed table table_dtype",
                 .shrinks = "sequence"},
     .arrange = arrange,
     .check = check,
     .cost = cost,
     .shapes = kShapes});

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Arguments, rotate>("rope", "rope_forward", kFields),
    registry::plain<Arguments, rotate_back>("rope_backward", kFields, {.renamed = "query=grad_query key=grad_key"}),
    registry::plain<Arguments, rotate>("rope_in_place", kFields, {.shown = "inverse", .in_place = true}),
    registry::plain<FillFrequencies, fill_frequencies>("rope_frequencies", kFillFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kRotate>};

}  // namespace kernel_pytorch::rope
