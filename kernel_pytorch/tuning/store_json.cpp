// The parser is event-driven: it knows the three levels of the format, refuses the first event that does not belong
// there, and so never builds or nests anything that the text asks for.
#include "kernel_pytorch/tuning/store_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/version.h"
#include "kernel_pytorch/tuning/row_check.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr std::string_view kFormat = "kernel_pytorch tuning measurements";
constexpr int64_t kVersionOfFormat = 1;
constexpr size_t kShownBytes = 80;

// What a message quotes from an untrusted file: short, printable ASCII.
std::string show(std::string_view text) {
  std::string shown;
  for (const char c : text.substr(0, kShownBytes)) shown.push_back(c >= 0x20 && c < 0x7f ? c : '?');
  return text.size() > kShownBytes ? shown + "..." : shown;
}

class Reader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(const std::vector<std::string>& known_ops) : known_ops_(known_ops) {}

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool binary(binary_t&) override { return refuse("binary data"); }
  bool number_integer(number_integer_t value) override { return take_number(static_cast<double>(value)); }
  bool number_unsigned(number_unsigned_t value) override { return take_number(static_cast<double>(value)); }
  bool number_float(number_float_t value, const string_t&) override { return take_number(value); }
  bool string(string_t& value) override { return take_text(value); }

  bool start_object(size_t) override {
    if (level_ == Level::kOutside && !seen_top_) {
      level_ = Level::kTop;
      seen_top_ = true;
      return true;
    }
    if (level_ == Level::kList) {
      level_ = Level::kRow;
      row_ = {};
      seen_fields_ = 0;
      return true;
    }
    return refuse("an object");
  }
  bool end_object() override {
    if (level_ == Level::kTop) {
      level_ = Level::kOutside;
      return true;
    }
    level_ = Level::kList;
    return end_row();
  }
  bool start_array(size_t) override {
    if (level_ != Level::kTop || key_ != "measurements") return refuse("an array");
    if (seen_measurements_) return refuse("a second list");
    seen_measurements_ = true;
    level_ = Level::kList;
    return true;
  }
  bool end_array() override {
    level_ = Level::kTop;
    return true;
  }
  bool key(string_t& value) override {
    key_ = value.substr(0, kLongestText);
    const auto known = [&](const auto& names) {
      return std::find(std::begin(names), std::end(names), key_) != std::end(names);
    };
    constexpr std::string_view kTopKeys[] = {"format", "version", "library_version", "measurements"};
    if (level_ == Level::kTop ? known(kTopKeys) : known(kFields)) return true;
    return complain("is not a field of the format");
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string_view text = error.what();
    if (const size_t end = text.find("] "); end != std::string_view::npos) text.remove_prefix(end + 2);
    problem_ = concat("not JSON: ", show(text));
    return false;
  }

  // The first thing wrong with the whole text, once it has been read.
  std::string problem() const {
    if (!problem_.empty()) return problem_;
    if (format_ != kFormat) return concat("format: must be \"", kFormat, "\"");
    if (version_ != kVersionOfFormat)
      return concat("version: is ", version_, "; this library reads version ", kVersionOfFormat);
    if (!seen_measurements_) return "measurements: the list is missing";
    return "";
  }
  bool has_problem() const { return !problem_.empty(); }
  std::vector<StoredMeasurement> take_rows() { return std::move(rows_); }

 private:
  enum class Level : uint8_t { kOutside, kTop, kList, kRow };
  static constexpr std::string_view kFields[] = {"device", "op",        "kernel_set", "problem", "kernel",
                                                 "config", "median_us", "spread_us",  "date",    "library_version"};

  std::string place() const {
    switch (level_) {
      case Level::kOutside:
        return "top level";
      case Level::kTop:
        return key_.empty() ? "top level" : show(key_);
      case Level::kList:
        return concat("measurements[", rows_.size(), "]");
      case Level::kRow:
        return concat("measurements[", rows_.size(), "].", show(key_));
    }
    return "";
  }
  bool complain(std::string_view what) {
    problem_ = concat(place(), " ", what);
    return false;
  }
  bool refuse(std::string_view what) { return complain(concat("holds ", what, ", which does not belong there")); }

  // Marks the current field as seen; false for the second time.
  bool note_field() {
    const auto place = std::find(std::begin(kFields), std::end(kFields), key_);
    const unsigned bit = 1u << (place - std::begin(kFields));
    if (seen_fields_ & bit) return complain("is given twice");
    seen_fields_ |= bit;
    return true;
  }

  bool take_number(double value) {
    if (level_ == Level::kTop && key_ == "version") {
      version_ = value;
      return true;
    }
    if (level_ != Level::kRow || (key_ != "median_us" && key_ != "spread_us")) return refuse("a number");
    (key_ == "median_us" ? row_.measurement.median_us : row_.measurement.spread_us) = value;
    return note_field();
  }

  bool take_text(std::string& value) {
    if (level_ == Level::kTop && key_ == "format") {
      format_ = value.substr(0, kLongestText);
      return true;
    }
    if (level_ == Level::kTop && key_ == "library_version") return true;
    std::string* target = level_ == Level::kRow ? text_field() : nullptr;
    if (target == nullptr) return refuse("a text");
    if (value.size() > kLongestText)
      return complain(concat("has ", value.size(), " bytes; at most ", kLongestText, " are allowed"));
    *target = std::move(value);
    return note_field();
  }

  std::string* text_field() {
    Key& key = row_.key;
    Measurement& measurement = row_.measurement;
    std::string* const fields[] = {
        &key.device,         &key.op, &key.kernel_set, &key.problem,      &measurement.kernel,
        &measurement.config, nullptr, nullptr,         &measurement.date, &measurement.library_version};
    return fields[std::find(std::begin(kFields), std::end(kFields), key_) - std::begin(kFields)];
  }

  bool end_row() {
    for (size_t i = 0; i < std::size(kFields); ++i) {
      if (seen_fields_ & (1u << i)) continue;
      return complain(concat("lacks the field ", kFields[i]));
    }
    std::string problem = problem_with(row_);
    if (problem.empty() && std::find(known_ops_.begin(), known_ops_.end(), row_.key.op) == known_ops_.end()) {
      problem = concat("op: \"", show(row_.key.op), "\" is no op of this library");
    }
    if (!problem.empty()) {
      problem_ = concat(place(), ".", show(problem));
      return false;
    }
    rows_.push_back(std::move(row_));
    return true;
  }

  const std::vector<std::string>& known_ops_;
  Level level_ = Level::kOutside;
  bool seen_top_ = false;
  bool seen_measurements_ = false;
  std::string key_;
  std::string format_;
  double version_ = 0;
  StoredMeasurement row_;
  unsigned seen_fields_ = 0;
  std::vector<StoredMeasurement> rows_;
  std::string problem_;
};

}  // namespace

