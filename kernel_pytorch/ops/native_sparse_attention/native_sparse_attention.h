// Native sparse attention: each query attends to means of blocks, to a few blocks of keys that it chooses by them, and
// to a window of neighbours; gates add the three.
//
//   compressed(c)    = mean of the keys (of the values) c * compress_stride up to c * compress_stride + compress_block,
//                      or given; only whole blocks
//   branch           = softmax(scale * query keys^T) values, over the keys that the branch sees; none: 0, lse -inf
//   output[t, h]     = gate_compressed[t, h] * branch over compressed keys whose block ends at t or before
//                    + gate_selected[t, h]   * branch over the keys up to t of the blocks in the token's list
//                    + gate_window[t, h]     * branch over keys t - window + 1 up to t
//
// A branch without a gate does not exist. Query i stands at key t = i + keys - queries; where t < 0 it sees nothing.
// Query head h reads key head h / (heads / key heads), and the heads that read one key head share one list:
//
//   p(h, c)   = the compressed branch's probability (also where that branch has no gate)
//   score(j)  = sum over the group's heads and over c of p(h, c) * (strides of c that lie in block j of block_size
//   keys)
//
// A list has `blocks` entries of the blocks 0 to t / block_size: first the `local_blocks` up to t's own, backwards,
// then the `first_blocks` from 0 on, then those with the highest scores, of equal scores the smaller; NaN is below all
// others. It ascends, -1 stands behind the last: what is missing is skipped. Choosing has no gradient. Lists can be
// given instead, of any length and order; entries below 0 or behind t are skipped, a block that is named twice counts
// twice.
//
//   form       compress_block  compress_stride  first_blocks  local_blocks
//   paper      32              16               1             2
//   ejkernel   block_size      block_size       0             1              where these are not given
//
// compress_stride divides compress_block and block_size. Types: fp32, bf16, fp16, and fp64 on the CPU; gates that type
// or fp32; sums, means and probabilities are fp32 (double in the reference), but that tensor cores multiply means and
// probabilities rounded to the type of the keys. With cu_seqlens the batch is 1 and
// sequence i is tokens cu_seqlens[i] up to cu_seqlens[i + 1], blocks and lists count from its beginning; tokens in no
// sequence have output 0 and gradient 0. Sizes of 0 are legal.
#pragma once

#include <optional>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::native_sparse_attention {

enum class Form : uint8_t { kPaper, kEjkernel };
inline constexpr std::string_view kFormNames = "paper ejkernel";

inline constexpr std::string_view kQueryShape = "batch queries heads size";
inline constexpr std::string_view kKeyShape = "batch keys key_heads size";
inline constexpr std::string_view kValueShape = "batch keys key_heads value_size";
inline constexpr std::string_view kOutputShape = "batch queries heads value_size";
inline constexpr std::string_view kCompressedKeyShape = "batch compressed key_heads size";
inline constexpr std::string_view kCompressedValueShape = "batch compressed key_heads value_size";
inline constexpr std::string_view kGateShape = "batch queries heads";
inline constexpr std::string_view kListShape = "batch queries key_heads list";
inline constexpr std::string_view kLseShape = "batch heads queries";

struct Options {
  std::optional<double> scale{};  // none: size ** -0.5
  Form form = Form::kPaper;
  int64_t block_size = 64;
  int64_t blocks = 16;  // of a list; without meaning where lists are given
  int64_t window = 512;
  std::optional<int64_t> compress_block{}, compress_stride{};
  std::optional<int64_t> first_blocks{}, local_blocks{};
};
inline constexpr auto kOptionFields = field_group<Options>(
    option<&Options::scale>(), option<&Options::form>({.key = KeyPart::kValue, .choices = kFormNames}),
    option<&Options::block_size>({.key = KeyPart::kValue}), option<&Options::blocks>({.key = KeyPart::kValue}),
    option<&Options::window>({.key = KeyPart::kValue}), option<&Options::compress_block>(),
    option<&Options::compress_stride>(), option<&Options::first_blocks>(), option<&Options::local_blocks>());

