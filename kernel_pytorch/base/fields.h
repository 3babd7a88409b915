// The members of an op's argument struct as a list of plain values, declared once beside the struct:
//
//   inline constexpr auto kForwardFields = fields<Forward>(
//       input<&Forward::x>({.shape = "... columns", .leads = true}),
//       optional_input<&Forward::weight>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
//       option<&Forward::eps>(),
//       output<&Forward::output>({.shape = "... columns", .dtype = "x"}));
//
// The builders are templates, so a misspelt member does not compile and its name and C++ type are not repeated. What
// reads the list (torch's and JAX's adapters, trials, the tuning key, documents) is ordinary code over
// std::span<const Field>. Every member of the struct has a line: a new one cannot be forgotten.
//
// Shapes are named dimensions: the same name is the same size, "..." is any number of leading dimensions, a number is
// itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernel_pytorch/base/hash.h"
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
  kUpdated,  // read and written in place
  kOption,
  kOutput,
  kSaved,   // an output that the backward needs and the user does not see
  kUnused,  // a member of a shared struct that this op does not have
};

// What a front end provides; a tensor of other strides is copied.
enum class MemoryLayout : uint8_t {
  kStrided,     // any strides
  kDenseLast,   // the last stride is 1
  kContiguous,  // row-major
  kFlat,        // row-major, as one dimension
};

// What of an option is part of the tuning key. Of tensors the key always has the element type, or that one is absent;
// of the one that leads also the sizes.
enum class KeyPart : uint8_t {
  kNone,
  kPresence,  // whether a number is not 0
  kValue,
};

// A line of the list says only what is special about its member.
struct Rules {
  std::string_view shape{};
  bool leads = false;        // a request's shape and type are this tensor's; "..." is bucketed in the tuning key
  std::string_view dtype{};  // a field whose type it has; "statistic FIELD": fp32, fp64 for fp64; or a type's name
  std::string_view dtype_option{};  // the argument that chooses this output's type instead
  std::string_view when{};          // an output that exists where this optional input does
  std::string_view wanted{};        // the flag that asks for this output
  MemoryLayout memory = MemoryLayout::kStrided;
  KeyPart key = KeyPart::kNone;    // of an option
  bool usual = false;              // an optional input that a trial has unless its request says otherwise
  bool hidden = false;             // for C++ callers and trials only
  bool symbolic = false;           // an integer that follows from sizes: compilers may not know it
  bool required = false;           // an optional number that front ends always give: only C++ has the default
  std::string_view choices{};      // names of an enum's values, in order, separated by spaces
  std::string_view from{};         // in a backward: the forward's argument or output that it is, if not of its name;
                                   // "sum or x": the first that the forward has
  std::string_view trial{};        // what a request calls it, where that is not its name
  std::string_view trial_dtype{};  // what a request calls its type, where that is not NAME_dtype
};

inline constexpr int kMaxDimensionNames = 12;
inline constexpr int16_t kLeadingDimensions = -1;  // "..."
constexpr int16_t literal_dimension(int64_t size) {
  return static_cast<int16_t>(-2 - size);
}

enum class TypeRule : uint8_t { kAny, kOfField, kStatistic, kFixed };

struct Field {
  std::string_view name{};
  uint64_t name_hash = 0;
  FieldKind kind{};
  FieldRole role{};
  Rules rules{};
  void* (*member)(void* arguments) = nullptr;

  // Found while compiling from `rules` and the rest of the list.
  std::array<int16_t, kMaxRank> dimensions{};  // a name's number, kLeadingDimensions or literal_dimension
  int8_t rank = -1;                            // -1: no shape is declared
  TypeRule type_rule = TypeRule::kAny;
  int8_t type_of = -1;  // the field of kOfField and kStatistic
  DType type{};         // of kFixed
  int8_t when = -1;     // the field that Rules::when names

  constexpr bool is_tensor() const { return kind == FieldKind::kTensor; }
  constexpr bool is_input() const {
    return role == FieldRole::kInput || role == FieldRole::kOptionalInput || role == FieldRole::kUpdated;
  }
  constexpr bool is_output() const { return role == FieldRole::kOutput || role == FieldRole::kSaved; }
  constexpr bool has_leading_dimensions() const { return rank > 0 && dimensions[0] == kLeadingDimensions; }

  TensorView& tensor(void* arguments) const { return *static_cast<TensorView*>(member(arguments)); }
  const TensorView& tensor(const void* arguments) const { return tensor(const_cast<void*>(arguments)); }
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
  std::span<const std::string_view> dimension_names{};

  const Field* find(std::string_view name) const {
    for (const Field& field : all) {
      if (field.name == name) return &field;
    }
    return nullptr;
  }
};

// The sizes that names of dimensions stand for in one call. The first tensor that has a name gives its size; checks of
// the op say what is wrong with the others.
class KP_EXPORT DimensionSizes {
 public:
  DimensionSizes();
  void bind(const Field& field, const TensorView& view);
  // A contiguous view of the sizes, without data and type; none where a name has no size yet.
  std::optional<TensorView> shape_of(const Field& field) const;

