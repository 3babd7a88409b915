// The members of an op's argument struct as a list of plain values, declared once next to the struct:
//
//   inline constexpr auto kForwardFields = fields<Forward>(
//       input<&Forward::x>({.shape = "... columns", .leads = true}),
//       optional_input<&Forward::weight>({.shape = "columns", .memory = MemoryLayout::kContiguous}),
//       option<&Forward::eps>(),
//       output<&Forward::output>({.shape = "... columns", .dtype = "x"}));
//
// The builders are templates, so a misspelt member does not compile and its name and C++ type are not repeated. Every
// member of the struct has a line: a new one cannot be forgotten. The order of lines is that of arguments and outputs.
// base/field.h says what rules there are.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/field.h"
#include "kernel_pytorch/base/hash.h"

namespace kernel_pytorch {

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
inline void a_dimension_of_an_output_is_in_no_input() {}
inline void an_output_needs_a_shape_and_a_dtype() {}
inline void a_shape_has_several_times_any_dimensions() {}
inline void too_many_dimensions_or_names_or_alternatives() {}
inline void alternatives_need_shape_by_and_shape_by_alternatives() {}

template <class Struct>
struct FieldOf : Field {};  // keeps members of another struct out of a list

template <FieldRole kRole, auto kMember>
consteval auto make_field(const Rules& rules) {
  using Owner = typename MemberPointer<decltype(kMember)>::Owner;
  FieldOf<Owner> field{};
  field.name = rules.name.empty() ? member_name<kMember>() : rules.name;
  field.name_hash = hash_text(field.name);
  if constexpr (kRole != FieldRole::kUnused)
    field.kind = KindOf<typename MemberPointer<decltype(kMember)>::Type>::value;
  field.role = kRole;
  field.rules = rules;
  field.member = [](void* arguments) -> void* { return &(static_cast<Owner*>(arguments)->*kMember); };
  const bool is_tensor = field.kind == FieldKind::kTensor || field.kind == FieldKind::kTensorList;
  if (!is_tensor && (!rules.shape.empty() || !rules.dtype.empty() || !rules.dtype_option.empty())) {
    only_tensors_have_shapes_and_types();
  }
  if (!field.is_output() &&
      (!rules.when.empty() || !rules.wanted.empty() || !rules.in_place.empty() || !rules.order_of.empty())) {
    only_an_output_may_be_wanted_or_depend_on_an_input();
  }
  if (field.is_output() && !rules.optional && (rules.shape.empty() || rules.dtype.empty()))
    an_output_needs_a_shape_and_a_dtype();
  if (field.kind == FieldKind::kChoice && kRole != FieldRole::kUnused && rules.choices.empty()) {
    an_enum_needs_the_names_of_its_choices();
  }
  return field;
}

constexpr std::optional<DType> dtype_named(std::string_view name) {
  if (name == "fp32") return DType::kFloat32;
  if (name == "bf16") return DType::kBFloat16;
  if (name == "int8") return DType::kInt8;
  if (name == "int32") return DType::kInt32;
  if (name == "int64") return DType::kInt64;
  if (name == "bool") return DType::kBool;
  return std::nullopt;
}

// Fields of a nested struct: one line of the struct that has it.
template <class Struct, size_t kCount>
struct GroupOf {
  std::array<Field, kCount> fields{};
};

template <class Line>
inline constexpr size_t kFieldsOf = 1;
template <class Struct, size_t kCount>
inline constexpr size_t kFieldsOf<GroupOf<Struct, kCount>> = kCount;

template <class Line, class Struct>
inline constexpr bool kBelongsTo = std::is_same_v<Line, FieldOf<Struct>>;
template <class Struct, size_t kCount>
inline constexpr bool kBelongsTo<GroupOf<Struct, kCount>, Struct> = true;

template <class Struct, class... Lines>
consteval auto join_lines(const Lines&... lines) {
  static_assert((kBelongsTo<Lines, Struct> && ...), "a line of the list is a member of another struct");
  static_assert(member_count<Struct>() == sizeof...(Lines),
                "the list and the struct differ in their number of members");
  std::array<Field, (kFieldsOf<Lines> + ...)> joined{};
  size_t next = 0;
  const auto append = [&](const auto& line) {
    if constexpr (requires { line.fields; }) {
      for (const Field& field : line.fields) joined[next++] = field;
    } else {
      joined[next++] = line;
    }
  };
  (append(lines), ...);
  return joined;
}

}  // namespace fields_detail

template <size_t kCount>
struct FieldList {
  std::array<Field, kCount> fields{};
  std::array<Dimension, kMaxDimensionNames> dimensions{};
  size_t dimension_count = 0;

  constexpr operator Fields() const { return {fields, {dimensions.data(), dimension_count}}; }

