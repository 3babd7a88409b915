// An op as front ends see it: its name, the fields of its arguments, and one function to call. A front end (torch, JAX,
// the C interface) is an ArgumentSource; all of them end in the op's own entry point, so all pass the same checks.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::registry {

class ArgumentSource {
 public:
  virtual void fill(void* arguments) = 0;  // into the argument struct of the declaration, outputs included
  virtual Context& context() = 0;

 protected:
  ~ArgumentSource() = default;
};

// The tensor whose sizes and type a request names, and whose type an output has if it was not requested.
KP_EXPORT const Field& leading_input(const Fields& fields);

// Several ops of a front end come from one list. Each text is a list of fields' names.
struct Variant {
  std::string_view never{};    // optional inputs that it does not have, and so without the outputs that depend on them
  std::string_view always{};   // optional inputs that are not optional here
  std::string_view without{};  // options that it does not have: they keep the struct's defaults; and outputs
  std::string_view shown{};    // hidden fields that it has
  std::string_view updated{};  // outputs that its caller gives, to be written in place
  std::string_view renamed{};  // "x=grad_output": what it calls a field
  bool in_place = false;       // outputs with Rules::in_place take their inputs' memory
  // Of an fp64 call on a GPU: whether a kernel there takes it, else it is the host's. Null: what the op's name says.
  bool (*double_on_gpu)(const void* arguments, const DeviceInfo& device) = nullptr;
};

struct Declaration {
  std::string_view name;
  Fields fields;
  void (*call)(ArgumentSource& source) = nullptr;
  const void* (*defaults)() = nullptr;  // the argument struct as it is where a caller gives nothing
  Variant variant{};
  bool returns_saved = false;  // the outputs that a backward needs, too
};

template <class Arguments, void (*kFunction)(const Arguments&, Context&)>
void call_with(ArgumentSource& source) {
  Arguments arguments{};
  source.fill(&arguments);
  kFunction(arguments, source.context());
}

template <class Arguments>
const void* defaults_of() {
  static const Arguments kDefaults{};
  return &kDefaults;
}

// NAME returns the results, NAME_forward also what its backward needs.
template <class Arguments, void (*kFunction)(const Arguments&, Context&), size_t kCount>
constexpr std::array<Declaration, 2> differentiable(std::string_view name, std::string_view forward_name,
                                                    const FieldList<kCount>& fields, const Variant& variant = {}) {
  const auto call = call_with<Arguments, kFunction>;
  return {
      Declaration{.name = name, .fields = fields, .call = call, .defaults = defaults_of<Arguments>, .variant = variant},
      Declaration{.name = forward_name,
                  .fields = fields,
                  .call = call,
                  .defaults = defaults_of<Arguments>,
                  .variant = variant,
                  .returns_saved = true}};
}

// An op without a graph of its own: a backward, one that writes in place, one that has no gradient.
template <class Arguments, void (*kFunction)(const Arguments&, Context&), size_t kCount>
constexpr std::array<Declaration, 1> plain(std::string_view name, const FieldList<kCount>& fields,
                                           const Variant& variant = {}) {
  return {Declaration{.name = name,
                      .fields = fields,
                      .call = call_with<Arguments, kFunction>,
                      .defaults = defaults_of<Arguments>,
                      .variant = variant}};
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

// What a caller passes, in order: fields, then the flags that ask for outputs, then the options that choose outputs'
// types. Outputs are returned in the order of the list.
enum class ArgumentKind : uint8_t { kField, kWanted, kType };
struct Argument {
  ArgumentKind kind = ArgumentKind::kField;
  std::string_view name;
  int8_t field = 0;          // of kWanted and kType: an output that it belongs to
  bool is_optional = false;  // a tensor that may be absent
  bool is_updated = false;
};
struct Output {
  std::string_view name;
  int8_t field = 0;
  bool is_always_made = false;  // whatever its `wanted` flag says
};
struct KP_EXPORT Signature {
  std::vector<Argument> arguments;
  std::vector<Output> outputs;
  std::vector<int8_t> in_place;  // outputs that take the memory of their Rules::in_place

  int find(std::string_view name) const;  // the argument's place, or -1
};
KP_EXPORT Signature signature_of(const Declaration& declaration);

// "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType? output_dtype=None) -> Tensor"
KP_EXPORT std::string schema_of(const Declaration& declaration);

}  // namespace kernel_pytorch::registry
