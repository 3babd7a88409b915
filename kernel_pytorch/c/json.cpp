#include "kernel_pytorch/c/json.h"

#include <cmath>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::c_interface {

Json parse_request(std::string_view text) {
  return text.empty() ? Json::object() : parse_json(text, "request", kMaxRequestBytes);
}

Json parse_json(std::string_view text, std::string_view where, size_t most_bytes) {
  KP_CHECK(text.size() <= most_bytes, where, ": ", text.size(), " bytes; at most ", most_bytes, " are read");
  const auto limit_depth = [where](int depth, Json::parse_event_t, Json&) {
    KP_CHECK(depth <= kMaxRequestDepth, where, ": nested deeper than ", kMaxRequestDepth, " levels");
    return true;
  };
  try {  // the parser's exceptions become ours here, so that callers know one type
    return Json::parse(text, limit_depth);
  } catch (const nlohmann::json::exception& error) {
    const std::string_view message = error.what();
    const size_t after_tag = message.find("] ");  // "[json.exception.parse_error.101] parse error at line 1, ..."
    fail(ErrorCode::kInvalidArgument, where,
         ": not JSON: ", after_tag == std::string_view::npos ? message : message.substr(after_tag + 2));
  }
}

std::string to_text(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

FieldReader::FieldReader(const Json& object, std::string_view where) : object_(object), where_(where) {
  KP_CHECK(object.is_object(), where, ": an object is needed, not ", object.type_name());
}

const Json* FieldReader::value(std::string_view field) {
  known_.emplace(field);
  const auto found = object_.find(std::string(field));
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool FieldReader::has(std::string_view field) {
  return value(field) != nullptr;
}

std::string FieldReader::text(std::string_view field, std::string_view fallback) {
  const Json* found = value(field);
  if (found == nullptr) return std::string(fallback);
  KP_CHECK(found->is_string(), where_, ": \"", field, "\" must be a string, not ", found->type_name());
  const std::string& content = found->get_ref<const std::string&>();
  KP_CHECK(content.find('\0') == std::string::npos, where_, ": \"", field, "\" has a zero byte in it");
  return content;
}

std::string FieldReader::required_text(std::string_view field) {
  std::string content = text(field, "");
  KP_CHECK(!content.empty(), where_, ": \"", field, "\" is missing");
  return content;
}

bool FieldReader::boolean(std::string_view field, bool fallback) {
  const Json* found = value(field);
  if (found == nullptr) return fallback;
  KP_CHECK(found->is_boolean(), where_, ": \"", field, "\" must be true or false, not ", found->type_name());
  return found->get<bool>();
}

double FieldReader::number(std::string_view field, double fallback, double least, double greatest) {
  const Json* found = value(field);
  if (found == nullptr) return fallback;
  KP_CHECK(found->is_number(), where_, ": \"", field, "\" must be a number, not ", found->type_name());
  const double content = found->get<double>();
  KP_CHECK(content >= least && content <= greatest, where_, ": \"", field, "\" is ", content, "; it must be from ",
           least, " to ", greatest);
  return content;
}

void FieldReader::finish() const {
  for (const auto& [field, unused] : object_.items()) {
    if (known_.contains(field)) continue;
    std::string known_names;
    for (const std::string& name : known_) known_names.append(known_names.empty() ? "" : ", ").append(name);
    fail(ErrorCode::kInvalidArgument, where_, ": unknown field \"", field, "\"; known: ", known_names);
  }
}

}  // namespace kernel_pytorch::c_interface
