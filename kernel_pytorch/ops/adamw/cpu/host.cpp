// The host side of the CPU kernel: chunks of all parameters over the threads, one list of them for the whole call.
#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/adamw/cpu/chunk.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/adamw/rates.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::adamw {
namespace {

constexpr int64_t kChunkElements = 32768;  // a multiple of 8: Philox blocks are whole

// How far ahead of its loads the kernel prefetches: a machine's matter. One-off medians of 4 M parameters, one thread.
struct PrefetchConfig {
  int prefetch_bytes = 0;
};
constexpr auto kPrefetchFields = config_fields<PrefetchConfig>(config_field<&PrefetchConfig::prefetch_bytes>());
constexpr ConfigFields fields_of(const PrefetchConfig&) {
  return kPrefetchFields;
}
constexpr PrefetchConfig kPrefetchConfigs[] = {
    {.prefetch_bytes = 2048},  // Intel: fp32 7 % faster than without
    {.prefetch_bytes = 512},   // AMD EPYC: bf16 1.65 ms, without 1.73, with 2048 1.89
    {.prefetch_bytes = 0},     // AMD EPYC: fp32 2.93 ms, with 512 3.20, with 2048 3.38
};

std::vector<std::string> configs(const Step&, const DeviceInfo&) {
  return config_texts(kPrefetchConfigs);
}

int heuristic(const Step& step, const DeviceInfo& device) {
  if (device.name.find("AMD") == std::string::npos) return 0;
  const bool is_narrow = !step.parameters.empty() && step.parameters[0].exp_avg.dtype != DType::kFloat32;
  return is_narrow ? 1 : 2;
}

registry::Support supports(const Step& problem, const DeviceInfo& device) {
  const DType dtype = problem.parameters.empty() ? DType::kFloat32 : problem.parameters[0].parameter.dtype;
  return registry::Support::unless(cpu_obstacle(dtype, device));
}

Types types_of(const Parameter& one) {
  const bool same = one.exp_avg.dtype == one.parameter.dtype;
  switch (one.parameter.dtype) {
    case DType::kBFloat16:
      return same ? Types::kBFloat16 : Types::kBFloat16Float;
    case DType::kFloat16:
      return same ? Types::kFloat16 : Types::kFloat16Float;
    default:
      return same ? Types::kFloat : Types::kFloatBFloat16;
  }
}

void* element(const TensorView& view, int64_t index) {
  return view.is_present() ? view.as<char>() + index * size_of(view.dtype) : nullptr;
}

// What the chunks of a parameter share.
ChunkArguments shared_arguments(const Step& step, const Parameter& one) {
  const Factors factors = factors_of(step, one);
  ChunkArguments arguments{.gradient_factor = static_cast<float>(factors.gradient),
                           .keep = static_cast<float>(factors.keep),
                           .step_size = static_cast<float>(factors.step_size),
                           .root = static_cast<float>(factors.root),
                           .first = static_cast<float>(1 - step.beta1),
                           .second = static_cast<float>(1 - step.beta2),
                           .beta2 = static_cast<float>(step.beta2),
                           .eps = static_cast<float>(step.eps),
                           .is_stochastic = step.seed.is_present()};
  if (step.seed.is_present()) {
    arguments.seed = static_cast<uint64_t>(step.seed.as<const int64_t>()[0]);
    arguments.offset = static_cast<uint64_t>(step.seed.as<const int64_t>()[1]);
  }
  return arguments;
}

void run(const Step& step, int config, Context& context) {
  if (step.parameters.empty() || is_skipped(step)) return;
  std::vector<int64_t> sizes;
  std::vector<ChunkArguments> shared;
  for (const Parameter& one : step.parameters) {
    sizes.push_back(one.parameter.element_count());
    shared.push_back(shared_arguments(step, one));
  }
  const std::vector<int64_t> starts = random_starts(step);
  const ChunkMap chunks(sizes, kChunkElements);
  const auto update =
      KP_AT_CPU_LEVEL(context.info->cpu.isa, kChunkKernels).update[static_cast<int>(types_of(step.parameters[0]))];
  parallel_for(context.threads, chunks.count(), [&](int64_t index) {
    const Chunk chunk = chunks[index];
    const Parameter& one = step.parameters[chunk.tensor];
    ChunkArguments arguments = shared[chunk.tensor];
    arguments.count = chunk.count;
    arguments.parameter = element(one.parameter, chunk.begin);
    arguments.gradient = element(one.gradient, chunk.begin);
    arguments.exp_avg = element(one.exp_avg, chunk.begin);
    arguments.exp_avg_sq = element(one.exp_avg_sq, chunk.begin);
    arguments.max_exp_avg_sq = element(one.max_exp_avg_sq, chunk.begin);
    arguments.master = static_cast<float*>(element(one.master, chunk.begin));
    arguments.prefetch_bytes = kPrefetchConfigs[config].prefetch_bytes;
    arguments.block = static_cast<uint64_t>(starts[chunk.tensor] + chunk.begin / 8);
    update(arguments);
  });
  for (const Parameter& one : step.parameters) *one.step.as<float>() += 1;
}

uint64_t code_version() {
  return hash_text("adamw cpu 2");
}

}  // namespace

constinit const registry::Kernel<Step> kCpu{.name = "cpu",
                                            .supports = supports,
                                            .configs = configs,
                                            .heuristic = heuristic,
                                            .run = run,
                                            .source_hash = code_version};

}  // namespace kernel_pytorch::adamw
