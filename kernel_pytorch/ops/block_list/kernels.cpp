// The kernels of the lists, best first, the reference last, and what the registry asks about their problems.
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::block_list {
namespace {

constexpr auto kSelection = fields<Selection>(all_of<&Selection::given, kSelectFields>(), unused<&Selection::grid>());

int64_t select_flops(const Selection& problem) {
  const int64_t scores = problem.given.rows.blocks.element_count() * problem.given.key_parts;
  return problem.has_scores() ? 0 : 2 * scores * problem.given.query.sizes[3];
}

// Small whole numbers: sums are exact in every order, so that kernels agree to the last block, and ties are many.
void set_trial_select(const Selection& on_host) {
  for (const TensorView* view : {&on_host.given.query, &on_host.given.key, &on_host.given.scores}) {
    for (int64_t i = 0; view->is_present() && i < span_elements(*view); ++i) {
      store_element(view->data, view->dtype, i, std::nearbyint(2 * load_element(view->data, view->dtype, i)));
    }
  }
  if (!on_host.has_lengths()) return;
  for (int64_t i = 0; i < on_host.batch(); ++i) {  // the whole, none, and some between
    on_host.given.query_lengths.as<int32_t>()[i] = static_cast<int32_t>(on_host.grid.queries * (i * 7 % 10 + 1) / 10);
    on_host.given.key_lengths.as<int32_t>()[i] = static_cast<int32_t>(on_host.grid.keys * (9 - i * 3 % 10) / 9);
  }
}

Selection make_select(const registry::ProblemRequest& request) {
  std::vector<std::string_view> known = registry::option_names(kSelectFields);
  known.insert(known.end(), {"key_heads", "scores", "with_map", "lengths"});
  registry::check_options(request, known);
  KP_CHECK(request.shape.size() == 5, "block_select: the shape is ", shape_text(request.shape),
           "; it must be [batch, heads, queries, keys, size]");
  const int64_t batch = request.shape[0], heads = request.shape[1];
  Select given{.queries = request.shape[2], .keys = request.shape[3]};
  given.query_block = given.key_block = 64;
  given.causal = true;
  given.sparsity = 0.75;
  registry::make_options(kSelectFields, request, &given);
  Selection problem = selection_of(given);
  const Grid& grid = problem.grid;
  const auto view = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  if (registry::flag_option(request, "scores", false)) {
    problem.given.scores = view(DType::kFloat32, {batch, heads, grid.rows, grid.columns});
  } else {
    const int64_t part = given.key_block / given.key_parts;
    problem.given.query = view(request.dtype, {batch, heads, grid.rows, request.shape[4]});
    problem.given.key = view(request.dtype, {batch, registry::integer_option(request, "key_heads", heads),
                                             (given.keys + part - 1) / part, request.shape[4]});
  }
  problem.given.map = view(DType::kInt8, {batch, heads, grid.rows, grid.columns});
  problem.given.rows = {.counts = view(DType::kInt32, {batch, heads, grid.rows}),
                        .blocks = view(DType::kInt32, {batch, heads, grid.rows, grid.columns})};
  if (registry::flag_option(request, "lengths", false)) {
    problem.given.query_lengths = problem.given.key_lengths = view(DType::kInt32, {batch});
  }
  if (!registry::flag_option(request, "with_map", true)) problem.given.map = {};
  return problem;
}

// build: [batch, heads, rows, columns]. select: [batch, heads, queries, keys, size].
constexpr const char* kBuildShapes = R"(
    int8: 1x1x1x1 2x3x5x7 1x2x64x64 1x2x33x150 2x1x130x31 1x0x4x4 1x1x0x5 rows=1,0 full=1,0; columns=0
    bool: 1x2x40x70 full=0
)";

constexpr const char* kSelectShapes = R"(
    fp32 bf16 fp16: 2x2x1000x1000x64; 1x4x700x1900x40 key_heads=2 key_parts=4 causal=0
    1x2x2100x2100x7 query_block=128 key_block=16 key_parts=2
    1x2x520x520x128 query_block=8 key_block=8 sparsity=0.9 with_map=0
    fp32: 1x2x900x900x32 threshold=1 sinks=0 local=0; 2x3x640x640x0 scores=1 sparsity=0.5; 1x1x300x300x16 sparsity=0
    sparsity=1 local=5; 4x2x500x500x0 lengths=1 causal=0,1 scores=1; 1x2x0x300x16 1x2x300x0x16
    1x2x1900x300x16 query_block=32  # rows before the first key
    bf16: 5x2x700x900x32 lengths=1 causal=0,1 key_parts=4; fp64: 1x1x300x300x16
)";

}  // namespace

constinit const registry::Operation<Build> kBuild =
    registry::declared<Build, kBuildFields>({.name = "block_list",
                                             .kernels = registry::kernel_list<kBuildCuda, kBuildCpu, kBuildReference>,
                                             .request = {.shape = "batch heads n m"},
                                             .check = registry::check_only<Build, check>,
                                             .shapes = kBuildShapes});
constinit const registry::Operation<Selection> kSelect = registry::declared<Selection, kSelection, select_flops>(
    {.name = "block_select",
     .kernels = registry::kernel_list<kSelectCuda, kSelectCpu, kSelectReference>,
     .set_trial_inputs = set_trial_select,
     .make = make_select,
     .check = check,
     .shapes = kSelectShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Build, build>("block_list", kBuildFields),
                                              registry::plain<Select, select>("block_select", kSelectFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kBuild, kSelect>};

}  // namespace kernel_pytorch::block_list