std::vector<StoredMeasurement> parse_measurements(std::string_view json, const std::vector<std::string>& known_ops) {
  KP_CHECK(json.size() <= kLargestImportBytes, "tuning import: the text has ", json.size(), " bytes; at most ",
           kLargestImportBytes, " are read; export fewer measurements");
  Reader reader(known_ops);
  const bool is_read = nlohmann::json::sax_parse(json.begin(), json.end(), &reader);
  const std::string problem = reader.problem();
  KP_CHECK(problem.empty(), "tuning import: ", problem, "; nothing was imported");
  KP_CHECK(is_read, "tuning import: the text could not be read; nothing was imported");
  return reader.take_rows();
}

std::string format_measurements(const std::vector<StoredMeasurement>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const StoredMeasurement& row : rows) {
    list.push_back({{"device", row.key.device},
                    {"op", row.key.op},
                    {"kernel_set", row.key.kernel_set},
                    {"problem", row.key.problem},
                    {"kernel", row.measurement.kernel},
                    {"config", row.measurement.config},
                    {"median_us", row.measurement.median_us},
                    {"spread_us", row.measurement.spread_us},
                    {"date", row.measurement.date},
                    {"library_version", row.measurement.library_version}});
  }
  const nlohmann::ordered_json document = {{"format", kFormat},
                                           {"version", kVersionOfFormat},
                                           {"library_version", kVersion},
                                           {"measurements", std::move(list)}};
  return document.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace kernel_pytorch::tuning
