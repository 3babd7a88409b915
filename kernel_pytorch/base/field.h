// A member of an op's argument struct as a plain value: its name, kind, role, and the rules for its sizes and type.
// base/fields.h makes lists of them; readers (torch's and JAX's adapters, trials, the tuning key, documents) are
// ordinary code over a `Fields`.
//
// Shapes are named dimensions: the same name is the same size, "..." is any number of dimensions, a number is itself.
// A name that an integer option has is that option's value. "a/b", "a-b" and "a*b" compute a size, "ceil(a/b)" rounds
// up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

enum class FieldKind : uint8_t {
  kTensor,
  kTensorList,
  kNumber,   // double
  kInteger,  // int64_t
  kFlag,     // bool
  kText,     // std::string
  kChoice,   // an enum of one byte; Rules::choices names its values
  kOptionalNumber,
  kOptionalInteger,
};

enum class FieldRole : uint8_t {
  kInput,
  kOptionalInput,
  kUpdated,          // read and written in place
  kOptionalUpdated,  // the same of a tensor that may be absent
  kOption,
  kOutput,
  kSaved,   // an output that the backward needs; NAME returns it only where a `wanted` flag can ask for it
  kUnused,  // a member of a shared struct that this op does not have
};

// What a front end provides; a tensor of other strides is copied. The rank stays, except with kFlat.
enum class MemoryLayout : uint8_t {
  kStrided,     // any strides
  kDenseLast,   // the last stride is 1
  kContiguous,  // row-major
  kFlat,        // row-major, as one dimension
  kMatrix,      // one of the last two strides is 1, and the dimensions in front of them merge into one
  kRows,        // the last stride is 1, and the dimensions in front of it merge into one
};

// What of a field is part of the tuning key. Of tensors the key always has the element type, or that one is absent; of
// the one that leads also the sizes.
enum class KeyPart : uint8_t {
  kNone,
  kPresence,  // whether a number is not 0
  kValue,
  kSizes,  // of a tensor: the dimensions that the leading one does not have
};

// A line of the list says only what is special about its member.
struct Rules {
  std::string_view name{};   // what callers and requests call it, where that is not the member's name
  std::string_view shape{};  // alternatives are separated by "|"; "like FIELD": an output of an input's sizes; "row
                             // LIST BITS": one row of the elements of a list's tensors, those whose bits an integer has
  // What picks one of the alternatives: a choice by its value (the last one also for larger values), or up to two
  // flags, integers and optional tensors, the first of them that is set, not 0 or present by its place, the last one
  // where none is.
  std::string_view shape_by{};
  std::string_view order_of{};  // an output of four dimensions and up, but not of the last of several alternatives,
                                // whose dimensions 1 and 2 lie in memory as this input's do, so that transposing it
                                // back copies nothing; a matrix that is column-major where this input is
  bool leads = false;           // a request's shape and type are this tensor's; "..." is bucketed in the tuning key
  std::string_view bucketed{};  // its dimensions that are bucketed too
  std::string_view dtype{};     // a field whose type it has; "statistic FIELD": fp32, fp64 for fp64; or a type's name.
                                // "statistic FIELD if FLAG": the field's own type where the flag is not set; "named
                                // CHOICE": the type that this choice names; "computed": that of compute_dtype
  DType (*compute_dtype)(const void* arguments) = nullptr;
  std::string_view dtype_option{};  // the argument that chooses this output's type instead
  std::string_view when{};          // an output that exists where this optional input does
  std::string_view wanted{};        // the flags that together ask for this output: options of the list or arguments
                                    // of their own
  std::string_view in_place{};      // the input whose memory this output takes in an in-place variant
  bool optional = false;            // an output that callers may leave out where a variant takes it from them
  MemoryLayout memory = MemoryLayout::kStrided;
  KeyPart key = KeyPart::kNone;
  bool usual = false;              // an optional input that a trial has unless its request says otherwise
  bool hidden = false;             // for C++ callers and trials only, unless a variant shows it
  bool symbolic = false;           // an integer that follows from sizes: compilers may not know it
  bool required = false;           // an optional number that front ends always give: only C++ has the default
  std::string_view choices{};      // names of an enum's values, in order, separated by spaces
  std::string_view from{};         // in a backward: the forward's argument or output that it is, if not of its name;
                                   // "sum or x": the first that the forward has
  std::string_view trial{};        // what a request calls it, where that is not its name; an output that has it is
                                   // made only where the request says so, a saved one unless it says otherwise
  std::string_view trial_dtype{};  // what a request calls its type, where that is not NAME_dtype
  // What a trial puts into it, where that is not normal numbers: "positive", "seeds"; "places": of 2:4 metadata;
  // "indices LIMIT", "offsets LIMIT":
  // below LIMIT, ascending to it. A LIMIT is a number, an option, or TENSOR.DIMENSION; of several the first that is
  // there.
  std::string_view content{};
};

inline constexpr int kMaxDimensionNames = 16;
inline constexpr int kMaxShapes = 5;
inline constexpr int16_t kAnyDimensions = -1;  // "..."
constexpr int16_t literal_dimension(int64_t size) {
  return static_cast<int16_t>(-2 - size);
}

struct Shape {
  std::array<int16_t, kMaxRank> dimensions{};  // a dimension's number, kAnyDimensions or literal_dimension
  int8_t rank = 0;
  int8_t any_at = -1;  // the place of "...", or -1