struct Forward {
  TensorView query{}, key{}, value{};               // last stride 1
  TensorView compressed_key{}, compressed_value{};  // optional, both or neither, last stride 1; not with cu_seqlens
  TensorView gate_compressed{}, gate_selected{}, gate_window{};  // optional
  TensorView block_indices{};                                    // optional: int32, contiguous
  TensorView cu_seqlens{};                                       // optional: int32 or int64 [sequences + 1], contiguous
  Options options{};
  TensorView output{};    // contiguous
  TensorView selected{};  // optional: the lists chosen, contiguous; -1 where they are given
  TensorView compressed_lse{}, selected_lse{}, window_lse{};  // optional: natural logarithms, contiguous
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::query>(
        {.shape = kQueryShape, .leads = true, .bucketed = "batch queries", .memory = MemoryLayout::kDenseLast}),
    input<&Forward::key>(
        {.shape = kKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Forward::value>(
        {.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    optional_input<&Forward::compressed_key>(
        {.shape = kCompressedKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Forward::compressed_value>(
        {.shape = kCompressedValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Forward::gate_compressed>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Forward::gate_selected>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Forward::gate_window>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Forward::block_indices>({.shape = kListShape,
                                             .dtype = "int32",
                                             .memory = MemoryLayout::kContiguous,
                                             .key = KeyPart::kSizes,
                                             .content = "indices 5"}),
    optional_input<&Forward::cu_seqlens>({.shape = "offsets",
                                          .bucketed = "offsets",
                                          .memory = MemoryLayout::kContiguous,
                                          .key = KeyPart::kSizes,
                                          .content = "offsets query.1"}),
    all_of<&Forward::options, kOptionFields>(), output<&Forward::output>({.shape = kOutputShape, .dtype = "query"}),
    output<&Forward::selected>({.shape = "batch queries key_heads blocks", .dtype = "int32"}),
    saved<&Forward::compressed_lse>({.shape = kLseShape, .dtype = "statistic query"}),
    saved<&Forward::selected_lse>({.shape = kLseShape, .dtype = "statistic query"}),
    saved<&Forward::window_lse>({.shape = kLseShape, .dtype = "statistic query"}));

// With P of each branch, dP = grad_output values^T and d = sum of P * dP over its keys:
//   grad_gate = d;  dS = gate * P * (dP - d);  grad_query, grad_key by dS, grad_value by gate * P
// What reaches compressed keys goes on to the keys they are means of.
struct Backward {
  TensorView grad_output{};  // last stride 1
  TensorView query{}, key{}, value{}, compressed_key{}, compressed_value{};
  TensorView gate_compressed{}, gate_selected{}, gate_window{};
  TensorView block_indices{}, selected{};  // with gate_selected one of them is needed, the given lists go first
  TensorView cu_seqlens{};
  TensorView compressed_lse{}, selected_lse{}, window_lse{};  // each needed with its gate
  Options options{};
  TensorView grad_query{}, grad_key{}, grad_value{};  // contiguous
  TensorView grad_compressed_key{}, grad_compressed_value{}, grad_gate_compressed{}, grad_gate_selected{},
      grad_gate_window{};  // contiguous; absent: not wanted
};
inline constexpr auto kBackwardFields = fields<Backward>(
    input<&Backward::grad_output>({.shape = kOutputShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::query>(
        {.shape = kQueryShape, .leads = true, .bucketed = "batch queries", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::key>(
        {.shape = kKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    input<&Backward::value>(
        {.shape = kValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast, .key = KeyPart::kSizes}),
    optional_input<&Backward::compressed_key>(
        {.shape = kCompressedKeyShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Backward::compressed_value>(
        {.shape = kCompressedValueShape, .dtype = "query", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Backward::gate_compressed>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Backward::gate_selected>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Backward::gate_window>({.shape = kGateShape, .content = "positive"}),
    optional_input<&Backward::block_indices>({.shape = kListShape,
                                              .dtype = "int32",
                                              .memory = MemoryLayout::kContiguous,
                                              .key = KeyPart::kSizes,
                                              .content = "indices 5"}),
    optional_input<&Backward::selected>({.shape = "batch queries key_heads blocks",
                                         .dtype = "int32",
                                         .memory = MemoryLayout::kContiguous,
                                         .content = "indices 5"}),
    optional_input<&Backward::cu_seqlens>({.shape = "offsets",
                                           .bucketed = "offsets",
                                           .memory = MemoryLayout::kContiguous,
                                           .key = KeyPart::kSizes,
                                           .content = "offsets query.1"}),
    input<&Backward::compressed_lse>(
        {.shape = kLseShape, .dtype = "statistic query", .memory = MemoryLayout::kContiguous}),
    input<&Backward::selected_lse>(
        {.shape = kLseShape, .dtype = "statistic query", .memory = MemoryLayout::kContiguous}),
    input<&Backward::window_lse>({.shape = kLseShape, .dtype = "statistic query", .memory = MemoryLayout::kContiguous}),
    all_of<&Backward::options, kOptionFields>(),
    output<&Backward::grad_query>({.shape = kQueryShape, .dtype = "query"}),
    output<&Backward::grad_key>({.shape = kKeyShape, .dtype = "query"}),
    output<&Backward::grad_value>({.shape = kValueShape, .dtype = "query"}),
    output<&Backward::grad_compressed_key>(
        {.shape = "like compressed_key", .dtype = "query", .when = "compressed_key"}),
    output<&Backward::grad_compressed_value>(
        {.shape = "like compressed_value", .dtype = "query", .when = "compressed_value"}),
    output<&Backward::grad_gate_compressed>(
        {.shape = "like gate_compressed", .dtype = "gate_compressed", .when = "gate_compressed"}),
    output<&Backward::grad_gate_selected>(
        {.shape = "like gate_selected", .dtype = "gate_selected", .when = "gate_selected"}),
    output<&Backward::grad_gate_window>({.shape = "like gate_window", .dtype = "gate_window", .when = "gate_window"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::native_sparse_attention
