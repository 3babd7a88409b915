// The kernels of rope, best first, the reference last, and how tests and the tuner make problems.
#include <algorithm>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/rope/rope.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::rope {
namespace {

void describe(const Problem& problem, tuning::KeyBuilder& key) {
  key.field("tokens", tuning::bucket(problem.batch() * problem.sequence()));
  key.field("heads", problem.query.sizes[2]);
  key.field("key_heads", problem.key.is_present() ? problem.key.sizes[2] : 0);
  key.field("head_dim", problem.head_dim());
  key.field("rotary_dim", problem.rotary_dim);
  key.field("dtype", problem.query.dtype);
  key.field("interleaved", problem.interleaved);
  key.field("cos", problem.cos);
  key.field("inverse_frequencies", problem.inverse_frequencies);
  key.field("positions", problem.positions);
  key.field("in_place", problem.in_place);
  key.field("dense", problem.query.strides[3] == 1);
}

void visit_tensors(Problem& problem, registry::TensorVisitor visit, void* state) {
  const registry::PresentTensors call{visit, state};
  using enum registry::Role;
  const registry::Role input = problem.in_place ? kUpdated : kInput;
  call("query", input, problem.query);
  call("key", input, problem.key);
  call("cos", kInput, problem.cos);
  call("sin", kInput, problem.sin);
  call("inverse_frequencies", kInput, problem.inverse_frequencies);
  call("positions", kInput, problem.positions);
  call("query_output", kOutput, problem.query_output);
  call("key_output", kOutput, problem.key_output);
}

registry::Filling filling(const Problem& problem, std::string_view tensor) {
  if (tensor == "positions") {
    const int64_t rows = problem.cos.is_present() ? problem.cos.sizes[1] : 1000;
    return {.content = registry::Content::kIndices, .limit = rows};
  }
  return {};
}

Problem shrink(const Problem& problem, int64_t elements) {
  Problem small = problem;
  const int64_t per_token = std::max<int64_t>(problem.batch() * problem.query.sizes[2] * problem.head_dim(), 1);
  const int64_t tokens = std::clamp<int64_t>(elements / per_token, 1, std::max<int64_t>(problem.sequence(), 1));
  for (TensorView* view : {&small.query, &small.key, &small.query_output, &small.key_output, &small.positions}) {
    if (view->is_present()) view->sizes[1] = std::min(view->sizes[1], tokens);
  }
  return small;
}

registry::Cost cost(const Problem& problem) {
  Problem copy = problem;
  for (TensorView* view : {&copy.cos, &copy.sin}) {  // one row for each token is what must be read
    if (!view->is_present() || view->strides[0] != 0) continue;
    view->sizes[0] = 1;
    view->sizes[1] = std::min(view->sizes[1], problem.sequence());
  }
  const int64_t elements = problem.query.element_count() + problem.key.element_count();
  return {.bytes = registry::tensor_bytes(copy, visit_tensors), .flops = 3 * elements};
}

// [batch, sequence, heads, head_dim] in memory, or heads before the sequence, or a slice of rows `packed` times as
// wide.
TensorView heads_view(const registry::ProblemRequest& request, int64_t heads, bool heads_first, bool packed) {
  const int64_t batch = request.shape[0], sequence = request.shape[1], dim = request.shape[3];
  TensorView view = contiguous_view(nullptr, request.dtype, {batch, sequence, heads, dim}, request.device);
  if (heads_first) view.strides = {heads * sequence * dim, dim, sequence * dim, 1};
  if (packed) view.strides = {3 * sequence * heads * dim, 3 * heads * dim, dim, 1};
  return view;
}

Problem make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"interleaved", "inverse", "in_place", "rotary_dim", "key_heads", "positions",
                                    "table", "table_dtype", "heads_first", "packed"});
  KP_CHECK(request.shape.size() == 4, "shape ", shape_text(request.shape),
           ": rope needs batch, sequence, heads and head_dim, e.g. 2x4096x32x128");
  Problem problem;
  problem.rotary_dim = registry::integer_option(request, "rotary_dim", request.shape[3]);
  problem.interleaved = registry::flag_option(request, "interleaved", false);
  problem.inverse = registry::flag_option(request, "inverse", false);
  problem.in_place = registry::flag_option(request, "in_place", false);
  const bool heads_first = registry::flag_option(request, "heads_first", false);
  const bool packed = registry::flag_option(request, "packed", false);
  const auto key_heads = registry::integer_option(request, "key_heads", request.shape[2]);
  problem.query = heads_view(request, request.shape[2], heads_first, packed);
  if (key_heads > 0) problem.key = heads_view(request, key_heads, heads_first, packed);
  if (!problem.in_place) {
    problem.query_output = heads_view(request, request.shape[2], false, false);
    if (key_heads > 0) problem.key_output = heads_view(request, key_heads, false, false);
  }
  const int positions = registry::choice_option(request, "positions", {"implied", "int32", "int64"}, "implied");
  if (positions > 0) {
    problem.positions = contiguous_view(nullptr, positions == 1 ? DType::kInt32 : DType::kInt64,
                                        {request.shape[0], request.shape[1]}, request.device);
  }
  const int table = registry::choice_option(request, "table", {"half", "full", "batch", "computed"}, "half");
  const DType table_dtype = registry::dtype_option(request, "table_dtype", request.dtype);
  if (table == 3) {
    const DType dtype = request.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    problem.inverse_frequencies = contiguous_view(nullptr, dtype, {problem.pairs()}, request.device);
    problem.scale = 1.25;
    return problem;
  }
  const int64_t width = table == 1 ? problem.rotary_dim : problem.pairs();
  const int64_t rows = request.shape[1] + (table == 2 ? 0 : 3);
  problem.cos = contiguous_view(nullptr, table_dtype, {request.shape[0], rows, width}, request.device);
  if (table != 2) problem.cos = contiguous_view(nullptr, table_dtype, {rows, width}, request.device);
  problem.sin = problem.cos;
  return problem;
}

