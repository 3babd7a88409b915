// Checks that linear attention and the delta rule share: places, types and shapes of queries, keys, values and gates,
// and the offsets of packed sequences.
#pragma once

#include <initializer_list>
#include <string_view>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"

namespace kernel_pytorch::linear_attention {

struct Checks {
  std::string_view op;
  Device device;
  DType dtype;

  void place(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.rank == rank, op, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ", rank,
             " dimensions");
  }
  void type(std::string_view name, const TensorView& view, DType wanted) const {
    KP_CHECK(view.dtype == wanted, op, ": ", name, " is ", view.dtype, ", it must be ", wanted, " where query is ",
             dtype, "; convert it");
  }
  void dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, op, ": ", name, " is ", view,
             "; its last dimension must be dense, make it contiguous");
  }
  void shape(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    place(name, view, static_cast<int>(sizes.size()));
    int dimension = 0;
    for (int64_t size : sizes) {
      KP_CHECK(view.sizes[dimension] == size, op, ": ", name, " has shape ", shape_text(view.shape()), "; it must be ",
               shape_text({sizes.begin(), sizes.size()}));
      ++dimension;
    }
  }
  void result(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes, DType wanted) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    type(name, view, wanted);
    KP_CHECK(is_contiguous(view), op, ": ", name, " is ", view, "; it must be contiguous");
  }
  void gate(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    KP_CHECK(view.dtype == dtype || (view.dtype == DType::kFloat32 && dtype != DType::kFloat64), op, ": ", name, " is ",
             view.dtype, ", query is ", dtype, "; convert it to that type or to fp32");
  }
};

template <class Problem>
Checks check_inputs(std::string_view op, const Problem& problem, Device device) {
  const Checks checks{op, device, problem.query.dtype};
  checks.place("query", problem.query, 4);
  const DType dtype = problem.query.dtype;
  KP_CHECK(
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64, op,
      ": query is ", dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, op, ": query is fp64 on ", device,
           "; fp64 is supported on the CPU only, convert it to fp32");
  checks.place("key", problem.key, 4);
  checks.place("value", problem.value, 4);
  const Sizes sizes(problem);
  checks.shape("query", problem.query, {sizes.batch, sizes.tokens, sizes.query_heads, sizes.columns});
  checks.shape("key", problem.key, {sizes.batch, sizes.tokens, sizes.key_heads, sizes.columns});
  checks.type("key", problem.key, dtype);
  checks.type("value", problem.value, dtype);
  for (const auto& [name, heads] : {std::pair{"query", sizes.query_heads}, std::pair{"key", sizes.key_heads}}) {
    KP_CHECK(heads == sizes.heads || (heads > 0 && sizes.heads % heads == 0), op, ": ", name, " has ", heads,
             " heads, value has ", sizes.heads, "; the heads of value must be a multiple");
  }
  KP_CHECK(sizes.columns > 0 && sizes.values > 0, op, ": query has ", sizes.columns, " columns, value has ",
           sizes.values, "; each needs at least one");
  checks.dense("query", problem.query);
  checks.dense("key", problem.key);
  checks.dense("value", problem.value);
  checks.gate("gate", problem.gate, {sizes.batch, sizes.tokens, sizes.heads});
  checks.gate("channel_gate", problem.channel_gate, {sizes.batch, sizes.tokens, sizes.heads, sizes.columns});
  if (problem.channel_gate.is_present()) checks.dense("channel_gate", problem.channel_gate);
  if (problem.cu_seqlens.is_present()) {
    const TensorView& offsets = problem.cu_seqlens;
    checks.place("cu_seqlens", offsets, 1);
    KP_CHECK(offsets.dtype == DType::kInt32 || offsets.dtype == DType::kInt64, op, ": cu_seqlens is ", offsets.dtype,
             "; convert it to int32 or int64");
    KP_CHECK(offsets.sizes[0] >= 1 && is_contiguous(offsets), op, ": cu_seqlens is ", offsets,
             "; it must be contiguous, sequences + 1 long");
    KP_CHECK(sizes.batch == 1, op, ": with cu_seqlens the batch is 1, query has ", sizes.batch,
             "; put the sequences one after another");
  }
  return checks;
}

// How many states initial_state has: one for each sequence, or a pool's, where state_index picks them.
template <class Problem>
int64_t check_pool(const Checks& checks, const Problem& problem) {
  const Sizes sizes(problem);
  if (!problem.state_index.is_present()) return sizes.sequences;
  checks.shape("state_index", problem.state_index, {sizes.sequences});
  const DType type = problem.state_index.dtype;
  KP_CHECK(type == DType::kInt32 || type == DType::kInt64, checks.op, ": state_index is ", type,
           "; convert it to int32 or int64");
  KP_CHECK(is_contiguous(problem.state_index), checks.op, ": state_index is ", problem.state_index,
           "; it must be contiguous");
  checks.place("initial_state", problem.initial_state, 4);
  KP_CHECK(problem.final_state.data == problem.initial_state.data, checks.op,
           ": state_index is given, but initial_state is not written in place; use the form that does");
  return problem.initial_state.sizes[0];
}

// On a GPU the kernel skips a slot outside the pool.
template <class Problem>
void check_slots(std::string_view op, const Problem& problem, const Context& context) {
  if (!problem.state_index.is_present() || context.device().kind != DeviceKind::kCpu) return;
  const int64_t slots = problem.initial_state.sizes[0];
  for (int64_t i = 0; i < problem.state_index.sizes[0]; ++i) {
    const int64_t slot = slot_of(problem, i);
    KP_CHECK(slot >= -1 && slot < slots, op, ": state_index[", i, "] is ", slot, ", the pool has ", slots,
             " states; name one of them, or -1 for none");
  }
}

template <class Problem>
void check_offsets(std::string_view op, const Problem& problem, const Context& context) {
  if (!problem.cu_seqlens.is_present()) return;
  check_offset_values({.op = op,
                       .name = "cu_seqlens",
                       .offsets = problem.cu_seqlens,
                       .tensor = "query",
                       .tokens = problem.value.sizes[1],
                       .begins_with_zero = true},
                      context);
}

}  // namespace kernel_pytorch::linear_attention
