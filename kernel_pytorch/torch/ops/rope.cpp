// torch.ops.kernel_pytorch.rope*: schemas and functions. Layouts become views of [batch, sequence, heads, head_dim];
// the backward is the rotation back. Gradients and shape functions are Python's (python/kernel_pytorch/_ops/rope.py).
#include "kernel_pytorch/ops/rope/rope.h"

#include <array>
#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/torch/op.h"

namespace kernel_pytorch::torch_ops {
namespace {

// What a call says besides its heads.
struct Turns {
  const TensorView &cos, &sin, &inverse_frequencies, &positions;
  double scale;
  int64_t rotary_dim;
  bool interleaved, heads_first, inverse;
};

void insert_batch(TensorView& view) {
  for (int i = view.rank; i > 0; --i) view.sizes[i] = view.sizes[i - 1], view.strides[i] = view.strides[i - 1];
  view.sizes[0] = 1;
  view.strides[0] = 0;
  ++view.rank;
}

TensorView heads_view(TensorView view, std::string_view name, bool heads_first) {
  if (!view.is_present()) return view;
  KP_CHECK(view.rank == 3 || view.rank == 4, "rope: ", name, " has shape ", shape_text(view.shape()), "; it must be ",
           heads_first ? "[batch, heads, sequence, head_dim]" : "[batch, sequence, heads, head_dim]",
           ", with or without the batch");
  if (view.rank == 3) insert_batch(view);
  if (heads_first) {
    std::swap(view.sizes[1], view.sizes[2]);
    std::swap(view.strides[1], view.strides[2]);
  }
  return view;
}

TensorView positions_view(TensorView positions, const TensorView& query) {
  if (positions.is_present() && positions.rank == 1) insert_batch(positions);
  if (positions.is_present() && positions.rank == 2 && positions.sizes[0] == 1) {
    positions.sizes[0] = query.sizes[0];
    positions.strides[0] = 0;
  }
  return positions;
}

void run(Call& call, const TensorView& query, const TensorView& key, const TensorView& query_output,
         const TensorView& key_output, const Turns& turns) {
  const TensorView queries = heads_view(query, "query", turns.heads_first);
  rope::rotate({.query = queries,
                .key = heads_view(key, "key", turns.heads_first),
                .cos = turns.cos,
                .sin = turns.sin,
                .inverse_frequencies = turns.inverse_frequencies,
                .scale = turns.scale,
                .positions = positions_view(turns.positions, queries),
                .rotary_dim = turns.rotary_dim,
                .interleaved = turns.interleaved,
                .inverse = turns.inverse,
                .query_output = heads_view(query_output, "query", turns.heads_first),
                .key_output = heads_view(key_output, "key", turns.heads_first)},
               call.context());
}

void forward(Call& call, const TensorView& query, const TensorView& key, const TensorView& cos, const TensorView& sin,
             const ParameterView& inverse_frequencies, const TensorView& positions, double scale, int64_t rotary_dim,
             bool interleaved, bool heads_first) {
  const TensorView query_output = call.output_like(query);
  const TensorView key_output = call.output_like_if(true, key, query);
  run(call, query, key, query_output, key_output,
      {cos, sin, inverse_frequencies, positions, scale, rotary_dim, interleaved, heads_first, false});
}

void backward(Call& call, const TensorView& query, const TensorView& key, const TensorView& cos, const TensorView& sin,
              const ParameterView& inverse_frequencies, const TensorView& positions, double scale, int64_t rotary_dim,
              bool interleaved, bool heads_first) {
  const TensorView query_output = call.output_like(query);
  const TensorView key_output = call.output_like_if(true, key, query);
  run(call, query, key, query_output, key_output,
      {cos, sin, inverse_frequencies, positions, scale, rotary_dim, interleaved, heads_first, true});
}

void in_place(Call& call, const TensorView& query, const TensorView& key, const TensorView& cos, const TensorView& sin,
              const ParameterView& inverse_frequencies, const TensorView& positions, double scale, int64_t rotary_dim,
              bool interleaved, bool heads_first, bool inverse) {
  run(call, query, key, query, key,
      {cos, sin, inverse_frequencies, positions, scale, rotary_dim, interleaved, heads_first, inverse});
}

rope::Scaling scaling_of(const std::string& word) {
  constexpr std::array<std::string_view, 6> kWords = {"none", "linear", "ntk", "dynamic", "yarn", "llama3"};
  for (size_t i = 0; i < kWords.size(); ++i) {
    if (word == kWords[i]) return static_cast<rope::Scaling>(i);
  }
  fail(ErrorCode::kInvalidArgument, "rope: scaling is \"", word,
       "\"; known are none, linear, ntk, dynamic, yarn and llama3");
}

// The frequencies, and behind them the scale of cos and sin.
void frequencies(Call&, const TensorView& output, double base, const std::string& scaling, double factor,
                 double original_positions, double sequence, double beta_fast, double beta_slow,
                 double attention_factor, double low_frequency_factor, double high_frequency_factor) {
  KP_CHECK(output.device.kind == DeviceKind::kCpu && output.dtype == DType::kFloat64 && output.rank == 1 &&
               is_contiguous(output),
           "rope: the table of frequencies is ", output, "; it must be fp64 on the CPU, contiguous");
  const rope::FrequencyTable table = rope::make_frequencies({.rotary_dim = 2 * (output.size(0) - 1),
                                                             .base = base,
                                                             .scaling = scaling_of(scaling),
                                                             .factor = factor,
                                                             .original_positions = original_positions,
                                                             .sequence = sequence,
                                                             .beta_fast = beta_fast,
                                                             .beta_slow = beta_slow,
                                                             .attention_factor = attention_factor,
                                                             .low_frequency_factor = low_frequency_factor,
                                                             .high_frequency_factor = high_frequency_factor});
  double* to = output.as<double>();
  for (double frequency : table.inverse_frequencies) *to++ = frequency;
  *to = table.scale;
}

using Ops = OpList<
    Op<"rope(Tensor query, Tensor? key, Tensor? cos, Tensor? sin, Tensor? inverse_frequencies, Tensor? positions, "
       "float scale, int rotary_dim, bool interleaved, bool heads_first) -> (Tensor turned_query, Tensor turned_key)",
       forward>,
    Op<"rope_forward(Tensor query, Tensor? key, Tensor? cos, Tensor? sin, Tensor? inverse_frequencies, "
       "Tensor? positions, float scale, int rotary_dim, bool interleaved, bool heads_first) "
       "-> (Tensor turned_query, Tensor turned_key)",
       forward>,
    Op<"rope_backward(Tensor grad_query, Tensor? grad_key, Tensor? cos, Tensor? sin, Tensor? inverse_frequencies, "
       "Tensor? positions, float scale, int rotary_dim, bool interleaved, bool heads_first) "
       "-> (Tensor turned_query, Tensor turned_key)",
       backward>,
    Op<"rope_in_place(Tensor(a!) query, Tensor(b!)? key, Tensor? cos, Tensor? sin, Tensor? inverse_frequencies, "
       "Tensor? positions, float scale, int rotary_dim, bool interleaved, bool heads_first, bool inverse) -> ()",
       in_place>,
    Op<"rope_frequencies(Tensor(a!) output, float base, str scaling, float factor, float original_positions, "
       "float sequence, float beta_fast, float beta_slow, float attention_factor, float low_frequency_factor, "
       "float high_frequency_factor) -> ()",
       frequencies>>;

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
