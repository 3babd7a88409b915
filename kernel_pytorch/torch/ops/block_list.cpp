// torch.ops.kernel_pytorch.block_list and block_select: schemas and functions. Neither has a gradient; the layers over
// them (python/kernel_pytorch/attention/sparse.py) say what stands in for it.
#include "kernel_pytorch/ops/block_list/block_list.h"

#include <array>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

using block_list::List;

// Counts and blocks, or two empty tensors where they are not wanted.
List list_output(Call& call, bool wanted, std::array<int64_t, 4> shape) {
  if (!wanted) {
    for (int i = 0; i < 2; ++i) call.output(std::array<int64_t, 1>{0}, DType::kInt32);
    return {};
  }
  const TensorView counts = call.output(std::span(shape).first(3), DType::kInt32);
  return {.counts = counts, .blocks = call.output(shape, DType::kInt32)};
}

void build(Call& call, const ParameterView& map, bool rows, bool columns, bool full) {
  KP_CHECK(map.rank == 4, "block_list: map has shape ", shape_text(map.shape()),
           "; it must be [batch, heads, rows, columns]");
  const std::array<int64_t, 4> straight = {map.sizes[0], map.sizes[1], map.sizes[2], map.sizes[3]};
  const std::array<int64_t, 4> transposed = {map.sizes[0], map.sizes[1], map.sizes[3], map.sizes[2]};
  block_list::Build arguments{.map = map};
  arguments.rows = list_output(call, rows, straight);
  arguments.columns = list_output(call, columns, transposed);
  arguments.full_rows = list_output(call, rows && full, straight);
  arguments.full_columns = list_output(call, columns && full, transposed);
  block_list::build(arguments, call.context());
}

void select(Call& call, const DenseView& query, const DenseView& key, const TensorView& scores,
            const ParameterView& query_lengths, const ParameterView& key_lengths, int64_t queries, int64_t keys,
            int64_t query_block, int64_t key_block, int64_t key_parts, bool causal,
            std::optional<int64_t> causal_offset, double sparsity, double threshold, int64_t sinks, int64_t local,
            bool with_map) {
  const TensorView& leader = scores.is_present() ? scores : static_cast<const TensorView&>(query);
  KP_CHECK(leader.rank == 4, "block_select: ", scores.is_present() ? "scores" : "query", " has shape ",
           shape_text(leader.shape()), "; it must be [batch, heads, rows, ...]");
  block_list::Select arguments{.query = query,
                               .key = key,
                               .scores = scores,
                               .query_lengths = query_lengths,
                               .key_lengths = key_lengths,
                               .queries = queries,
                               .keys = keys,
                               .query_block = query_block,
                               .key_block = key_block,
                               .key_parts = key_parts,
                               .causal = causal,
                               .causal_offset = causal_offset,
                               .sparsity = sparsity,
                               .threshold = threshold,
                               .sinks = sinks,
                               .local = local};
  const std::array<int64_t, 4> shape = {leader.sizes[0], leader.sizes[1], leader.sizes[2],
                                        block_list::columns_of(arguments)};
  arguments.rows = list_output(call, true, shape);
  const int64_t nothing[] = {0};
  const std::span<const int64_t> map_shape = with_map ? std::span<const int64_t>(shape) : nothing;
  const TensorView map = call.output(map_shape, DType::kBool);
  if (with_map) arguments.map = map;
  block_list::select(arguments, call.context());
}

using Ops =
    OpList<Op<"block_list(Tensor map, bool rows, bool columns, bool full) -> (Tensor row_counts, Tensor row_blocks, "
              "Tensor column_counts, Tensor column_blocks, Tensor full_row_counts, Tensor full_row_blocks, "
              "Tensor full_column_counts, Tensor full_column_blocks)",
              build>,
           Op<"block_select(Tensor? query, Tensor? key, Tensor? scores, Tensor? query_lengths, Tensor? key_lengths, "
              "SymInt queries, SymInt keys, int query_block, int key_block, int key_parts, bool causal, SymInt? "
              "causal_offset, float sparsity, float threshold, "
              "int sinks, int local, bool with_map) -> (Tensor counts, Tensor blocks, Tensor map)",
              select>>;

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kernel_pytorch, library) {
  Ops::define(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CPU, library) {
  Ops::implement(library);
}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch, CUDA, library) {
  Ops::implement(library);
}

}  // namespace kernel_pytorch::torch_ops
