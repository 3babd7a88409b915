#include "kernel_pytorch/c/names.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/ops/operations.h"

namespace kernel_pytorch::c_interface {
namespace {

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

bool names_operation(std::string_view name, std::string_view op) {
  return name.empty() || op == name || (op.starts_with(name) && op[name.size()] == '_');
}

[[noreturn]] void fail_unknown_op(std::string_view name) {
  const std::vector<std::string> known = operation_names();
  std::vector<std::string> targets = known;
  for (const std::string& op : known) targets.push_back(op.substr(0, op.rfind('_')));
  const std::string meant = nearest_name(name, targets);
  fail(ErrorCode::kInvalidArgument, "unknown op \"", name.substr(0, 100), "\"",
       meant.empty() ? "" : "; did you mean " + meant + "?", " (ops: ", joined(known, ", "), ")");
}

}  // namespace

std::string joined(const std::vector<std::string>& names, std::string_view separator) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : separator).append(name);
  return text;
}

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
    if (names_operation(name, operation.name)) matching.push_back(&operation);
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
    KP_CHECK(!__builtin_mul_overflow(bytes, size, &bytes), where, ": shape ", request_shape_text(shape),
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

std::string request_shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text.append(text.empty() ? "" : "x").append(std::to_string(size));
  return text.empty() ? "scalar" : text;
}

}  // namespace kernel_pytorch::c_interface
