#include "kernel_pytorch/ops/native_sparse_attention/native_sparse_attention.h"

#include <initializer_list>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/native_sparse_attention/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr std::string_view kOp = "native_sparse_attention";
constexpr int64_t kMost = int64_t{1} << 30;  // tokens of a sequence, and every number

struct Checks {
  Device device;
  DType dtype;

  void place(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), kOp, ": ", name, " is missing");
    KP_CHECK(view.device == device, kOp, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.rank == rank, kOp, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ", rank,
             " dimensions");
  }
  void type(std::string_view name, const TensorView& view, DType wanted) const {
    KP_CHECK(view.dtype == wanted, kOp, ": ", name, " is ", view.dtype, ", it must be ", wanted, " where query is ",
             dtype, "; convert it");
  }
  void shape(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    place(name, view, static_cast<int>(sizes.size()));
    int dimension = 0;
    for (int64_t size : sizes) {
      KP_CHECK(view.sizes[dimension] == size, kOp, ": ", name, " has shape ", shape_text(view.shape()), "; it must be ",
               shape_text({sizes.begin(), sizes.size()}));
      ++dimension;
    }
  }
  void input(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    shape(name, view, sizes);
    type(name, view, dtype);
    KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, kOp, ": ", name, " is ", view,
             "; its last dimension must be dense, make it contiguous");
  }
  void result(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes, DType wanted) const {
    if (!view.is_present()) return;
    shape(name, view, sizes);
    type(name, view, wanted);
    KP_CHECK(is_contiguous(view), kOp, ": ", name, " is ", view, "; it must be contiguous");
  }
  void gate(std::string_view name, const TensorView& view, const Sizes& sizes) const {
    if (!view.is_present()) return;
    shape(name, view, {sizes.batch, sizes.queries, sizes.heads});
    KP_CHECK(view.dtype == dtype || (view.dtype == DType::kFloat32 && dtype != DType::kFloat64), kOp, ": ", name,
             " is ", view.dtype, ", query is ", dtype, "; convert it to that type or to fp32");
  }
};

void check_number(std::string_view name, int64_t value, int64_t least) {
  KP_CHECK(value >= least && value <= kMost, kOp, ": ", name, " is ", value, "; it must be ", least, " to ", kMost);
}

void check_options(const Options& options) {
  KP_CHECK(options.form == Form::kPaper || options.form == Form::kEjkernel, kOp, ": form must be one of ", kFormNames);
  check_number("block_size", options.block_size, 1);
  check_number("blocks", options.blocks, 0);
  check_number("window", options.window, 1);
  const Numbers numbers(options);
  check_number("compress_block", numbers.compress_block, 1);
  check_number("compress_stride", numbers.compress_stride, 1);
  check_number("first_blocks", numbers.first_blocks, 0);
  check_number("local_blocks", numbers.local_blocks, 1);
  KP_CHECK(numbers.compress_block % numbers.compress_stride == 0, kOp, ": compress_block is ", numbers.compress_block,
           ", compress_stride is ", numbers.compress_stride, "; the stride must divide the block");
}

template <class Problem>
Checks check_inputs(const Problem& problem, Device device, bool chooses) {
  const Checks checks{device, problem.query.dtype};
  const DType dtype = problem.query.dtype;
  for (const auto& [name, view] : {std::pair<std::string_view, const TensorView&>{"query", problem.query},
                                   {"key", problem.key},
                                   {"value", problem.value}}) {
    checks.place(name, view, 4);
  }
  KP_CHECK(
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat64,
      kOp, ": query is ", dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, kOp, ": query is fp64 on ", device,
           "; fp64 is supported on the CPU only, convert it to fp32");
  check_options(problem.options);
  const Sizes sizes(problem);
  KP_CHECK(sizes.queries <= kMost && sizes.keys <= kMost, kOp, ": query has ", sizes.queries, " tokens, key ",
           sizes.keys, "; at most ", kMost, " are supported");
  KP_CHECK(sizes.heads == sizes.key_heads || (sizes.key_heads > 0 && sizes.heads % sizes.key_heads == 0), kOp,
           ": query has ", sizes.heads, " heads, key has ", sizes.key_heads, "; the heads of query must be a multiple");
  KP_CHECK(sizes.size > 0 && sizes.value_size > 0, kOp, ": query has size ", sizes.size, ", value has ",
           sizes.value_size, "; each needs at least 1");
  checks.input("query", problem.query, {sizes.batch, sizes.queries, sizes.heads, sizes.size});
  checks.input("key", problem.key, {sizes.batch, sizes.keys, sizes.key_heads, sizes.size});
  checks.input("value", problem.value, {sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size});
  const bool has_compressed = problem.compressed_key.is_present();
  KP_CHECK(has_compressed == problem.compressed_value.is_present(), kOp, ": only ",
           has_compressed ? "compressed_key" : "compressed_value", " is given; give both or neither");
  if (problem.cu_seqlens.is_present()) {
    const TensorView& offsets = problem.cu_seqlens;
    checks.place("cu_seqlens", offsets, 1);
    KP_CHECK(offsets.dtype == DType::kInt32 || offsets.dtype == DType::kInt64, kOp, ": cu_seqlens is ", offsets.dtype,
             "; convert it to int32 or int64");
    KP_CHECK(offsets.sizes[0] >= 1 && is_contiguous(offsets), kOp, ": cu_seqlens is ", offsets,
             "; it must be contiguous, sequences + 1 long");
    KP_CHECK(sizes.batch == 1, kOp, ": with cu_seqlens the batch is 1, query has ", sizes.batch,
             "; put the sequences one after another");
    KP_CHECK(sizes.queries == sizes.keys, kOp, ": with cu_seqlens query and key have the same tokens, query has ",
             sizes.queries, ", key has ", sizes.keys);
    KP_CHECK(!has_compressed, kOp, ": compressed_key is given together with cu_seqlens; leave it to be computed");
  }
  if (has_compressed) {
    checks.input("compressed_key", problem.compressed_key,
                 {sizes.batch, sizes.compressed, sizes.key_heads, sizes.size});
    checks.input("compressed_value", problem.compressed_value,
                 {sizes.batch, sizes.compressed, sizes.key_heads, sizes.value_size});
  }
  checks.gate("gate_compressed", problem.gate_compressed, sizes);
  checks.gate("gate_selected", problem.gate_selected, sizes);
  checks.gate("gate_window", problem.gate_window, sizes);
  if (problem.block_indices.is_present()) {
    checks.place("block_indices", problem.block_indices, 4);
    checks.result("block_indices", problem.block_indices, {sizes.batch, sizes.queries, sizes.key_heads, sizes.list},
                  DType::kInt32);
  }
  KP_CHECK(!chooses || sizes.numbers.block_size % sizes.numbers.compress_stride == 0, kOp, ": block_size is ",
           sizes.numbers.block_size, ", compress_stride is ", sizes.numbers.compress_stride,
           "; where blocks are chosen the stride must divide the block");
  return checks;
}

