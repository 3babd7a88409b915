// Rotary position embedding of queries and keys, both in one launch.
//
//   angle(t, i) = position(t) * inverse_frequency(i),  i < rotary_dim / 2
//   first'  = first * cos(angle) - second * sin(angle)
//   second' = second * cos(angle) + first * sin(angle)
//
// Half-rotated: the pair i is (x[i], x[i + rotary_dim / 2]) of a head; interleaved: (x[2 i], x[2 i + 1]). Columns from
// rotary_dim on are copied. `inverse` rotates by minus the angle, which is the exact gradient.
//
// Shapes: query and key [batch, sequence, heads, head_dim], with or without the batch, with any strides (a slice of a
// packed QKV needs no copy); they may differ in heads. The output has columns of stride 1; in place: the
// output's view is the input's. cos and sin: [rows, width] or [batch, sequence, width], width rotary_dim / 2, or
// rotary_dim with each value twice (as halves, or as neighbours where interleaved). Or they are computed from
// inverse_frequencies [rotary_dim / 2], fp32, and multiplied by `scale`. Positions: [batch, sequence] or [sequence],
// int32 or int64 with any strides; absent: the place in the sequence. A position outside a table [rows, width] is an
// error on the CPU and gives NaN on a GPU, which cannot raise one.
//
// Types: fp32, bf16, fp16 everywhere, fp64 on the CPU; cos and sin of that type or fp32. Arithmetic is fp32 (fp64 for
// fp64), rounded once. Empty tensors are legal.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::rope {

struct Arguments {
  TensorView query{};
  TensorView key{};  // optional
  TensorView cos{};  // cos and sin, or inverse_frequencies
  TensorView sin{};
  TensorView inverse_frequencies{};
  double scale = 1.0;      // of the computed cos and sin: YaRN's attention factor
  TensorView positions{};  // optional
  int64_t rotary_dim = 0;  // 0: from the table's width: all of head_dim, twice the width where that fits, or the width
  bool interleaved = false;
  bool heads_first = false;  // query, key and outputs are [batch, heads, sequence, head_dim]
  bool inverse = false;
  TensorView query_output{};  // the query's shape and type
  TensorView key_output{};
};
inline constexpr auto kFields = fields<Arguments>(
    input<&Arguments::query>({.leads = true}), optional_input<&Arguments::key>(), optional_input<&Arguments::cos>(),
    optional_input<&Arguments::sin>(),
    optional_input<&Arguments::inverse_frequencies>({.memory = MemoryLayout::kContiguous}),
    optional_input<&Arguments::positions>(), option<&Arguments::scale>(), option<&Arguments::rotary_dim>(),
    option<&Arguments::interleaved>(), option<&Arguments::heads_first>(), option<&Arguments::inverse>({.hidden = true}),
    output<&Arguments::query_output>(
        {.name = "rotated_query", .shape = "like query", .dtype = "query", .in_place = "query"}),
    output<&Arguments::key_output>({.name = "rotated_key", .shape = "like key", .dtype = "key", .in_place = "key"}));

// Throws Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void rotate(const Arguments& arguments, Context& context);
KP_EXPORT void rotate_back(const Arguments& arguments, Context& context);  // with `inverse`: the gradient

// How a model stretches its context beyond what it was trained on.
enum class Scaling : uint8_t {
  kNone,
  kLinear,   // all frequencies divided by factor
  kNtk,      // the base raised so that the lowest frequency is divided by factor
  kDynamic,  // the same, by how far `sequence` exceeds original_positions
  kYarn,     // low frequencies divided, high ones kept, a ramp between them; cos and sin scaled
  kLlama3,   // the same with another ramp, nothing scaled
};

struct Frequencies {
  int64_t rotary_dim = 0;
  double base = 10000;
  Scaling scaling = Scaling::kNone;
  double factor = 1;
  double original_positions = 0;  // the context trained on: all but kNone, kLinear and kNtk
  double sequence = 0;            // kDynamic
  double beta_fast = 32;          // kYarn: turns over the context that bound the ramp
  double beta_slow = 1;
  double attention_factor = 0;      // kYarn: 0 takes 0.1 ln(factor) + 1
  double low_frequency_factor = 1;  // kLlama3
  double high_frequency_factor = 4;
};

struct FrequencyTable {
  std::vector<double> inverse_frequencies;  // rotary_dim / 2
  double scale = 1;                         // that cos and sin are multiplied by
};

KP_EXPORT FrequencyTable make_frequencies(const Frequencies& wanted);

// The same into memory of the caller's.
struct FillFrequencies {
  TensorView output{};        // fp64 on the CPU, contiguous: rotary_dim / 2 inverse frequencies, then the scale
  Frequencies frequencies{};  // rotary_dim follows from the output
};
inline constexpr auto kFrequencies = field_group<Frequencies>(
    unused<&Frequencies::rotary_dim>(), option<&Frequencies::base>(),
    option<&Frequencies::scaling>({.choices = "none linear ntk dynamic yarn llama3"}), option<&Frequencies::factor>(),
    option<&Frequencies::original_positions>(), option<&Frequencies::sequence>(), option<&Frequencies::beta_fast>(),
    option<&Frequencies::beta_slow>(), option<&Frequencies::attention_factor>(),
    option<&Frequencies::low_frequency_factor>(), option<&Frequencies::high_frequency_factor>());
inline constexpr auto kFillFields =
    fields<FillFrequencies>(updated<&FillFrequencies::output>(), all_of<&FillFrequencies::frequencies, kFrequencies>());

KP_EXPORT void fill_frequencies(const FillFrequencies& arguments, Context& context);

}  // namespace kernel_pytorch::rope