 private:
  static constexpr int64_t kUnknown = -1;
  std::array<int64_t, kMaxDimensionNames> sizes_;
  std::array<int64_t, kMaxRank> leading_{};
  int8_t leading_count_ = 0;
  bool has_leading_ = false;
};

// fp32, or fp64 for fp64: the type of what is summed over elements of this type.
constexpr DType statistic_type(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// What Rules::dtype says of a tensor; none where it says nothing, or where the tensor that it names is absent.
KP_EXPORT std::optional<DType> declared_type(const Fields& fields, const Field& field, const void* arguments);

namespace fields_detail {

template <class T>
struct KindOf {
  static_assert(std::is_enum_v<T> && sizeof(T) == 1,
                "a member of an argument struct is a TensorView, a std::vector of them, double, int64_t, bool, "
                "std::string, an enum of one byte, or a std::optional of double or int64_t");
  static constexpr FieldKind value = FieldKind::kChoice;
};
template <FieldKind kKind>
struct Kind {
  static constexpr FieldKind value = kKind;
};
template <>
struct KindOf<TensorView> : Kind<FieldKind::kTensor> {};
template <>
struct KindOf<std::vector<TensorView>> : Kind<FieldKind::kTensorList> {};
template <>
struct KindOf<double> : Kind<FieldKind::kNumber> {};
template <>
struct KindOf<int64_t> : Kind<FieldKind::kInteger> {};
template <>
struct KindOf<bool> : Kind<FieldKind::kFlag> {};
template <>
struct KindOf<std::string> : Kind<FieldKind::kText> {};
template <>
struct KindOf<std::optional<double>> : Kind<FieldKind::kOptionalNumber> {};
template <>
struct KindOf<std::optional<int64_t>> : Kind<FieldKind::kOptionalInteger> {};

template <class T>
struct MemberPointer;
template <class Struct, class Member>
struct MemberPointer<Member Struct::*> {
  using Owner = Struct;
  using Type = Member;
};

// The compiler's own text of this function ends in "kMember = &ns::Forward::x]" or ";": the name is the last word.
template <auto kMember>
consteval std::string_view member_name() {
  constexpr std::string_view kText = __PRETTY_FUNCTION__;
  constexpr size_t kEnd = kText.find_first_of(";])", kText.find("kMember = "));
  constexpr size_t kName = kText.rfind("::", kEnd) + 2;
  return kText.substr(kName, kEnd - kName);
}
struct Probe {
  int member;
};
static_assert(member_name<&Probe::member>() == "member", "this compiler writes pointers to members in another way");

// How many members an aggregate has: as many as it can be initialised with.
struct AnyValue {
  // A std::optional is made of its value: both ways would be ambiguous.
  template <class T>
  requires(!std::is_same_v<T, std::optional<double>> && !std::is_same_v<T, std::optional<int64_t>>) operator T() const;
};
template <class T, class... Values>
consteval size_t member_count() {
  if constexpr (requires { T{Values{}..., AnyValue{}}; }) {
    return member_count<T, Values..., AnyValue>();
  } else {
    return sizeof...(Values);
  }
}

// Not constexpr: reaching one while compiling is the error, and its name is the message.
inline void only_tensors_have_shapes_and_types() {}
inline void only_an_output_may_be_wanted_or_depend_on_an_input() {}
inline void an_enum_needs_the_names_of_its_choices() {}
inline void a_rule_names_a_field_that_is_not_in_the_list() {}
inline void a_dimension_of_an_output_stands_in_no_input() {}
inline void an_output_needs_a_shape_and_a_dtype() {}
inline void leading_dimensions_come_first() {}
inline void too_many_dimensions_or_names() {}

// The next word of a text separated by spaces, taken off its front.
constexpr std::string_view take_word(std::string_view& text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  const std::string_view word = text.substr(0, text.find(' '));
  text.remove_prefix(word.size());
  return word;
}

template <class Struct>
struct FieldOf : Field {};  // keeps members of another struct out of a list

template <FieldRole kRole, auto kMember>
consteval auto make_field(const Rules& rules) {
  using Owner = typename MemberPointer<decltype(kMember)>::Owner;
  FieldOf<Owner> field{};
  field.name = member_name<kMember>();
  field.name_hash = hash_text(field.name);
  field.kind = KindOf<typename MemberPointer<decltype(kMember)>::Type>::value;
  field.role = kRole;
  field.rules = rules;
  field.member = [](void* arguments) -> void* { return &(static_cast<Owner*>(arguments)->*kMember); };
  const bool is_tensor = field.kind == FieldKind::kTensor || field.kind == FieldKind::kTensorList;
  if (!is_tensor && (!rules.shape.empty() || !rules.dtype.empty() || !rules.dtype_option.empty())) {
    only_tensors_have_shapes_and_types();
  }
  if (!field.is_output() && (!rules.when.empty() || !rules.wanted.empty())) {
    only_an_output_may_be_wanted_or_depend_on_an_input();
  }
  if (field.is_output() && (rules.shape.empty() || rules.dtype.empty())) an_output_needs_a_shape_and_a_dtype();
  if (field.kind == FieldKind::kChoice && kRole != FieldRole::kUnused && rules.choices.empty()) {
    an_enum_needs_the_names_of_its_choices();
  }
  return field;
}

constexpr std::optional<DType> dtype_named(std::string_view name) {
  if (name == "fp32") return DType::kFloat32;
  if (name == "int32") return DType::kInt32;
  if (name == "int64") return DType::kInt64;
  if (name == "bool") return DType::kBool;
  return std::nullopt;
}

}  // namespace fields_detail

template <size_t kCount>
struct FieldList {
  std::array<Field, kCount> fields{};
  std::array<std::string_view, kMaxDimensionNames> names{};
  size_t name_count = 0;

  constexpr operator Fields() const { return {fields, {names.data(), name_count}}; }

  consteval int8_t index_of(std::string_view name) const {
    for (size_t i = 0; i < kCount; ++i) {
      if (fields[i].name == name) return static_cast<int8_t>(i);
    }
    fields_detail::a_rule_names_a_field_that_is_not_in_the_list();
    return -1;
  }
  consteval int16_t dimension_of(std::string_view word, bool may_be_new) {
    if (word[0] >= '0' && word[0] <= '9') {
      int64_t size = 0;
      for (char digit : word) size = size * 10 + (digit - '0');
      return literal_dimension(size);
    }
    for (size_t i = 0; i < name_count; ++i) {
      if (names[i] == word) return static_cast<int16_t>(i);
    }
    if (!may_be_new) fields_detail::a_dimension_of_an_output_stands_in_no_input();
    if (name_count == kMaxDimensionNames) fields_detail::too_many_dimensions_or_names();
    names[name_count] = word;
    return static_cast<int16_t>(name_count++);
  }
  consteval void resolve_shape(Field& field) {
    if (field.rules.shape.empty()) return;
    field.rank = 0;
    std::string_view text = field.rules.shape;
    for (auto word = fields_detail::take_word(text); !word.empty(); word = fields_detail::take_word(text)) {
      if (field.rank == kMaxRank) fields_detail::too_many_dimensions_or_names();
      if (word == "..." && field.rank != 0) fields_detail::leading_dimensions_come_first();
      field.dimensions[static_cast<size_t>(field.rank++)] =
          word == "..." ? kLeadingDimensions : dimension_of(word, !field.is_output());
    }
  }
  consteval void resolve_type(Field& field) {
    std::string_view text = field.rules.dtype;
    if (text.empty()) return;
    if (const auto fixed = fields_detail::dtype_named(text)) {
      field.type_rule = TypeRule::kFixed;
      field.type = *fixed;
      return;
    }
    constexpr std::string_view kStatisticWord = "statistic ";
    const bool is_statistic = text.starts_with(kStatisticWord);
    if (is_statistic) text.remove_prefix(kStatisticWord.size());
    field.type_rule = is_statistic ? TypeRule::kStatistic : TypeRule::kOfField;
    field.type_of = index_of(text);
  }
};

template <class Struct, class... Lines>
consteval auto fields(const Lines&... lines) {
  static_assert((std::is_same_v<Lines, fields_detail::FieldOf<Struct>> && ...),
                "a line of the list is a member of another struct");
  static_assert(fields_detail::member_count<Struct>() == sizeof...(Lines),
                "the list and the struct differ in their number of members");
  FieldList<sizeof...(Lines)> list{.fields = {static_cast<const Field&>(lines)...}};
  for (Field& field : list.fields) {
    if (!field.is_output()) list.resolve_shape(field);
  }
  for (Field& field : list.fields) {
    if (field.is_output()) list.resolve_shape(field);
    list.resolve_type(field);
    if (!field.rules.when.empty()) field.when = list.index_of(field.rules.when);
  }
  return list;
}

template <auto kMember>
consteval auto input(const Rules& rules = {}) {
  return fields_detail::make_field<FieldRole::kInput, kMember>(rules);
}
template <auto kMember>
consteval auto optional_input(const Rules& rules = {}) {
  return fields_detail::make_field<FieldRole::kOptionalInput, kMember>(rules);
}
template <auto kMember>
consteval auto updated(const Rules& rules = {}) {
  return fields_detail::make_field<FieldRole::kUpdated, kMember>(rules);
}
template <auto kMember>
consteval auto option(const Rules& rules = {}) {
  return fields_detail::make_field<FieldRole::kOption, kMember>(rules);
}
template <auto kMember>
consteval auto output(const Rules& rules) {
  return fields_detail::make_field<FieldRole::kOutput, kMember>(rules);
}
template <auto kMember>
consteval auto saved(const Rules& rules) {
  return fields_detail::make_field<FieldRole::kSaved, kMember>(rules);
}
template <auto kMember>
consteval auto unused() {
  return fields_detail::make_field<FieldRole::kUnused, kMember>({});
}

}  // namespace kernel_pytorch
