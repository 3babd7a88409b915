// An op as front ends see it: its name, the fields of its arguments, and one function to call. A front end (torch, JAX,
// the C interface) is an ArgumentSource; all of them end in the op's own entry point, so all pass the same checks.
#pragma once

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

// The tensor whose sizes and type a request names, and whose type an output has that nobody asked for.
KP_EXPORT const Field& leading_input(const Fields& fields);

struct Declaration {
  std::string_view name;
  Fields fields;
  void (*call)(ArgumentSource& source) = nullptr;
  // A variant fixes whether one optional input is there: a Tensor? becomes a Tensor, or is no argument at all, and
  // outputs that depend on it follow. Several torch ops come from one struct that way, without empty outputs.
  int8_t fixed = -1;
  bool is_given = false;
  bool returns_saved = false;  // the outputs that a backward needs, too
};

template <class Arguments, void (*kFunction)(const Arguments&, Context&)>
void call_with(ArgumentSource& source) {
  Arguments arguments{};
  source.fill(&arguments);
  kFunction(arguments, source.context());
}

// What a caller passes, in order: fields, then the flags that ask for outputs, then the options that choose outputs'
// types. Outputs are returned in the order of the list.
enum class ArgumentKind : uint8_t { kField, kWanted, kType };
struct Argument {
  ArgumentKind kind = ArgumentKind::kField;
  int8_t field = 0;          // of kWanted and kType: the output that it belongs to
  bool is_optional = false;  // a tensor that may be absent
};
struct KP_EXPORT Signature {
  std::vector<Argument> arguments;
  std::vector<int8_t> outputs;  // fields

  std::string_view name_of(const Fields& fields, const Argument& argument) const;
};
KP_EXPORT Signature signature_of(const Declaration& declaration);

// "rms_norm(Tensor x, Tensor? weight, float eps, ScalarType? output_dtype=None) -> Tensor"
KP_EXPORT std::string schema_of(const Declaration& declaration);

}  // namespace kernel_pytorch::registry