  consteval int8_t index_of(std::string_view name) const {
    if (name.empty()) return -1;
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
    for (size_t i = 0; i < dimension_count; ++i) {
      if (dimensions[i].name == word) return static_cast<int16_t>(i);
    }
    Dimension found{.name = word, .name_hash = hash_text(word)};
    constexpr std::string_view kCeil = "ceil(";
    const bool is_ceil = word.starts_with(kCeil);
    const std::string_view formula = is_ceil ? word.substr(kCeil.size(), word.size() - kCeil.size() - 1) : word;
    if (const size_t at = formula.find_first_of("/-*"); at != std::string_view::npos) {
      found.operation = is_ceil ? '^' : formula[at];
      found.left = dimension_of(formula.substr(0, at), may_be_new);
      found.right = dimension_of(formula.substr(at + 1), may_be_new);
      may_be_new = true;
    }
    for (size_t i = 0; i < kCount; ++i) {
      const bool is_size = fields[i].kind == FieldKind::kInteger && fields[i].role == FieldRole::kOption;
      if (is_size && fields[i].name == word) found.option = static_cast<int8_t>(i);
    }
    if (!may_be_new && found.option < 0) fields_detail::a_dimension_of_an_output_is_in_no_input();
    if (dimension_count == kMaxDimensionNames) fields_detail::too_many_dimensions_or_names_or_alternatives();
    dimensions[dimension_count] = found;
    return static_cast<int16_t>(dimension_count++);
  }
  consteval Shape shape_of(std::string_view text, bool may_have_new_names) {
    Shape shape;
    for (auto word = take_token(text); !word.empty(); word = take_token(text)) {
      if (word == "()") continue;  // no dimensions
      if (shape.rank == kMaxRank) fields_detail::too_many_dimensions_or_names_or_alternatives();
      if (word == "...") {
        if (shape.any_at >= 0) fields_detail::a_shape_has_several_times_any_dimensions();
        shape.any_at = shape.rank;
      }
      shape.dimensions[static_cast<size_t>(shape.rank++)] =
          word == "..." ? kAnyDimensions : dimension_of(word, may_have_new_names);
    }
    return shape;
  }
  consteval void resolve_shape(Field& field) {
    std::string_view text = field.rules.shape;
    constexpr std::string_view kLike = "like ";
    if (text.starts_with(kLike)) {
      field.like = index_of(text.substr(kLike.size()));
      return;
    }
    constexpr std::string_view kRow = "row ";
    if (text.starts_with(kRow)) {
      text.remove_prefix(kRow.size());
      field.row_list = index_of(take_token(text));
      field.row_bits = index_of(take_token(text));
      return;
    }
    field.shape_count = 0;
    while (!text.empty()) {
      if (field.shape_count == kMaxShapes) fields_detail::too_many_dimensions_or_names_or_alternatives();
      const std::string_view one = text.substr(0, text.find('|'));
      field.shapes[static_cast<size_t>(field.shape_count++)] = shape_of(one, !field.is_output());
      text.remove_prefix(one.size() < text.size() ? one.size() + 1 : one.size());
    }
    std::string_view selectors = field.rules.shape_by;
    if (selectors.empty() == (field.shape_count > 1)) {
      fields_detail::alternatives_need_shape_by_and_shape_by_alternatives();
    }
    for (int8_t& selector : field.shape_by) selector = index_of(take_token(selectors));
  }
  consteval void resolve_type(Field& field) {
    std::string_view text = field.rules.dtype;
    if (text.empty()) return;
    if (const auto fixed = fields_detail::dtype_named(text)) {
      field.type_rule = TypeRule::kFixed;
      field.type = *fixed;
      return;
    }
    if (text == "computed") {
      field.type_rule = TypeRule::kComputed;
      return;
    }
    constexpr std::string_view kNamedPrefix = "named ";
    if (text.starts_with(kNamedPrefix)) {
      field.type_rule = TypeRule::kNamed;
      field.type_of = index_of(text.substr(kNamedPrefix.size()));
      return;
    }
    constexpr std::string_view kStatisticPrefix = "statistic ";
    const bool is_statistic = text.starts_with(kStatisticPrefix);
    if (is_statistic) text.remove_prefix(kStatisticPrefix.size());
    field.type_rule = is_statistic ? TypeRule::kStatistic : TypeRule::kOfField;
    field.type_of = index_of(take_token(text));
    if (take_token(text) == "if") field.type_if = index_of(take_token(text));
  }
};

template <class Struct, class... Lines>
consteval auto fields(const Lines&... lines) {
  const auto joined = fields_detail::join_lines<Struct>(lines...);
  FieldList<joined.size()> list{.fields = joined};
  for (Field& field : list.fields) {
    if (!field.is_output()) list.resolve_shape(field);
  }
  for (Field& field : list.fields) {
    if (field.is_output()) list.resolve_shape(field);
    list.resolve_type(field);
    field.when = list.index_of(field.rules.when);
    field.in_place = list.index_of(field.rules.in_place);
    field.order_of = list.index_of(field.rules.order_of);
  }
  return list;
}

// The lines of a struct that is a member of others: `all_of<&Forward::options, kOptionFields>()` is a line of theirs
// and puts these fields there under their own names. Rules may name fields of the whole list.
template <class Struct, class... Lines>
consteval auto field_group(const Lines&... lines) {
  return fields_detail::GroupOf<Struct, sizeof...(Lines)>{fields_detail::join_lines<Struct>(lines...)};
}
template <auto kMember, const auto& kGroup>
consteval auto all_of() {
  using Owner = typename fields_detail::MemberPointer<decltype(kMember)>::Owner;
  constexpr size_t kCount = kGroup.fields.size();
  fields_detail::GroupOf<Owner, kCount> group{kGroup.fields};
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    ((group.fields[kIndex].member = [](void* arguments) -> void* {
       return kGroup.fields[kIndex].member(&(static_cast<Owner*>(arguments)->*kMember));
     }),
     ...);
  }
  (std::make_index_sequence<kCount>());
  return group;
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
consteval auto optional_updated(const Rules& rules = {}) {
  return fields_detail::make_field<FieldRole::kOptionalUpdated, kMember>(rules);
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
