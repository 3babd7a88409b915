#include "kernel_pytorch/cli/json_output.h"

#include <string_view>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/c/sample_file.h"

namespace kernel_pytorch::cli {
namespace {

using c_interface::Json;
using c_interface::report;
using c_interface::report_all;

std::string printed(const Json& json) {
  return c_interface::to_text(json, 2) + "\n";
}

std::string_view name_of(Health health) {
  return health == Health::kGood ? "good" : health == Health::kNote ? "note" : "problem";
}

Json findings_of(const Diagnosis& diagnosis) {
  Json findings = Json::array();
  for (const Finding& finding : diagnosis.findings) {
    findings.push_back({{"section", finding.section},
                        {"health", std::string(name_of(finding.health))},
                        {"text", finding.text},
                        {"cure", finding.cure}});
  }
  return findings;
}

Json self_tests_of(const Diagnosis& diagnosis) {
  Json tests = Json::array();
  for (const SelfTest& test : diagnosis.self_tests) {
    Json ops = Json::array();
    for (const OpTest& op : test.ops) {
      ops.push_back({{"op", op.op}, {"problem", op.problem}, {"kernel", op.kernel}, {"failures", op.failures}});
    }
    tests.push_back({{"device", test.device},
                     {"passed", test.passed()},
                     {"ops", ops},
                     {"not_reached", test.not_reached},
                     {"copy_gigabytes_per_second", test.copy_gigabytes_per_second},
                     {"seconds", test.seconds}});
  }
  return tests;
}

}  // namespace

std::string version_json() {
  return printed({{"version", kp_version()}});
}

std::string devices_json() {
  return printed(c_interface::report_devices());
}

std::string kernels_json(const std::vector<const registry::AnyOperation*>& operations) {
  return printed(c_interface::report_kernels(operations));
}

std::string explanations_json(const std::vector<registry::Explanation>& explanations) {
  return printed({{"explanations", report_all(explanations)}});
}

std::string tuning_json(const std::vector<tuning::TuneReport>& reports) {
  return printed({{"reports", report_all(reports)}, {"store", report(tuning::store_info())}});
}

std::string benchmarks_json(const std::vector<registry::BenchReport>& reports) {
  return printed({{"benchmarks", report_all(reports)}});
}

std::string comparison_json(const c_interface::SampleComparison& comparison) {
  return printed(report(comparison));
}

std::string verifications_json(const std::vector<Verification>& verifications) {
  Json problems = Json::array();
  int passed = 0, failed = 0;
  for (const Verification& verification : verifications) {
    passed += verification.passed();
    failed += verification.failed();
    problems.push_back({{"op", verification.problem.operation->name},
                        {"problem", report(verification.problem.request)},
                        {"kernels", verification.kernels},
                        {"failures", verification.failures},
                        {"seconds", verification.seconds}});
  }
  const int unsupported = static_cast<int>(verifications.size()) - passed - failed;
  return printed({{"passed", passed}, {"failed", failed}, {"unsupported", unsupported}, {"problems", problems}});
}

std::string compiled_json(const std::string& architecture, const std::string& output,
                          const std::vector<jit::CompiledKernel>& compiled) {
  return printed({{"architecture", architecture}, {"output", output}, {"kernels", report_all(compiled)}});
}

std::string cache_json() {
  Json json = c_interface::report_cache_info();
  json.update(c_interface::report_cache_list());
  return printed(json);
}

std::string cache_problems_json() {
  return printed(c_interface::report_cache_problems());
}

std::string diagnosis_json(const Diagnosis& diagnosis) {
  Json json = {
      {"version", kp_version()}, {"findings", findings_of(diagnosis)}, {"self_tests", self_tests_of(diagnosis)}};
  json.update(c_interface::report_devices());
  json["nvrtc"] = report(jit::nvrtc_info());
  json["cache"] = c_interface::report_cache_info();
  json.update(c_interface::report_options());
  return printed(json);
}

}  // namespace kernel_pytorch::cli
