#include "kernel_pytorch/c/report.h"

#include <cmath>
#include <string_view>
#include <vector>

#include "kernel_pytorch/device/cpu/topology.h"

namespace kernel_pytorch::c_interface {
namespace {

std::string text(std::string_view view) {
  return std::string(view);
}

Json report_cpu(const CpuInfo& cpu) {
  const cpu_device::Topology& machine = cpu_device::topology();
  std::vector<size_t> nodes;  // CPUs of each
  for (const std::vector<int>& cpus : machine.nodes) nodes.push_back(cpus.size());
  return {{"isa", text(name_of(cpu.isa))},
          {"machine_isa", text(name_of(cpu.machine_isa))},
          {"cores", cpu.cores},
          {"l1_data_bytes", cpu.l1_data_bytes},
          {"l2_bytes", cpu.l2_bytes},
          {"l3_bytes", cpu.l3_bytes},
          {"amx_palette_missing", cpu.amx_palette_missing},
          {"logical_cpus", machine.cpus},
          {"physical_cores", machine.cores},
          {"slow_cores", machine.slow_cores},
          {"threads_per_core", machine.threads_per_core},
          {"sockets", machine.sockets},
          {"numa_node_cpus", nodes},
          {"quota_cpus", machine.quota},
          {"quota_file", machine.quota_file},
          {"memory_limit_bytes", machine.memory_limit},
          {"memory_limit_file", machine.memory_file}};
}

Json report_cuda(const CudaInfo& cuda) {
  return {{"gfx", cuda.gfx},
          {"compute_capability", {cuda.compute_major, cuda.compute_minor}},
          {"multiprocessors", cuda.multiprocessors},
          {"l2_bytes", cuda.l2_bytes},
          {"shared_bytes_per_block", cuda.shared_bytes_per_block},
          {"shared_bytes_per_multiprocessor", cuda.shared_bytes_per_multiprocessor},
          {"clock_khz", cuda.clock_khz},
          {"memory_clock_khz", cuda.memory_clock_khz},
          {"memory_bus_bits", cuda.memory_bus_bits},
          {"driver_version", cuda.driver_version}};
}

Json report_candidate(const registry::CandidateExplanation& candidate) {
  Json kernel = report(static_cast<const registry::KernelSupport&>(candidate));
  kernel["configs"] = candidate.configs;
  kernel["heuristic_config"] = candidate.heuristic_config;
  return kernel;
}

Json report_row(const tuning::TuneRow& row) {
  return {{"kernel", row.kernel},       {"config", row.config},   {"median_us", row.median_us},
          {"spread_us", row.spread_us}, {"failure", row.failure}, {"samples", row.samples}};
}

}  // namespace

Json report(const DeviceInfo& device) {
  Json json = {{"device", to_string(device.device)},
               {"name", device.name},
               {"memory_bytes", device.memory_bytes},
               {"fingerprint", device.fingerprint}};
  if (device.is_cpu()) json["cpu"] = report_cpu(device.cpu);
  if (device.is_cuda()) json["cuda"] = report_cuda(device.cuda);
  return json;
}

Json report(const OptionDescription& option) {
  return {{"variable", text(option.variable)},
          {"value", option.value},
          {"from_environment", option.from_environment},
          {"meaning", text(option.meaning)}};
}

Json report(const tuning::Key& key) {
  return {{"device", key.device}, {"op", key.op}, {"kernel_set", key.kernel_set}, {"problem", key.problem}};
}

Json report(const registry::ProblemRequest& request) {
  Json options = Json::object();
  for (const auto& [name, value] : request.options) options[name] = value;
  return {{"shape", request.shape},
          {"dtype", text(name_of(request.dtype))},
          {"device", to_string(request.device)},
          {"options", options}};
}

Json report(const registry::KernelSupport& support) {
  return {{"kernel", support.kernel},
          {"origin", support.origin == registry::Origin::kOurs ? "ours" : "vendor"},
          {"supported", support.supported},
          {"reason", support.reason},
          {"fallback", support.is_fallback}};
}

Json report(const registry::Explanation& explanation) {
  Json candidates = Json::array();
  for (const auto& candidate : explanation.candidates) candidates.push_back(report_candidate(candidate));
  Json parts = Json::array();
  for (const auto& part : explanation.parts) parts.push_back(report(part));
  return {{"op", explanation.key.op},
          {"device", explanation.device},
          {"key", report(explanation.key)},
          {"candidates", candidates},
          {"kernel", explanation.chosen_kernel},
          {"config", explanation.chosen_config},
          {"tier", text(name_of(explanation.tier))},
          {"measured_us", explanation.measured_us},
          {"parts", parts}};
}

Json report(const registry::BenchReport& bench) {
  Json rows = Json::array();
  for (const registry::BenchRow& row : bench.rows) {
    rows.push_back({{"kernel", row.kernel},
                    {"config", row.config},
                    {"tier", text(name_of(row.tier))},
                    {"median_us", row.median_us},
                    {"spread_us", row.spread_us},
                    {"gigabytes_per_second", row.gigabytes_per_second},
                    {"roof_share", row.roof_share},
                    {"launches", row.launches},
                    {"fills", row.fills}});
  }
  return {{"op", bench.op},           {"problem", report(bench.request)},
          {"device", bench.device},   {"cost", {{"bytes", bench.cost.bytes}, {"flops", bench.cost.flops}}},
          {"copy_us", bench.copy_us}, {"rows", rows}};
}

Json report(const tuning::TuneReport& tuned) {
  Json rows = Json::array();
  for (const tuning::TuneRow& row : tuned.rows) rows.push_back(report_row(row));
  return {{"key", report(tuned.key)}, {"rows", rows}, {"complete", tuned.complete}, {"seconds", tuned.seconds}};
}

Json report(const tuning::TuneProgress& progress) {
  return {{"done", progress.done},           {"total", progress.total},
          {"candidate", progress.candidate}, {"candidate_us", progress.candidate_us},
          {"best", progress.best},           {"best_us", progress.best_us}};
}

Json report(const tuning::ScopeProgress& progress) {
  Json json = report(progress.problem);
  json["op"] = progress.key.op;
  json["problem"] = progress.key.problem;
  json["problems_done"] = progress.problems_done;
  json["seconds"] = progress.seconds;
  json["budget_seconds"] = std::isfinite(progress.budget_seconds) ? Json(progress.budget_seconds) : Json(nullptr);
  return json;
}

Json report(const tuning::ScopeReport& scope) {
  Json tuned = Json::array(), untuned = Json::array();
  for (const tuning::TunedProblem& one : scope.tuned) {
    tuned.push_back({{"key", report(one.key)},
                     {"before", report_row(one.before)},
                     {"after", report_row(one.after)},
                     {"gains", one.gains()},
                     {"candidates", one.candidates},
                     {"measured", one.measured},
                     {"complete", one.complete},
                     {"seconds", one.seconds}});
  }
  for (const tuning::UntunedProblem& one : scope.untuned) {
    untuned.push_back({{"key", report(one.key)}, {"reason", one.reason}});
  }
  return {{"tuned", tuned}, {"untuned", untuned}, {"seconds", scope.seconds}};
}

Json report(const tuning::Decision& decision) {
  return {{"key", report(decision.key)},       {"kernel", decision.kernel},
          {"config", decision.config},         {"tier", text(name_of(decision.tier))},
          {"candidates", decision.candidates}, {"bytes", decision.bytes},
          {"flops", decision.flops},           {"count", decision.count}};
}

Json report(const tuning::StoredMeasurement& stored) {
  return {{"key", report(stored.key)},
          {"kernel", stored.measurement.kernel},
          {"config", stored.measurement.config},
          {"median_us", stored.measurement.median_us},
          {"spread_us", stored.measurement.spread_us},
          {"date", stored.measurement.date},
          {"library_version", stored.measurement.library_version}};
}

Json report(const tuning::StoreInfo& store) {
  return {{"path", store.path}, {"state", store.state}, {"schema_version", store.schema_version}, {"rows", store.rows}};
}

Json report(const jit::CubinCacheInfo& cubins) {
  return {
      {"directory", cubins.directory}, {"writable", cubins.writable}, {"files", cubins.files}, {"bytes", cubins.bytes}};
}

Json report(const jit::NvrtcInfo& nvrtc) {
  const std::string version = nvrtc.found ? std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) : "";
  return {{"found", nvrtc.found},
          {"version", version},
          {"path", nvrtc.path},
          {"how", nvrtc.how},
          {"absence", nvrtc.absence}};
}

