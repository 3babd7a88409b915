// The kernels of the lists, best first, the reference last, and what the registry asks about their problems.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::block_list {
namespace {

void describe_build(const Build& problem, tuning::KeyBuilder& key) {
  key.field("heads", tuning::bucket(problem.map.sizes[0] * problem.map.sizes[1]));
  key.field("rows", tuning::bucket(problem.map.sizes[2]));
  key.field("columns", tuning::bucket(problem.map.sizes[3]));
  key.field("map", problem.map);
  key.field("row_lists", problem.rows.counts);
  key.field("full_row_lists", problem.full_rows.counts);
  key.field("column_lists", problem.columns.counts);
  key.field("full_column_lists", problem.full_columns.counts);
}

registry::Filling fill_build(const Build&, std::string_view) {
  return {.content = registry::Content::kIndices, .limit = 3};
}

List list_for(const TensorView& map, int64_t lists, int64_t length) {
  return {.counts = contiguous_view(nullptr, DType::kInt32, {map.sizes[0], map.sizes[1], lists}, map.device),
          .blocks = contiguous_view(nullptr, DType::kInt32, {map.sizes[0], map.sizes[1], lists, length}, map.device)};
}

// lists: which of them are wanted; partial: rows and columns without full blocks.
Build make_build(const registry::ProblemRequest& request) {
  registry::check_options(request, {"lists"});
  KP_CHECK(request.shape.size() == 4, "block_list: the shape is ", shape_text(request.shape),
           "; it must be [batch, heads, rows, columns]");
  const int word = registry::choice_option(request, "lists", {"all", "rows", "columns", "partial"}, "all");
  const bool wants_rows = word != 2, wants_columns = word != 1, wants_full = word != 3;
  Build problem;
  problem.map = contiguous_view(nullptr, request.dtype, request.shape, request.device);
  const int64_t rows = request.shape[2], columns = request.shape[3];
  if (wants_rows) problem.rows = list_for(problem.map, rows, columns);
  if (wants_rows && wants_full) problem.full_rows = list_for(problem.map, rows, columns);
  if (wants_columns) problem.columns = list_for(problem.map, columns, rows);
  if (wants_columns && wants_full) problem.full_columns = list_for(problem.map, columns, rows);
  return problem;
}

void set_batch(void* batch, std::string_view, registry::Role, TensorView& view) {
  view.sizes[0] = *static_cast<int64_t*>(batch);
}
Build shrink_build(const Build& problem, int64_t elements) {
  Build small = problem;
  int64_t batch = registry::batches_within(problem.map, elements);
  registry::visit_fields(kBuildFields, &small, set_batch, &batch);
  return small;
}

int64_t build_flops(const Build&) {
  return 0;
}

void describe_select(const Selection& problem, tuning::KeyBuilder& key) {
  key.field("heads", tuning::bucket(problem.batch() * problem.heads()));
  key.field("rows", tuning::bucket(problem.grid.rows));
  key.field("columns", tuning::bucket(problem.grid.columns));
  key.field("parts", problem.given.key_parts);
  key.field("query", problem.given.query);
  key.field("key", problem.given.key);
  key.field("scores", problem.given.scores);
  key.field("query_lengths", problem.given.query_lengths);
  key.field("key_lengths", problem.given.key_lengths);
  key.field("map", problem.given.map);
  key.field("query_block", problem.given.query_block);
  key.field("key_block", problem.given.key_block);
  key.field("causal", problem.given.causal);
}

void visit_select(Selection& problem, registry::TensorVisitor visit, void* state) {
  registry::visit_fields(kSelectFields, &problem.given, visit, state);
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
  registry::check_options(request, {"query_block", "key_block", "key_parts", "key_heads", "causal", "sparsity", "sinks",
                                    "local", "scores", "threshold", "map", "lengths"});
  KP_CHECK(request.shape.size() == 5, "block_select: the shape is ", shape_text(request.shape),
           "; it must be [batch, heads, queries, keys, size]");
  const auto number = [&](std::string_view name, int64_t fallback) {
    return registry::integer_option(request, name, fallback);
  };
  const int64_t batch = request.shape[0], heads = request.shape[1];
  Select given{.queries = request.shape[2], .keys = request.shape[3]};
  given.query_block = number("query_block", 64);
  given.key_block = number("key_block", 64);
  given.key_parts = number("key_parts", 1);
  given.causal = registry::flag_option(request, "causal", true);
  given.sparsity = registry::number_option(request, "sparsity", 0.75);
  given.threshold = registry::number_option(request, "threshold", given.threshold);
  given.sinks = number("sinks", 1);
  given.local = number("local", 1);
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
    problem.given.key =
        view(request.dtype, {batch, number("key_heads", heads), (given.keys + part - 1) / part, request.shape[4]});
  }
  problem.given.map = view(DType::kInt8, {batch, heads, grid.rows, grid.columns});
  problem.given.rows = list_for(problem.given.map, grid.rows, grid.columns);
  if (registry::flag_option(request, "lengths", false)) {
    problem.given.query_lengths = problem.given.key_lengths = view(DType::kInt32, {batch});
  }
  if (!registry::flag_option(request, "map", true)) problem.given.map = {};
  return problem;
}

