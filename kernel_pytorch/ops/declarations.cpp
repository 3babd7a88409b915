#include "kernel_pytorch/ops/declarations.h"

#include <array>

#include "kernel_pytorch/ops/layer_norm/layer_norm.h"
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

namespace kernel_pytorch {
namespace {

using registry::Declaration;

enum class Presence { kNever, kAlways };

// NAME returns the results, NAME_forward also what its backward needs. `fixed` names an optional input that the variant
// never or always has.
template <class Arguments, void (*kFunction)(const Arguments&, Context&), size_t kCount>
constexpr std::array<Declaration, 2> differentiable(std::string_view name, std::string_view forward_name,
                                                    const FieldList<kCount>& fields, std::string_view fixed = {},
                                                    Presence presence = Presence::kNever) {
  Declaration results{.name = name, .fields = fields, .call = registry::call_with<Arguments, kFunction>};
  for (size_t i = 0; i < kCount; ++i) {
    if (!fixed.empty() && fields.fields[i].name == fixed) results.fixed = static_cast<int8_t>(i);
  }
  results.is_given = presence == Presence::kAlways;
  Declaration forward = results;
  forward.name = forward_name;
  forward.returns_saved = true;
  return {results, forward};
}

template <class Arguments, void (*kFunction)(const Arguments&, Context&), size_t kCount>
constexpr std::array<Declaration, 1> plain(std::string_view name, const FieldList<kCount>& fields) {
  return {Declaration{.name = name, .fields = fields, .call = registry::call_with<Arguments, kFunction>}};
}

template <size_t... kCounts>
constexpr auto join(const std::array<Declaration, kCounts>&... lists) {
  std::array<Declaration, (kCounts + ...)> joined{};
  size_t next = 0;
  const auto append = [&](const auto& list) {
    for (const Declaration& one : list) joined[next++] = one;
  };
  (append(lists), ...);
  return joined;
}

}  // namespace

std::span<const Declaration, kDeclarationCount> declarations() {
  static constexpr auto kAll =
      join(differentiable<rms_norm::Forward, rms_norm::forward>("rms_norm", "rms_norm_forward",
                                                                rms_norm::kForwardFields, "residual", Presence::kNever),
           differentiable<rms_norm::Forward, rms_norm::forward>(
               "add_rms_norm", "add_rms_norm_forward", rms_norm::kForwardFields, "residual", Presence::kAlways),
           plain<rms_norm::Backward, rms_norm::backward>("rms_norm_backward", rms_norm::kBackwardFields),
           differentiable<layer_norm::Forward, layer_norm::forward>(
               "layer_norm", "layer_norm_forward", layer_norm::kForwardFields, "residual", Presence::kNever),
           differentiable<layer_norm::Forward, layer_norm::forward>(
               "add_layer_norm", "add_layer_norm_forward", layer_norm::kForwardFields, "residual", Presence::kAlways),
           plain<layer_norm::Backward, layer_norm::backward>("layer_norm_backward", layer_norm::kBackwardFields));
  static_assert(kAll.size() == kDeclarationCount, "kDeclarationCount of declarations.h differs from this list");
  return kAll;
}

}  // namespace kernel_pytorch
