#include "kernel_pytorch/c/request.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <numeric>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/ops/operations.h"

namespace kernel_pytorch::c_interface {
namespace {

constexpr size_t kMaxOptions = 64;

// Insertions, deletions, changes and swaps of neighbours that turn one word into the other.
int edit_distance(std::string_view from, std::string_view to) {
  std::vector<int> before(to.size() + 1), previous(to.size() + 1), current(to.size() + 1);
  std::iota(previous.begin(), previous.end(), 0);
  for (size_t i = 1; i <= from.size(); ++i) {
    current[0] = static_cast<int>(i);
    for (size_t j = 1; j <= to.size(); ++j) {
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (from[i - 1] != to[j - 1])});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1]) {
        current[j] = std::min(current[j], before[j - 2] + 1);
      }
    }
    before.swap(previous);
    previous.swap(current);
  }
  return previous[to.size()];
}

bool stands_for(std::string_view name, std::string_view op) {
  return name.empty() || op == name || (op.starts_with(name) && op[name.size()] == '_');
}

std::string joined(const std::vector<std::string>& names, std::string_view separator) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : separator).append(name);
  return text;
}

[[noreturn]] void fail_unknown_op(std::string_view name) {
  const std::vector<std::string> known = operation_names();
  std::vector<std::string> targets = known;
  for (const std::string& op : known) targets.push_back(op.substr(0, op.rfind('_')));
  const std::string meant = nearest_name(name, targets);
  fail(ErrorCode::kInvalidArgument, "unknown op \"", name.substr(0, 100), "\"",
       meant.empty() ? "" : "; did you mean " + meant + "?", " (ops: ", joined(known, ", "), ")");
}

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

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
  if (name.size() > 100) return "";
  std::string best;
  int best_distance = static_cast<int>(name.size()) / 3 + 2;  // further away is no longer a misspelling
  for (const std::string& candidate : known) {
    const int distance = edit_distance(name, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::vector<const registry::AnyOperation*> matching_operations(std::string_view name) {
  std::vector<const registry::AnyOperation*> matching;
  for (const registry::AnyOperation& operation : operations()) {
    if (stands_for(name, operation.name)) matching.push_back(&operation);
  }
  if (matching.empty()) fail_unknown_op(name);
  return matching;
}

const registry::AnyOperation& one_operation(std::string_view name) {
  if (const registry::AnyOperation* exact = find_operation(name)) return *exact;
  const auto matching = matching_operations(name);
  std::vector<std::string> names;
  for (const registry::AnyOperation* operation : matching) names.push_back(operation->name);
  KP_CHECK(matching.size() == 1, "\"", name, "\" stands for ", joined(names, " and "), "; say which");
  return *matching.front();
}

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const registry::AnyOperation& operation : operations()) names.push_back(operation.name);
  return names;
}

std::vector<DeviceCode> device_code_of(const std::vector<const registry::AnyOperation*>& operations) {
  std::vector<DeviceCode> codes;
  for (const registry::AnyOperation* operation : operations) {
    for (DeviceCode& code : operation->device_code()) {
      if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(std::move(code));
    }
  }
  return codes;
}

DType dtype_from(std::string_view text) {
  const std::optional<DType> dtype = parse_dtype(text);
  if (dtype) return *dtype;
  std::vector<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) names.emplace_back(name_of(static_cast<DType>(i)));
  fail(ErrorCode::kInvalidArgument, "unknown dtype \"", text.substr(0, 100), "\"; one of ", joined(names, ", "));
}

Device device_from(std::string_view text) {
  const std::optional<Device> device = parse_device(text);
  KP_CHECK(device.has_value(), "unknown device \"", text.substr(0, 100), "\"; say cpu, cuda or cuda:N");
  return *device;
}

void check_shape(const std::vector<int64_t>& shape, std::string_view where) {
  KP_CHECK(shape.size() <= kMaxRank, where, ": shape has ", shape.size(), " dimensions; at most ", kMaxRank);
  int64_t bytes = 8;  // of the widest type
  for (const int64_t size : shape) KP_CHECK(size >= 0, where, ": shape has the size ", size, "; sizes are 0 or more");
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  for (const int64_t size : shape) {
    KP_CHECK(!__builtin_mul_overflow(bytes, size, &bytes), where, ": shape ", shape_words(shape),
             " has more bytes than 63 bits can count");
  }
}

std::vector<int64_t> shape_from(std::string_view text) {
  std::vector<int64_t> shape;
  const char* place = text.data();
  const char* const end = place + text.size();
  while (true) {
    int64_t size = 0;
    const auto [next, error] = std::from_chars(place, end, size);
    KP_CHECK(error == std::errc() && (next == end || *next == 'x') && shape.size() < kMaxRank, "shape \"",
             text.substr(0, 100), "\": write sizes with x between them, as 1024x4096");
    shape.push_back(size);
    if (next == end) break;
    place = next + 1;
  }
  check_shape(shape, "shape");
  return shape;
}

std::string shape_words(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text.append(text.empty() ? "" : "x").append(std::to_string(size));
  return text.empty() ? "scalar" : text;
}

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
                              .config = entry_fields.text("config", "")};
    entry_fields.finish();
    const std::vector<std::string>& kernels = one_operation(read.op).kernel_names;
    KP_CHECK(std::find(kernels.begin(), kernels.end(), read.kernel) != kernels.end(), "overlay: ", read.op,
             " has no kernel \"", read.kernel, "\"; it has ", joined(kernels, ", "));
    read.op = one_operation(read.op).name;
    overlay.push_back(std::move(read));
  }
  return overlay;
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
