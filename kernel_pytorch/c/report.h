// Values of the core as JSON, for the C interface and for `kpt ... --json`: one conversion for both, so that what a
// program reads does not depend on how it asked. Field names are the structs'; units stay in them.
#pragma once

#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/tuning/autotune_scope.h"
#include "kernel_pytorch/tuning/autotuner.h"
#include "kernel_pytorch/tuning/selection.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::c_interface {

KP_EXPORT Json report(const DeviceInfo& device);
KP_EXPORT Json report(const OptionDescription& option);
KP_EXPORT Json report(const tuning::Key& key);
KP_EXPORT Json report(const registry::ProblemRequest& request);
KP_EXPORT Json report(const registry::KernelSupport& support);
KP_EXPORT Json report(const registry::Explanation& explanation);
KP_EXPORT Json report(const registry::BenchReport& bench);
KP_EXPORT Json report(const tuning::TuneReport& tuned);
KP_EXPORT Json report(const tuning::TuneProgress& progress);
KP_EXPORT Json report(const tuning::ScopeProgress& progress);
KP_EXPORT Json report(const tuning::ScopeReport& scope);
KP_EXPORT Json report(const tuning::Decision& decision);
KP_EXPORT Json report(const tuning::StoredMeasurement& stored);
KP_EXPORT Json report(const tuning::StoreInfo& store);
KP_EXPORT Json report(const jit::CubinCacheInfo& cubins);
KP_EXPORT Json report(const jit::NvrtcInfo& nvrtc);
KP_EXPORT Json report(const jit::CompiledKernel& kernel);

// Whole answers.
KP_EXPORT Json report_devices();
KP_EXPORT Json report_options();
KP_EXPORT Json report_kernels(const std::vector<const registry::AnyOperation*>& operations);
KP_EXPORT Json report_cache_info();
KP_EXPORT Json report_cache_list();
KP_EXPORT Json report_cache_problems();  // only what is damaged
KP_EXPORT Json report_recorded();

template <class Value>
Json report_all(const std::vector<Value>& values) {
  Json array = Json::array();
  for (const Value& value : values) array.push_back(report(value));
  return array;
}

}  // namespace kernel_pytorch::c_interface
