// The members of a kernel's config as a list of plain values, declared once on the host side:
//
//   inline constexpr auto kRowConfigFields = config_fields<RowConfig>(
//       config_field<&RowConfig::threads>(), config_field<&RowConfig::source>("direct prefetch ring async"));
//   constexpr ConfigFields fields_of(const RowConfig&) { return kRowConfigFields; }
//
// From it come the text that the tuning cache keeps and `explain` shows, the way back from that text, and the template
// argument that NVRTC compiles. The struct's header is shared with the device and includes nothing of this. A struct
// that is a template argument but no config has a list for its argument alone.
#pragma once

#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kernel_pytorch/base/fields.h"

namespace kernel_pytorch {

struct ConfigFields;

// A number, a flag, an enum, or a config within the config.
struct ConfigField {
  std::string_view name{};
  std::string_view type{};     // the qualified name of an enum's type
  std::string_view choices{};  // names of an enum's values, in order, separated by spaces; none: numbers
  bool is_flag = false;
  bool is_part = false;   // a config within the config whose members' names begin with its own: "keys_slice=64"
  bool is_limit = false;  // known from the other members: no part of the texts
  void* (*member)(void* config) = nullptr;
  ConfigFields (*inner)() = nullptr;  // null: not a config
  int64_t (*get)(const void* member) = nullptr;
  void (*set)(void* member, int64_t value) = nullptr;
};

struct ConfigFields {
  std::string_view type{};  // the qualified name of the struct
  std::span<const ConfigField> all{};
};

namespace fields_detail {

// The compiler's own text of this function ends in "Type = ns::Source]", or ";" and its alias of string_view.
template <class Type>
consteval std::string_view type_name() {
  constexpr std::string_view kText = __PRETTY_FUNCTION__;
  constexpr size_t kBegin = kText.find("Type = ") + 7;
  return kText.substr(kBegin, kText.find_first_of(";]", kBegin) - kBegin);
}
static_assert(type_name<Rules>() == "kernel_pytorch::Rules", "this compiler writes template arguments in another way");

template <class Struct>
struct ConfigFieldOf : ConfigField {};  // keeps members of another struct out of a list

template <class Struct, size_t kCount>
struct ConfigFieldList {
  std::array<ConfigField, kCount> fields{};
  constexpr operator ConfigFields() const { return {type_name<Struct>(), fields}; }
};

KP_EXPORT std::string config_text(const ConfigFields& fields, const void* config, const std::string& part = {});
KP_EXPORT std::string device_text(const ConfigFields& fields, const void* config);
KP_EXPORT bool parse_config(const ConfigFields& fields, std::string_view& text, void* config,
                            const std::string& part = {});

}  // namespace fields_detail

template <auto kMember>
consteval auto config_field(std::string_view choices = {}) {
  using Owner = typename fields_detail::MemberPointer<decltype(kMember)>::Owner;
  using Type = typename fields_detail::MemberPointer<decltype(kMember)>::Type;
  fields_detail::ConfigFieldOf<Owner> field{};
  field.name = fields_detail::member_name<kMember>();
  field.member = [](void* config) -> void* { return &(static_cast<Owner*>(config)->*kMember); };
  if constexpr (std::is_class_v<Type>) {
    field.inner = [] { return ConfigFields(fields_of(Type{})); };
  } else {
    static_assert(std::is_integral_v<Type> || std::is_enum_v<Type>,
                  "a member of a config is an integer, bool, an enum or a config");
    field.choices = choices;
    if constexpr (std::is_enum_v<Type>) field.type = fields_detail::type_name<Type>();
    field.is_flag = std::is_same_v<Type, bool>;
    field.get = [](const void* member) { return static_cast<int64_t>(*static_cast<const Type*>(member)); };
    field.set = [](void* member, int64_t value) { *static_cast<Type*>(member) = static_cast<Type>(value); };
  }
  return field;
}

// One of several configs within the config that have members of the same names.
template <auto kMember>
consteval auto config_part() {
  auto field = config_field<kMember>();
  field.is_part = true;
  return field;
}

// Which problems the config takes, written into its row of a table: not a part of it.
template <auto kMember>
consteval auto config_limit() {
  fields_detail::ConfigFieldOf<typename fields_detail::MemberPointer<decltype(kMember)>::Owner> field{};
  field.name = fields_detail::member_name<kMember>();
  field.is_limit = true;
  return field;
}

template <class Struct, class... Lines>
consteval auto config_fields(const Lines&... lines) {
  static_assert((std::is_same_v<Lines, fields_detail::ConfigFieldOf<Struct>> && ...),
                "a line of the list is a member of another struct");
  static_assert(fields_detail::member_count<Struct>() == sizeof...(Lines),
                "the list and the struct differ in their number of members");
  return fields_detail::ConfigFieldList<Struct, sizeof...(Lines)>{{static_cast<const ConfigField&>(lines)...}};
}

// "threads=256 source=ring clustered=0": every member but the limits, those of a config within
// it in its place.
template <class Config>
std::string config_text(const Config& config) {
  return fields_detail::config_text(fields_of(config), &config);
}

// "ns::RowConfig{.threads = 256, .source = ns::Source(2), .clustered = false}": designated, so that a list in another
// order than the struct does not compile.
template <class Config>
std::string device_text(const Config& config) {
  return fields_detail::device_text(fields_of(config), &config);
}

// The way back from config_text. None where the text is not one, or its config is not legal.
template <class Config>
std::optional<Config> parse_config(std::string_view text) {
  Config config{};
  if (!fields_detail::parse_config(fields_of(config), text, &config) || !text.empty()) return std::nullopt;
  if constexpr (requires { is_legal(config); }) {
    if (!is_legal(config)) return std::nullopt;
  }
  return config;
}

template <std::ranges::range Table>
std::vector<std::string> config_texts(const Table& table) {
  std::vector<std::string> texts;
  for (const auto& config : table) texts.push_back(config_text(config));
  return texts;
}

// What a table of configs is held to where it stands: static_assert(are_legal(kConfigs)).
template <std::ranges::range Table>
consteval bool are_legal(const Table& table) {
  for (const auto& config : table) {
    if (!is_legal(config)) return false;
  }
  return true;
}

}  // namespace kernel_pytorch
