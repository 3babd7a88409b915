#include "kernel_pytorch/tuning/row_check.h"

#include <chrono>
#include <cmath>
#include <cstdio>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::tuning {
namespace {

constexpr double kLongestMicroseconds = 1e12;
constexpr int64_t kClockSkewSeconds = 86400;

bool is_printable(std::string_view text) {
  for (const unsigned char c : text) {
    if (c < 0x20 || c == 0x7f) return false;
  }
  return true;
}

std::string check_text(std::string_view field, std::string_view text, size_t longest, bool may_be_empty) {
  if (text.empty() && !may_be_empty) return concat(field, ": is empty");
  if (text.size() > longest) return concat(field, ": has ", text.size(), " bytes; at most ", longest, " are allowed");
  if (!is_printable(text)) return concat(field, ": holds a control character");
  return "";
}

// By arithmetic: gmtime_r takes a lock of the C library that a forked child may find held for good.
std::string format_utc(std::chrono::system_clock::time_point when) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(when);
  const auto day = std::chrono::floor<std::chrono::days>(seconds);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss time(seconds - day);
  char text[64];
  std::snprintf(text, sizeof(text), "%04d-%02u-%02uT%02d:%02d:%02dZ", static_cast<int>(date.year()),
                static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
                static_cast<int>(time.hours().count()), static_cast<int>(time.minutes().count()),
                static_cast<int>(time.seconds().count()));
  return text;
}

std::string check_date(std::string_view date) {
  constexpr std::string_view kShape = "dddd-dd-ddTdd:dd:ddZ";
  bool fits = date.size() == kShape.size();
  for (size_t i = 0; fits && i < kShape.size(); ++i) {
    fits = kShape[i] == 'd' ? date[i] >= '0' && date[i] <= '9' : date[i] == kShape[i];
  }
  if (!fits) return "date: must look like 2025-01-31T12:00:00Z";
  const auto number = [&](size_t at, size_t digits) {
    int value = 0;
    for (size_t i = at; i < at + digits; ++i) value = value * 10 + (date[i] - '0');
    return value;
  };
  const std::chrono::year_month_day day{std::chrono::year(number(0, 4)), std::chrono::month(number(5, 2)),
                                        std::chrono::day(number(8, 2))};
  if (!day.ok() || number(11, 2) > 23 || number(14, 2) > 59 || number(17, 2) > 60) {
    return concat("date: ", date, " is no date of the calendar");
  }
  // The later date wins, so a date from the future would stay for good.
  const auto limit = std::chrono::system_clock::now() + std::chrono::seconds(kClockSkewSeconds);
  if (date > format_utc(limit)) return concat("date: ", date, " lies in the future");
  return "";
}

std::string check_number(std::string_view field, double number, bool may_be_zero) {
  const bool in_range =
      std::isfinite(number) && number <= kLongestMicroseconds && (may_be_zero ? number >= 0 : number > 0);
  if (in_range) return "";
  return concat(field, ": is ", number, "; it must be ", may_be_zero ? "at least" : "above", " 0 and at most ",
                kLongestMicroseconds);
}

}  // namespace

std::string problem_with(const StoredMeasurement& row) {
  const Measurement& measurement = row.measurement;
  for (std::string problem : {
           check_text("device", row.key.device, 1024, false),
           check_text("op", row.key.op, 128, false),
           check_text("kernel_set", row.key.kernel_set, 128, false),
           check_text("problem", row.key.problem, kLongestText, true),
           check_text("kernel", measurement.kernel, 128, false),
           check_text("config", measurement.config, kLongestText, true),
           check_number("median_us", measurement.median_us, false),
           check_number("spread_us", measurement.spread_us, true),
           check_date(measurement.date),
           check_text("library_version", measurement.library_version, 128, false),
       }) {
    if (!problem.empty()) return problem;
  }
  return "";
}

std::string utc_now() {
  return format_utc(std::chrono::system_clock::now());
}

}  // namespace kernel_pytorch::tuning
