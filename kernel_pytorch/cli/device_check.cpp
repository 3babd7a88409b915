#include "kernel_pytorch/cli/device_check.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cli/problem_arguments.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/verify.h"

namespace kernel_pytorch::cli {
namespace {

constexpr std::string_view kReference = "reference";
// The op whose copy of the same bytes says how fast memory is.
constexpr std::string_view kCopyOp = "rms_norm_forward";
// A problem below this may be a single vector and an odd tail; the smallest above it is quick and goes through the
// tiles.
constexpr int64_t kFewestElements = 2048;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// On a GPU the first run of a kernel compiles it.
double time_limit_seconds(const DeviceInfo& device) {
  return device.is_cpu() ? 3 : 12;
}

// The op's own shapes in the order in which to try them: from the smallest with kFewestElements upwards, then the
// others, largest first.
std::vector<registry::ProblemRequest> in_order_of_size(const registry::AnyOperation& operation, Device device) {
  std::vector<registry::ProblemRequest> requests = operation.shapes();
  for (registry::ProblemRequest& request : requests) request.device = device;
  const auto rank = [](const registry::ProblemRequest& request) {
    const int64_t count = element_count(request);
    return count >= kFewestElements ? std::pair(0, count) : std::pair(1, -count);
  };
  std::stable_sort(requests.begin(), requests.end(),
                   [&](const auto& left, const auto& right) { return rank(left) < rank(right); });
  return requests;
}

// The first shape that has a kernel besides the reference here; nothing where there is none.
std::optional<registry::ProblemRequest> request_for(const registry::AnyOperation& operation, Device device) {
  for (registry::ProblemRequest& request : in_order_of_size(operation, device)) {
    const std::string chosen = operation.explain(request, "").chosen_kernel;
    if (!chosen.empty() && chosen != kReference) return request;
  }
  return std::nullopt;
}

OpTest test_op(const registry::AnyOperation& operation, Device device) {
  OpTest test{.op = operation.name, .problem = "", .kernel = "", .failures = {}};
  try {
    const std::optional<registry::ProblemRequest> request = request_for(operation, device);
    if (!request) return test;
    test.problem = request_text(*request);
    test.kernel = operation.explain(*request, "").chosen_kernel;
    test.failures = registry::verify_chosen(*operation.make(*request));
  } catch (const std::exception& error) {  // a sick device is what doctor is for
    test.failures.push_back(error.what());
  }
  return test;
}

double copy_rate(const DeviceInfo& device) {
  const int64_t rows = device.is_cpu() ? 4096 : 65536;
  const registry::ProblemRequest request{
      .shape = {rows, 4096}, .dtype = DType::kFloat32, .device = device.device, .options = {}};
  const registry::AnyOperation* operation = find_operation(kCopyOp);
  KP_CHECK(operation != nullptr, "doctor: there is no op ", kCopyOp);
  const registry::BenchReport bench = operation->bench(request, false, 0.2);
  return bench.copy_us > 0 ? static_cast<double>(bench.cost.bytes) / bench.copy_us * 1e-3 : 0;
}

}  // namespace

bool SelfTest::passed() const {
  return std::all_of(ops.begin(), ops.end(), [](const OpTest& test) { return test.failures.empty(); });
}

std::string family_of(const std::string& op) {
  for (const std::string_view direction : {"_forward", "_backward", "_rescale"}) {
    if (op.ends_with(direction)) return op.substr(0, op.size() - direction.size());
  }
  return op;
}

SelfTest test_device(const DeviceInfo& device) {
  SelfTest test;
  test.device = to_string(device.device);
  const Stopwatch watch;
  std::set<std::string> seen;
  for (const registry::AnyOperation& operation : operations()) {
    if (!seen.insert(family_of(operation.name)).second) continue;
    if (watch.seconds() > time_limit_seconds(device)) {
      test.not_reached.push_back(operation.name);
    } else {
      test.ops.push_back(test_op(operation, device.device));
    }
  }
  try {
    test.copy_gigabytes_per_second = copy_rate(device);
  } catch (const std::exception& error) {
    test.ops.push_back({std::string(kCopyOp), "4096 columns, timed", "", {error.what()}});
  }
  test.seconds = watch.seconds();
  return test;
}

}  // namespace kernel_pytorch::cli
