// Inverse frequencies under the scalings that models use, by their published formulas.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/rope/rope.h"

namespace kernel_pytorch::rope {
namespace {

void check(const Frequencies& wanted) {
  KP_CHECK(wanted.rotary_dim > 0 && wanted.rotary_dim % 2 == 0, "rope: rotary_dim is ", wanted.rotary_dim,
           "; it must be even and positive");
  KP_CHECK(wanted.base > 1, "rope: base is ", wanted.base, "; it must be more than 1");
  KP_CHECK(wanted.factor >= 1, "rope: factor is ", wanted.factor, "; it must be at least 1");
  const bool needs_original = wanted.scaling >= Scaling::kDynamic;
  KP_CHECK(!needs_original || wanted.original_positions > 0, "rope: original_positions is ", wanted.original_positions,
           "; this scaling needs the length of the context that the model was trained on");
}

double scaled_base(const Frequencies& wanted, double factor) {
  const auto dim = static_cast<double>(wanted.rotary_dim);
  KP_CHECK(dim > 2, "rope: rotary_dim is 2; NTK scaling needs at least two frequencies");
  return wanted.base * std::pow(factor, dim / (dim - 2));
}

double base_of(const Frequencies& wanted) {
  if (wanted.scaling == Scaling::kNtk) return scaled_base(wanted, wanted.factor);
  if (wanted.scaling != Scaling::kDynamic) return wanted.base;
  const double stretch = std::max(wanted.sequence, wanted.original_positions) / wanted.original_positions;
  return scaled_base(wanted, wanted.factor * stretch - (wanted.factor - 1));
}

// The index of the frequency that turns so often over the trained context.
double index_of_rotations(const Frequencies& wanted, double turns) {
  return static_cast<double>(wanted.rotary_dim) * std::log(wanted.original_positions / (turns * 2 * M_PI)) /
         (2 * std::log(wanted.base));
}

void apply_yarn(const Frequencies& wanted, FrequencyTable& table) {
  const auto dim = static_cast<double>(wanted.rotary_dim);
  const double low = std::max(std::floor(index_of_rotations(wanted, wanted.beta_fast)), 0.0);
  double high = std::min(std::ceil(index_of_rotations(wanted, wanted.beta_slow)), dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < table.inverse_frequencies.size(); ++i) {
    const double divided = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    table.inverse_frequencies[i] *= divided / wanted.factor + (1 - divided);
  }
  const double usual = wanted.factor <= 1 ? 1 : 0.1 * std::log(wanted.factor) + 1;
  table.scale = wanted.attention_factor > 0 ? wanted.attention_factor : usual;
}

void apply_llama3(const Frequencies& wanted, FrequencyTable& table) {
  const double low = wanted.low_frequency_factor, high = wanted.high_frequency_factor;
  KP_CHECK(high > low, "rope: high_frequency_factor is ", high, ", low_frequency_factor is ", low,
           "; the first must be more");
  for (double& frequency : table.inverse_frequencies) {
    const double turns = wanted.original_positions * frequency / (2 * M_PI);  // over the trained context
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    frequency *= (1 - kept) / wanted.factor + kept;
  }
}

}  // namespace

FrequencyTable make_frequencies(const Frequencies& wanted) {
  check(wanted);
  FrequencyTable table;
  const double base = base_of(wanted);
  for (int64_t i = 0; i < wanted.rotary_dim; i += 2) {
    table.inverse_frequencies.push_back(
        std::pow(base, -static_cast<double>(i) / static_cast<double>(wanted.rotary_dim)));
  }
  if (wanted.scaling == Scaling::kLinear) {
    for (double& frequency : table.inverse_frequencies) frequency /= wanted.factor;
  }
  if (wanted.scaling == Scaling::kYarn) apply_yarn(wanted, table);
  if (wanted.scaling == Scaling::kLlama3) apply_llama3(wanted, table);
  return table;
}

void fill_frequencies(const FillFrequencies& arguments, Context&) {
  const TensorView& output = arguments.output;
  KP_CHECK(output.device.kind == DeviceKind::kCpu && output.dtype == DType::kFloat64 && output.rank == 1 &&
               output.size(0) >= 1 && is_contiguous(output),
           "rope: the table of frequencies is ", output, "; it must be fp64 on the CPU, contiguous");
  Frequencies wanted = arguments.frequencies;
  wanted.rotary_dim = 2 * (output.size(0) - 1);
  const FrequencyTable table = make_frequencies(wanted);
  double* to = output.as<double>();
  for (double frequency : table.inverse_frequencies) *to++ = frequency;
  *to = table.scale;
}

}  // namespace kernel_pytorch::rope