  constexpr int named() const { return rank - (any_at >= 0); }
};

// What a name in a shape stands for: the size of the first tensor that has it, the value of an option, or computed.
struct Dimension {
  std::string_view name{};
  uint64_t name_hash = 0;
  int8_t option = -1;
  char operation = 0;  // of left and right: '/', '-', '*' or '^' for ceil(a/b)
  int16_t left = 0, right = 0;
};

enum class TypeRule : uint8_t { kAny, kOfField, kStatistic, kFixed, kNamed, kComputed };

struct Field {
  std::string_view name{};
  uint64_t name_hash = 0;
  FieldKind kind{};
  FieldRole role{};
  Rules rules{};
  void* (*member)(void* arguments) = nullptr;

  // Found while compiling from `rules` and the rest of the list; fields by their places.
  std::array<Shape, kMaxShapes> shapes{};
  int8_t shape_count = 0;  // 0: no shape is declared
  std::array<int8_t, 2> shape_by{-1, -1};
  int8_t like = -1;
  int8_t row_list = -1, row_bits = -1;
  int8_t order_of = -1;
  TypeRule type_rule = TypeRule::kAny;
  int8_t type_of = -1;  // the field of kOfField, kStatistic and kNamed
  DType type{};         // of kFixed
  int8_t type_if = -1;  // of kStatistic: the flag that makes it one
  int8_t when = -1;
  int8_t in_place = -1;

  // Not a member that the op does not have: that may be of any type.
  constexpr bool is_tensor() const { return kind == FieldKind::kTensor && role != FieldRole::kUnused; }
  constexpr bool is_updated() const { return role == FieldRole::kUpdated || role == FieldRole::kOptionalUpdated; }
  constexpr bool is_optional() const {
    return role == FieldRole::kOptionalInput || role == FieldRole::kOptionalUpdated;
  }
  constexpr bool is_input() const { return role == FieldRole::kInput || is_optional() || is_updated(); }
  constexpr bool is_output() const { return role == FieldRole::kOutput || role == FieldRole::kSaved; }
  constexpr bool follows_order(const Shape& shape) const {
    return order_of >= 0 && (shape_count == 1 || &shape != &shapes[static_cast<size_t>(shape_count - 1)]);
  }
  constexpr bool has_leading_dimensions() const { return shape_count > 0 && shapes[0].any_at == 0; }

  TensorView& tensor(void* arguments) const { return *static_cast<TensorView*>(member(arguments)); }
  const TensorView& tensor(const void* arguments) const { return tensor(const_cast<void*>(arguments)); }
  std::vector<TensorView>& tensors(void* arguments) const {
    return *static_cast<std::vector<TensorView>*>(member(arguments));
  }
  template <class T>
  T& value(void* arguments) const {
    return *static_cast<T*>(member(arguments));
  }
  template <class T>
  const T& value(const void* arguments) const {
    return value<T>(const_cast<void*>(arguments));
  }
};

// A list as its readers see it.
struct Fields {
  std::span<const Field> all{};
  std::span<const Dimension> dimensions{};

  const Field& operator[](int index) const { return all[static_cast<size_t>(index)]; }
  const Field* find(std::string_view name) const {
    for (const Field& field : all) {
      if (field.name == name) return &field;
    }
    return nullptr;
  }
};

// The next word of a text separated by spaces, taken off its front.
constexpr std::string_view take_token(std::string_view& text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(word.size());
  return word;
}
constexpr bool has_word(std::string_view text, std::string_view wanted) {
  for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
    if (word == wanted) return true;
  }
  return false;
}

// The sizes that names of dimensions stand for in one call. The first tensor that has a name gives its size; checks of
// the op say what is wrong with the others.
class KP_EXPORT DimensionSizes {
 public:
  explicit DimensionSizes(const Fields& fields);
  // Takes the values of options and the sizes of the tensors that `arguments` has.
  void bind_options(const void* arguments);
  void bind(const Field& field, const TensorView& view, const void* arguments);
  void bind(const Shape& shape, const TensorView& view);
  // A view of an output's sizes and strides, without data and type; none where a name has no size.
  std::optional<TensorView> shape_of(const Field& field, const void* arguments) const;
  // The same of a shape alone, contiguous.
  std::optional<TensorView> shape_of(const Shape& shape) const;
  // Gives a size to a name that has none.
  void set(int dimension, int64_t size);
  std::optional<int64_t> size_of(int dimension) const;

 private:
  int64_t computed(int16_t dimension) const;

  static constexpr int64_t kUnknown = -1;
  Fields fields_;
  std::array<int64_t, kMaxDimensionNames> sizes_;
  std::array<int64_t, kMaxRank> any_{};
  int8_t any_count_ = 0;
  bool has_any_ = false;
};

// The alternative of a field's shape that holds for these arguments; null where no shape is declared.
KP_EXPORT const Shape* picked_shape(const Fields& fields, const Field& field, const void* arguments);

// fp32, or fp64 for fp64: the type of what is summed over elements of this type.
constexpr DType statistic_type(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// What Rules::dtype says of a tensor; none where it says nothing, or where the tensor that it names is absent.
KP_EXPORT std::optional<DType> declared_type(const Fields& fields, const Field& field, const void* arguments);

}  // namespace kernel_pytorch
