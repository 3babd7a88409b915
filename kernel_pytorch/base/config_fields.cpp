#include "kernel_pytorch/base/config_fields.h"

#include <charconv>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::fields_detail {
namespace {

const void* member_of(const ConfigField& field, const void* config) {
  return field.member(const_cast<void*>(config));
}

std::string_view choice_name(std::string_view choices, int64_t value) {
  std::string_view name = take_token(choices);
  while (value-- > 0) name = take_token(choices);
  return name;
}

std::optional<int64_t> parse_choice(std::string_view choices, std::string_view word) {
  int64_t value = 0;
  for (std::string_view name = take_token(choices); !name.empty(); name = take_token(choices), ++value) {
    if (name == word) return value;
  }
  return std::nullopt;
}

std::optional<int64_t> parse_number(std::string_view word, bool is_flag) {
  int value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) return std::nullopt;
  if (is_flag && (value < 0 || value > 1)) return std::nullopt;
  return value;
}

std::string part_of(const ConfigField& field, const std::string& part) {
  return field.is_part ? concat(part, field.name, "_") : part;
}

}  // namespace

std::string config_text(const ConfigFields& fields, const void* config, const std::string& part) {
  std::string text;
  for (const ConfigField& field : fields.all) {
    if (field.is_limit) continue;
    if (!text.empty()) text += ' ';
    const void* member = member_of(field, config);
    if (field.inner != nullptr) {
      text += config_text(field.inner(), member, part_of(field, part));
    } else if (field.choices.empty()) {
      text += concat(part, field.name, "=", field.get(member));
    } else {
      text += concat(part, field.name, "=", choice_name(field.choices, field.get(member)));
    }
  }
  return text;
}

std::string device_text(const ConfigFields& fields, const void* config) {
  std::string text = concat(fields.type, "{");
  for (const ConfigField& field : fields.all) {
    if (field.is_limit) continue;
    if (text.back() != '{') text += ", ";
    text += concat(".", field.name, " = ");
    const void* member = member_of(field, config);
    if (field.inner != nullptr) {
      text += device_text(field.inner(), member);
    } else if (field.is_flag) {
      text += field.get(member) != 0 ? "true" : "false";
    } else if (field.type.empty()) {
      text += concat(field.get(member));
    } else {
      text += concat(field.type, "(", field.get(member), ")");
    }
  }
  return text + "}";
}

bool parse_config(const ConfigFields& fields, std::string_view& text, void* config, const std::string& part) {
  for (const ConfigField& field : fields.all) {
    if (field.is_limit) continue;
    void* member = field.member(config);
    if (field.inner != nullptr) {
      if (!parse_config(field.inner(), text, member, part_of(field, part))) return false;
      continue;
    }
    std::string_view word = take_token(text);
    const std::string begin = concat(part, field.name, "=");
    if (!word.starts_with(begin)) return false;
    word.remove_prefix(begin.size());
    const std::optional<int64_t> value =
        field.choices.empty() ? parse_number(word, field.is_flag) : parse_choice(field.choices, word);
    if (!value) return false;
    field.set(member, *value);
  }
  return true;
}

}  // namespace kernel_pytorch::fields_detail