// Shapes that rope is tested and measured on: [batch, sequence, heads, head_dim], every option.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const char* interleaved : {"0", "1"}) {
      const std::pair<std::string, std::string> mode = {"interleaved", interleaved};
      add({2, 17, 8, 128}, dtype, {mode});
      add({1, 33, 4, 64}, dtype, {mode, {"inverse", "1"}, {"key_heads", "1"}, {"table", "full"}});
      add({2, 9, 6, 80}, dtype, {mode, {"rotary_dim", "32"}, {"key_heads", "2"}});
      add({2, 9, 3, 96}, dtype, {mode, {"rotary_dim", "64"}, {"in_place", "1"}, {"positions", "int64"}});
      add({3, 5, 2, 10}, dtype, {mode, {"rotary_dim", "6"}, {"positions", "int32"}});
      add({2, 7, 5, 72}, dtype, {mode, {"key_heads", "0"}, {"table", "computed"}, {"positions", "int32"}});
      add({2, 31, 8, 128}, dtype, {mode, {"packed", "1"}, {"key_heads", "2"}, {"table_dtype", "fp32"}});
      add({2, 13, 4, 64}, dtype, {mode, {"heads_first", "1"}, {"table", "computed"}});
      add({2, 13, 4, 48}, dtype, {mode, {"heads_first", "1"}, {"table", "batch"}});
    }
    add({0, 16, 4, 64}, dtype, {});
    add({2, 0, 4, 64}, dtype, {});
    add({1, 1, 1, 2}, dtype, {});
    add({1, 300, 32, 128}, dtype, {{"key_heads", "8"}});
  }
  for (auto& request : add.all) {
    if (request.dtype != DType::kFloat64) continue;
    std::erase_if(request.options, [](const auto& option) { return option.first == "table_dtype"; });
  }
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Problem> kRotate{
    .name = "rope",
    .kernels = registry::kernel_list<kCudaVector, kCudaAny, kCpu, kReference>,
    .describe = describe,
    .visit_tensors = visit_tensors,
    .filling = filling,
    .make = make,
    .check = check,
    .shrink = shrink,
    .cost = cost,
    .shapes = shapes};

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Arguments, rotate>("rope", "rope_forward", kFields),
    registry::plain<Arguments, rotate_back>("rope_backward", kFields, {.renamed = "query=grad_query key=grad_key"}),
    registry::plain<Arguments, rotate>("rope_in_place", kFields, {.shown = "inverse", .in_place = true}),
    registry::plain<FillFrequencies, fill_frequencies>("rope_frequencies", kFillFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kRotate>};

}  // namespace kernel_pytorch::rope