template <class Problem>
void check_offsets(const Problem& problem, const Context& context) {
  if (!problem.cu_seqlens.is_present()) return;
  check_offset_values({.op = kOp,
                       .name = "cu_seqlens",
                       .offsets = problem.cu_seqlens,
                       .tensor = "query",
                       .tokens = problem.query.sizes[1],
                       .begins_with_zero = true},
                      context);
}

}  // namespace

void check(const Forward& problem, Device device) {
  const Checks checks = check_inputs(problem, device, chooses(problem));
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, statistic = statistic_type(dtype);
  KP_CHECK(problem.output.is_present(), kOp, ": output is missing");
  checks.result("output", problem.output, {sizes.batch, sizes.queries, sizes.heads, sizes.value_size}, dtype);
  checks.result("compressed_lse", problem.compressed_lse, {sizes.batch, sizes.heads, sizes.queries}, statistic);
  checks.result("selected_lse", problem.selected_lse, {sizes.batch, sizes.heads, sizes.queries}, statistic);
  checks.result("window_lse", problem.window_lse, {sizes.batch, sizes.heads, sizes.queries}, statistic);
  checks.result("selected", problem.selected, {sizes.batch, sizes.queries, sizes.key_heads, problem.options.blocks},
                DType::kInt32);
}

void check(const Backward& problem, Device device) {
  const Checks checks = check_inputs(problem, device, false);
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype, statistic = statistic_type(dtype);
  KP_CHECK(!problem.gate_selected.is_present() || lists_of(problem).is_present(), kOp,
           ": block_indices and selected are missing; the gradient needs the lists of the forward");
  checks.result("selected", problem.selected, {sizes.batch, sizes.queries, sizes.key_heads, problem.options.blocks},
                DType::kInt32);
  checks.input("grad_output", problem.grad_output, {sizes.batch, sizes.queries, sizes.heads, sizes.value_size});
  for (const auto& [name, view] :
       {std::pair<std::string_view, const TensorView&>{"compressed_lse", problem.compressed_lse},
        {"selected_lse", problem.selected_lse},
        {"window_lse", problem.window_lse}}) {
    checks.place(name, view, 3);
    checks.result(name, view, {sizes.batch, sizes.heads, sizes.queries}, statistic);
  }
  KP_CHECK(problem.grad_query.is_present() && problem.grad_key.is_present() && problem.grad_value.is_present(), kOp,
           ": grad_query, grad_key or grad_value is missing");
  checks.result("grad_query", problem.grad_query, {sizes.batch, sizes.queries, sizes.heads, sizes.size}, dtype);
  checks.result("grad_key", problem.grad_key, {sizes.batch, sizes.keys, sizes.key_heads, sizes.size}, dtype);
  checks.result("grad_value", problem.grad_value, {sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size}, dtype);
  const auto of = [&](std::string_view name, const TensorView& gradient, const TensorView& input,
                      std::initializer_list<int64_t> shape) {
    KP_CHECK(!gradient.is_present() || input.is_present(), kOp, ": ", name, " is asked for, but its input is absent");
    checks.result(name, gradient, shape, input.dtype);
  };
  of("grad_compressed_key", problem.grad_compressed_key, problem.compressed_key,
     {sizes.batch, sizes.compressed, sizes.key_heads, sizes.size});
  of("grad_compressed_value", problem.grad_compressed_value, problem.compressed_value,
     {sizes.batch, sizes.compressed, sizes.key_heads, sizes.value_size});
  of("grad_gate_compressed", problem.grad_gate_compressed, problem.gate_compressed,
     {sizes.batch, sizes.queries, sizes.heads});
  of("grad_gate_selected", problem.grad_gate_selected, problem.gate_selected,
     {sizes.batch, sizes.queries, sizes.heads});
  of("grad_gate_window", problem.grad_gate_window, problem.gate_window, {sizes.batch, sizes.queries, sizes.heads});
}

void forward(const Forward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(arguments, context);
  registry::run_best(kForward, arguments, context);
}

void backward(const Backward& arguments, Context& context) {
  check(arguments, context.device());
  check_offsets(arguments, context);
  registry::run_best(kBackward, arguments, context);
}

}  // namespace kernel_pytorch::native_sparse_attention
