// What --json prints, for every command. The conversions of values are the C interface's; this file puts them together,
// and is the only one of the command line that pays for compiling a JSON library.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/cli/diagnosis.h"
#include "kernel_pytorch/cli/verification.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/registry/any_operation.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::c_interface {
struct SampleComparison;
}

namespace kernel_pytorch::cli {

std::string version_json();
std::string devices_json();
std::string kernels_json(const std::vector<const registry::AnyOperation*>& operations);
std::string explanations_json(const std::vector<registry::Explanation>& explanations);
std::string tuning_json(const std::vector<tuning::TuneReport>& reports);
std::string benchmarks_json(const std::vector<registry::BenchReport>& reports);
std::string comparison_json(const c_interface::SampleComparison& comparison);
std::string verifications_json(const std::vector<Verification>& verifications);
std::string compiled_json(const std::string& architecture, const std::string& output,
                          const std::vector<jit::CompiledKernel>& compiled);
std::string cache_json();
std::string cache_problems_json();
std::string diagnosis_json(const Diagnosis& diagnosis);

}  // namespace kernel_pytorch::cli
