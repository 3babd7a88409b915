// Rows of numbers and of objects in a request.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/json.h"

namespace kernel_pytorch::c_interface {

inline constexpr double kMost = 1e18;  // of a number in a plan's request

inline std::vector<double> numbers(FieldReader& fields, std::string_view field) {
  std::vector<double> read;
  const Json* values = fields.value(field);
  if (values == nullptr) return read;
  KP_CHECK(values->is_array(), fields.where(), ": \"", field, "\" must be an array of numbers, not ",
           values->type_name());
  for (const Json& value : *values) {
    KP_CHECK(value.is_number(), fields.where(), ": \"", field, "\" has ", to_text(value).substr(0, 40),
             " in it, which is no number");
    read.push_back(value.get<double>());
    KP_CHECK(std::abs(read.back()) <= kMost, fields.where(), ": \"", field, "\" has ", read.back(), " in it; at most ",
             kMost);
  }
  return read;
}

// The elements of an array of objects, each read by `read`; none where the field is absent.
template <class Read>
auto read_all(FieldReader& fields, std::string_view field, const Read& read) {
  std::vector<decltype(read(Json()))> values;
  const Json* given = fields.value(field);
  KP_CHECK(given == nullptr || given->is_array(), fields.where(), ": \"", field, "\" must be an array, not ",
           given->type_name());
  if (given == nullptr) return values;
  for (const Json& value : *given) values.push_back(read(value));
  return values;
}

}  // namespace kernel_pytorch::c_interface
