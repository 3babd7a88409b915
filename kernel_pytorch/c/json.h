// The JSON type of the C interface and the command line, and the one parser through which untrusted text enters: limits
// on size and depth first, then objects read field by field, so that a misspelt field is an error and not a surprise.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::c_interface {

using Json = nlohmann::ordered_json;  // keeps our order of fields, which is for people

inline constexpr size_t kMaxRequestBytes = size_t{1} << 20;
inline constexpr int kMaxRequestDepth = 32;

// Throws kInvalidArgument with the place of the first mistake. Null or empty text stands for {}.
KP_EXPORT Json parse_request(std::string_view text);
// Other text, with its own limit; errors begin with `where`.
KP_EXPORT Json parse_json(std::string_view text, std::string_view where, size_t most_bytes);

// Text for the outside: bytes that are not UTF-8 (a name from a driver, a path) are replaced, never thrown over.
KP_EXPORT std::string to_text(const Json& value, int indent = -1);

// Reads the fields of one object; finish() refuses fields that were not read, and names those that were.
class FieldReader {
 public:
  FieldReader(const Json& object, std::string_view where);

  bool has(std::string_view field);
  std::string text(std::string_view field, std::string_view fallback);
  std::string required_text(std::string_view field);
  bool boolean(std::string_view field, bool fallback);
  double number(std::string_view field, double fallback, double least, double greatest);
  const Json* value(std::string_view field);  // null when absent
  void finish() const;

  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_;
  std::set<std::string, std::less<>> known_;
};

}  // namespace kernel_pytorch::c_interface
