// The kernels of native sparse attention, best first, the reference last, and what the registry asks about their
// problems.
#include <algorithm>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/native_sparse_attention/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr registry::RequestForm kRequest{
    .shape = "batch queries heads size",
    .sizes = "keys=queries key_heads=heads value_size=size compressed=0 list=3 offsets=2"};

// As many compressed rows as the keys have blocks.
template <class Problem>
void arrange(const registry::ProblemRequest&, Problem& problem) {
  if (!problem.compressed_key.is_present() || Numbers(problem.options).compress_stride < 1)
    return;  // the check refuses
  const auto resize = [&](TensorView& view) {
    if (!view.is_present()) return;
    const int64_t compressed = Numbers(problem.options).compressed(problem.key.sizes[1]);
    view =
        contiguous_view(view.data, view.dtype, {view.sizes[0], compressed, view.sizes[2], view.sizes[3]}, view.device);
  };
  resize(problem.compressed_key);
  resize(problem.compressed_value);
  if constexpr (requires { problem.grad_compressed_key; }) {
    resize(problem.grad_compressed_key);
    resize(problem.grad_compressed_value);
  }
}

// Keys that have their scores apart, so that every kernel chooses the same blocks: queries agree on one column, in
// which keys differ by much more than rounding.
void set_trial_inputs(const Forward& on_host) {
  if (!chooses(on_host) || on_host.compressed_key.is_present()) return;
  const TensorView &query = on_host.query, &key = on_host.key;
  const int64_t block = on_host.options.block_size;
  for (int64_t i = 0; i < query.element_count(); ++i) {
    store_element(query.data, query.dtype, i,
                  i % query.sizes[3] == 0 ? 2 : 0.125 * load_element(query.data, query.dtype, i));
  }
  for (int64_t i = 0; i < key.element_count(); ++i) {
    const int64_t token = i / (key.sizes[3] * key.sizes[2]) % std::max<int64_t>(key.sizes[1], 1);
    const auto height = static_cast<double>(token / block * 7 % 11);
    store_element(key.data, key.dtype, i,
                  i % key.sizes[3] == 0 ? height : 0.125 * load_element(key.data, key.dtype, i));
  }
}

// The logarithms of a trial are of other scores: normal numbers would make probabilities of any size, large ones small.
void set_trial_backward(const Backward& on_host) {
  for (const TensorView* lse : {&on_host.compressed_lse, &on_host.selected_lse, &on_host.window_lse}) {
    for (int64_t i = 0; i < lse->element_count(); ++i) store_element(lse->data, lse->dtype, i, 4);
  }
}

template <class Problem>
int64_t keys_of_token(const Problem& problem) {
  const Sizes sizes(problem);
  int64_t keys = 0;
  if (problem.gate_compressed.is_present()) keys += sizes.compressed / 2;
  if (problem.gate_selected.is_present()) keys += std::min(sizes.list * sizes.numbers.block_size, sizes.keys);
  if (problem.gate_window.is_present()) keys += std::min(sizes.numbers.window, sizes.keys);
  return keys;
}
int64_t forward_flops(const Forward& problem) {
  const Sizes sizes(problem);
  return 2 * sizes.batch * sizes.queries * sizes.heads * (sizes.size + sizes.value_size) * keys_of_token(problem);
}
int64_t backward_flops(const Backward& problem) {
  const Sizes sizes(problem);
  return 2 * sizes.batch * sizes.queries * sizes.heads * (3 * sizes.size + 2 * sizes.value_size) *
         keys_of_token(problem);
}

// Gradients are sums of terms that cancel; the keys of 16 bits are gathered by many queries.
template <class Problem>
registry::Precision precision(const Problem& problem, std::string_view, DType own) {
  const DType dtype = problem.query.dtype;
  if (dtype == DType::kFloat64) return {.dtype = own};
  if (dtype == DType::kFloat32) return {.dtype = own, .least_absolute = 2e-5};
  return {.dtype = dtype, .least_absolute = 0.01};
}

// Shapes [batch, queries, heads, size] that are tested and measured.
constexpr const char* kForwardShapes = R"(
  fp32 bf16 fp16: 2x150x4x64 key_heads=2 gate_compressed=1 gate_selected=1 gate_window=1 block_size=16 blocks=4 window=24
    1x131x2x40 gate_compressed=fp32 gate_selected=fp32 block_size=8 blocks=5 form=ejkernel value_size=24
    1x100x4x32 key_heads=1 gate_selected=1 block_indices=1 list=5 block_size=8; gate_window=1 window=7
    1x90x3x16 gate_compressed=1 compressed_key=1 compressed_value=1 gate_window=1 compress_block=8 compress_stride=4
    1x5x2x64 keys=130 gate_compressed=1 gate_selected=1 gate_window=1 block_size=32 blocks=3 window=40
    1x40x2x16 keys=9 gate_selected=1 gate_window=1 block_size=4 blocks=2 compress_block=4 compress_stride=2
    1x140x6x32 key_heads=3 cu_seqlens=int32 offsets=5 gate_compressed=1 gate_selected=1 gate_window=1 block_size=16 blocks=2 window=9
    1x90x16x128 key_heads=1 gate_selected=1 block_indices=1 list=40 block_size=1; 1x0x2x16 gate_window=1; 2x3x2x5
  fp64: 1x40x2x8 gate_compressed=1 gate_selected=1 gate_window=1 block_size=8 blocks=2 window=5 compress_block=4 compress_stride=2
)";
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 2x150x4x64 key_heads=2 gate_compressed=1 gate_selected=1 gate_window=1 block_indices=1 block_size=16 window=24
    1x131x2x40 gate_compressed=fp32 gate_selected=fp32 selected=1 blocks=5 block_size=8 form=ejkernel value_size=24
    1x100x4x32 key_heads=1 gate_selected=1 block_indices=1 list=5 block_size=8; gate_window=1 window=7
    1x90x3x16 gate_compressed=1 compressed_key=1 compressed_value=1 gate_window=1 compress_block=8 compress_stride=4
    1x5x2x64 keys=130 gate_compressed=1 gate_window=1 window=40; 1x40x2x16 keys=9 gate_selected=1 block_indices=1 block_size=4
    1x140x6x32 key_heads=3 cu_seqlens=int32 offsets=5 gate_compressed=1 gate_selected=1 block_indices=1 gate_window=1 block_size=16 window=9
    1x90x16x128 key_heads=1 gate_selected=1 block_indices=1 list=40 block_size=1; 1x0x2x16 gate_window=1
  fp64: 1x40x2x8 gate_compressed=1 gate_selected=1 block_indices=1 gate_window=1 block_size=8 window=5
)";

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "native_sparse_attention_forward",
     .kernels = registry::kernel_list<kForwardMma, kForwardCuda, kForwardCpu, kForwardReference>,
     .precision = precision<Forward>,
     .set_trial_inputs = set_trial_inputs,
     .request = kRequest,
     .arrange = arrange<Forward>,
     .check = registry::check_only<Forward, check>,
     .shapes = kForwardShapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "native_sparse_attention_backward",
     .kernels = registry::kernel_list<kBackwardMma, kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .precision = precision<Backward>,
     .set_trial_inputs = set_trial_backward,
     .request = kRequest,
     .arrange = arrange<Backward>,
     .check = registry::check_only<Backward, check>,
     .shapes = kBackwardShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("native_sparse_attention",
                                                              "native_sparse_attention_forward", kForwardFields),
                   registry::plain<Backward, backward>("native_sparse_attention_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::native_sparse_attention