Json report(const jit::CompiledKernel& kernel) {
  return {{"entry", kernel.entry},
          {"registers", kernel.registers},
          {"spill_bytes", kernel.spill_bytes},
          {"private_bytes", kernel.private_bytes},
          {"warnings", kernel.warnings},
          {"seconds", kernel.seconds},
          {"bytes", kernel.cubin.size()},
          {"log", kernel.log}};
}

Json report_devices() {
  return {{"devices", report_all(devices())}, {"cuda_absence", cuda_absence()}};
}

Json report_options() {
  return {{"options", report_all(describe_options())}};
}

Json report_kernels(const std::vector<const registry::AnyOperation*>& operations) {
  Json listed = Json::array();
  for (const registry::AnyOperation* operation : operations) {
    listed.push_back({{"op", operation->name}, {"kernels", operation->kernel_names}});
  }
  return {{"operations", listed}};
}

Json report_cache_info() {
  return {{"store", report(tuning::store_info())}, {"cubins", report(jit::cubin_cache_info())}};
}

Json report_cache_list() {
  return {{"measurements", report_all(tuning::list_store())}};
}

Json report_cache_problems() {
  Json cubins = Json::array();
  for (const jit::CubinCheck& check : jit::verify_cubin_cache()) {
    if (!check.problem.empty()) cubins.push_back({{"file", check.file}, {"problem", check.problem}});
  }
  return {{"store", tuning::verify_store()}, {"cubins", cubins}};
}

Json report_recorded() {
  return {{"recording", tuning::recording()}, {"decisions", report_all(tuning::recorded())}};
}

}  // namespace kernel_pytorch::c_interface
