// Ops without their types, for the command line, the C interface and tests that go over every op:
// ops/operations.h lists them, erase() (registry/erase.h) makes one from an Operation<Problem>.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/registry/kernel.h"
#include "kernel_pytorch/tuning/autotuner.h"
#include "kernel_pytorch/tuning/selection.h"

namespace kernel_pytorch::registry {

// Whether a kernel would run a request on its device.
struct KernelSupport {
  std::string kernel;
  Origin origin = Origin::kOurs;
  bool supported = false;
  std::string reason;        // why not
  bool is_fallback = false;  // Kernel::is_fallback
};

struct CandidateExplanation : KernelSupport {
  std::vector<std::string> configs;  // of a supported kernel
  std::string heuristic_config;
};

struct Explanation {
  tuning::Key key;
  std::string device;
  std::vector<CandidateExplanation> candidates;  // in list order
  std::string chosen_kernel;                     // empty when nothing supports the problem
  std::string chosen_config;
  tuning::Tier tier = tuning::Tier::kError;
  double measured_us = 0;          // of the chosen one, where it was measured
  std::vector<Explanation> parts;  // of an op that is composed of others
};

struct BenchRow {
  std::string kernel;
  std::string config;
  tuning::Tier tier = tuning::Tier::kHeuristic;
  double median_us = 0;
  double spread_us = 0;
  double gigabytes_per_second = 0;
  double roof_share = 0;  // against a copy of the same bytes in the same run
  uint64_t launches = 0;  // of one run, on a GPU: kernels, and fills of memory by the driver
  uint64_t fills = 0;
  std::vector<double> samples_us;  // one a round
};

struct BenchReport {
  std::string op;
  ProblemRequest request;
  std::string device;
  Cost cost;
  double copy_us = 0;                   // a copy that moves cost.bytes, rotated the same way, into warm memory
  std::vector<double> copy_samples_us;  // of the rounds of the rows
  std::vector<BenchRow> rows;           // the chosen kernel first
};

class AnyProblem;

struct KP_EXPORT AnyOperation {
  std::string name;
  std::vector<std::string> kernel_names;
  // A request's problem on a device, which need not be one of this machine: supports() is asked, nothing runs. The
  // device outlives the problem. Throws on bad words.
  std::function<std::unique_ptr<AnyProblem>(const ProblemRequest&, const DeviceInfo&)> make_on;
  std::function<std::vector<ProblemRequest>()> shapes;
  std::function<std::vector<DeviceCode>()> device_code;

  std::unique_ptr<AnyProblem> make(const ProblemRequest& request) const;     // on the request's device
  std::vector<KernelSupport> supports(const ProblemRequest& request) const;  // in list order
  std::vector<CandidateExplanation> candidates(const ProblemRequest& request) const;
  Explanation explain(const ProblemRequest& request, std::string_view kernel_override) const;
  tuning::TuneReport tune(const ProblemRequest& request, const tuning::TuneOptions& options) const;
  // The chosen kernel, and with `every_kernel` all supported kernels with every config.
  BenchReport bench(const ProblemRequest& request, bool every_kernel, double seconds_each) const;
  // Runs every supported kernel and config on random data against the reference: one line per failure.
  std::vector<std::string> verify(const ProblemRequest& request) const;
};

}  // namespace kernel_pytorch::registry