Selection shrink_select(const Selection& problem, int64_t elements) {
  Selection small = problem;
  int64_t batch = registry::batches_within(problem.given.rows.blocks, elements);
  visit_select(small, set_batch, &batch);
  return small;
}

registry::Cost select_cost(const Selection& problem) {
  const int64_t scores = problem.given.rows.blocks.element_count() * problem.given.key_parts;
  const int64_t size = problem.has_scores() ? 0 : problem.given.query.sizes[3];
  return {.bytes = registry::tensor_bytes(problem, visit_select), .flops = 2 * scores * size};
}

// Shapes that the lists are tested and measured on. build: [batch, heads, rows, columns]. select: [batch, heads,
// queries, keys, size].
std::vector<registry::ProblemRequest> build_shapes() {
  registry::RequestList add;
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {1, 1, 1, 1}, {2, 3, 5, 7}, {1, 2, 64, 64}, {1, 2, 33, 150}, {2, 1, 130, 31}, {1, 0, 4, 4}, {1, 1, 0, 5}}) {
    for (const char* lists : {"all", "rows", "columns", "partial"}) add(shape, DType::kInt8, {{"lists", lists}});
  }
  add({1, 2, 40, 70}, DType::kBool, {{"lists", "partial"}});
  return std::move(add.all);
}

std::vector<registry::ProblemRequest> select_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({2, 2, 1000, 1000, 64}, dtype, {});
    add({1, 4, 700, 1900, 40}, dtype, {{"key_heads", "2"}, {"key_parts", "4"}, {"causal", "0"}});
    add({1, 2, 2100, 2100, 7}, dtype, {{"query_block", "128"}, {"key_block", "16"}, {"key_parts", "2"}});
    add({1, 2, 520, 520, 128}, dtype, {{"query_block", "8"}, {"key_block", "8"}, {"sparsity", "0.9"}, {"map", "0"}});
  }
  add({1, 2, 900, 900, 32}, DType::kFloat32, {{"threshold", "1"}, {"sinks", "0"}, {"local", "0"}});
  add({2, 3, 640, 640, 0}, DType::kFloat32, {{"scores", "1"}, {"sparsity", "0.5"}});
  add({1, 1, 300, 300, 16}, DType::kFloat32, {{"sparsity", "0"}});
  add({1, 1, 300, 300, 16}, DType::kFloat32, {{"sparsity", "1"}, {"local", "5"}});
  for (const char* causal : {"0", "1"}) {
    add({5, 2, 700, 900, 32}, DType::kBFloat16, {{"lengths", "1"}, {"causal", causal}, {"key_parts", "4"}});
    add({4, 2, 500, 500, 0}, DType::kFloat32, {{"lengths", "1"}, {"causal", causal}, {"scores", "1"}});
  }
  add({1, 2, 0, 300, 16}, DType::kFloat32, {});
  add({1, 2, 300, 0, 16}, DType::kFloat32, {});
  add({1, 2, 1900, 300, 16}, DType::kFloat32, {{"query_block", "32"}});  // rows before the first key
  add({1, 1, 300, 300, 16}, DType::kFloat64, {});
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Build> kBuild = registry::declared<Build, kBuildFields, build_flops>(
    {.name = "block_list",
     .kernels = registry::kernel_list<kBuildCuda, kBuildCpu, kBuildReference>,
     .describe = describe_build,
     .filling = fill_build,
     .make = make_build,
     .check = registry::check_only<Build, check>,
     .shrink = shrink_build,
     .shapes = build_shapes});
constinit const registry::Operation<Selection> kSelect{
    .name = "block_select",
    .kernels = registry::kernel_list<kSelectCuda, kSelectCpu, kSelectReference>,
    .describe = describe_select,
    .visit_tensors = visit_select,
    .set_trial_inputs = set_trial_select,
    .make = make_select,
    .check = check,
    .shrink = shrink_select,
    .cost = select_cost,
    .shapes = select_shapes};

constexpr auto kDeclarations = registry::join(registry::plain<Build, build>("block_list", kBuildFields),
                                              registry::plain<Select, select>("block_select", kSelectFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kBuild, kSelect>};

}  // namespace kernel_pytorch::block_list
