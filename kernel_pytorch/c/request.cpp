#include "kernel_pytorch/c/request.h"

#include <algorithm>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::c_interface {
namespace {

constexpr size_t kMaxOptions = 64;

std::string option_text(const Json& value, std::string_view name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "1" : "0";
  KP_CHECK(value.is_number(), "problem: option \"", name, "\" must be a string, number or boolean, not ",
           value.type_name());
  return value.dump();
}

std::vector<int64_t> read_shape(const Json& value) {
  KP_CHECK(value.is_array(), "problem: \"shape\" must be an array of sizes, not ", value.type_name());
  KP_CHECK(value.size() <= kMaxRank, "problem: \"shape\" has ", value.size(), " dimensions; at most ", kMaxRank);
  std::vector<int64_t> shape;
  for (const Json& size : value) {
    const bool is_too_large =
        size.is_number_unsigned() && size.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()};
    KP_CHECK(size.is_number_integer() && !is_too_large, "problem: \"shape\" has ", to_text(size).substr(0, 40),
             " in it; sizes are whole numbers below 2^63");
    shape.push_back(size.get<int64_t>());
  }
  check_shape(shape, "problem");
  return shape;
}

}  // namespace

registry::ProblemRequest read_problem(FieldReader& fields) {
  registry::ProblemRequest problem;
  const Json* shape = fields.value("shape");
  KP_CHECK(shape != nullptr, fields.where(), ": \"shape\" is missing");
  problem.shape = read_shape(*shape);
  problem.dtype = dtype_from(fields.text("dtype", "fp32"));
  problem.device = device_from(fields.text("device", "cpu"));
  if (const Json* options = fields.value("options")) {
    KP_CHECK(options->is_object() && options->size() <= kMaxOptions, fields.where(),
             ": \"options\" must be an object of at most ", kMaxOptions, " fields");
    for (const auto& [name, value] : options->items()) problem.options.emplace_back(name, option_text(value, name));
  }
  return problem;
}

OperationRequest read_operation(FieldReader& fields) {
  OperationRequest request;
  request.operation = &one_operation(fields.required_text("op"));
  request.problem = read_problem(fields);
  return request;
}

std::vector<tuning::OverlayEntry> read_overlay(const Json& request) {
  FieldReader fields(request, "overlay");
  const Json* entries = fields.value("entries");
  KP_CHECK(entries != nullptr && entries->is_array(), "overlay: \"entries\" must be an array");
  fields.finish();
  std::vector<tuning::OverlayEntry> overlay;
  for (const Json& entry : *entries) {
    FieldReader entry_fields(entry, "overlay entry");
    tuning::OverlayEntry read{.op = entry_fields.required_text("op"),
                              .problem = entry_fields.text("problem", ""),
                              .kernel = entry_fields.required_text("kernel"),
                              .config = entry_fields.text("config", ""),
                              .device = entry_fields.text("device", "")};
    entry_fields.finish();
    const std::vector<std::string>& kernels = one_operation(read.op).kernel_names;
    KP_CHECK(std::find(kernels.begin(), kernels.end(), read.kernel) != kernels.end(), "overlay: ", read.op,
             " has no kernel \"", read.kernel, "\"; it has ", joined(kernels, ", "));
    read.op = one_operation(read.op).name;
    overlay.push_back(std::move(read));
  }
  return overlay;
}

tuning::ScopeOptions read_autotune(const Json& request) {
  constexpr double kMostSeconds = 1e6;
  FieldReader fields(request, "autotune");
  tuning::ScopeOptions options;
  if (fields.has("budget_seconds")) options.budget_seconds = fields.number("budget_seconds", 0, 0, kMostSeconds);
  options.problem_seconds = fields.number("problem_seconds", options.problem_seconds, 0, kMostSeconds);
  options.remembers = fields.boolean("remembers", true);
  const Json* only = fields.value("only");
  fields.finish();
  KP_CHECK(only == nullptr || (only->is_array() && !only->empty()),
           "autotune: \"only\" must be an array of one problem or more; leave it out for all problems");
  for (const Json& one : only == nullptr ? Json::array() : *only) {
    FieldReader problem(one, "autotune problem");
    options.only.push_back({.op = one_operation(problem.required_text("op")).name,
                            .problem = problem.required_text("problem"),
                            .seconds = problem.number("seconds", options.problem_seconds, 0, kMostSeconds)});
    problem.finish();
  }
  return options;
}

std::string read_directories(const Json& request) {
  FieldReader fields(request, "NVRTC directories");
  const Json* directories = fields.value("directories");
  KP_CHECK(directories != nullptr && directories->is_array(), "NVRTC directories: \"directories\" must be an array");
  fields.finish();
  std::vector<std::string> paths;
  for (const Json& directory : *directories) {
    KP_CHECK(directory.is_string(), "NVRTC directories: an element is ", directory.type_name(), ", not a string");
    paths.push_back(directory.get<std::string>());
    KP_CHECK(paths.back().find_first_of(std::string_view(":\0", 2)) == std::string::npos,
             "NVRTC directories: a path with a colon or a zero byte in it cannot be searched");
  }
  return joined(paths, ":");
}

ClearRequest read_clear(const Json& request) {
  FieldReader fields(request, "clear");
  ClearRequest clear;
  clear.op = fields.text("op", "");
  clear.store = fields.boolean("store", true);
  clear.cubins = fields.boolean("cubins", clear.op.empty());
  fields.finish();
  if (!clear.op.empty()) clear.op = one_operation(clear.op).name;
  return clear;
}

}  // namespace kernel_pytorch::c_interface
