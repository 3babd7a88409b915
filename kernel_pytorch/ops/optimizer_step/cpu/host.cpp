// The host side of the CPU kernel: chunks of all parameters over the threads, one list of them for the whole call.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/optimizer_step/cpu/chunk.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::optimizer_step {
namespace {

// Elements that a thread takes at a time: multiples of every group and of Philox blocks. Many threads share the
// memory's bandwidth and take few, so that they end together; few threads take as many as leave the starts of chunks
// little of the time (NOTES.md).
constexpr int64_t kLeastChunk = 16384, kMostChunk = 131072, kChunksEach = 16;
constexpr int kManyThreads = 8;

int64_t chunk_elements(const std::vector<int64_t>& sizes, const Threads* threads) {
  const int count = threads == nullptr ? 1 : threads->count();
  if (count >= kManyThreads) return kLeastChunk;
  const int64_t each = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) / (kChunksEach * count);
  return std::clamp(each / kLeastChunk * kLeastChunk, kLeastChunk, kMostChunk);
}

constexpr DynamicMap<true> kFirstMap = make_dynamic_map<true>();
constexpr DynamicMap<false> kSecondMap = make_dynamic_map<false>();

// How far ahead of its loads the kernel of plain states prefetches: a machine's matter. One-off medians of AdamW, 4 M
// parameters, one thread.
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

std::vector<std::string> configs(const Step& step, const DeviceInfo&) {
  if (step.storage != Storage::kPlain) return {};
  return config_texts(kPrefetchConfigs);
}

int heuristic(const Step& step, const DeviceInfo& device) {
  if (step.storage != Storage::kPlain || device.name.find("AMD") == std::string::npos) return 0;
  const bool is_narrow = !step.parameters.empty() && step.parameters[0].first.dtype != DType::kFloat32;
  return is_narrow ? 1 : 2;
}

registry::Support supports(const Step& problem, const DeviceInfo& device) {
  const DType dtype = problem.parameters.empty() ? DType::kFloat32 : problem.parameters[0].parameter.dtype;
  return registry::Support::unless(cpu_obstacle(dtype, device));
}

Types types_of(const Parameter& one) {
  const bool is_narrow = one.first.is_present() && one.first.dtype != DType::kFloat32;
  return static_cast<Types>(cpu_type_index(one.parameter.dtype) + (is_narrow ? kFloatStates : 0));
}

auto kernel_of(const Step& step, CpuIsa isa) {
  const int rule = static_cast<int>(step.rule), dtype = cpu_type_index(step.parameters[0].parameter.dtype);
  if (step.storage != Storage::kPlain) {
    return KP_AT_CPU_LEVEL(isa, kCodedKernels).step[rule][static_cast<int>(step.storage) - 1][dtype];
  }
  const PlainKernels& plain = KP_AT_CPU_LEVEL(isa, kPlainKernels);
  if (step.rule == Rule::kAdamW) return plain.adamw[static_cast<int>(types_of(step.parameters[0]))];
  return step.rule == Rule::kLion ? plain.lion[dtype] : plain.sgd[dtype];
}

template <class T = void>
T* element(const TensorView& view, int64_t index) {
  char* address = view.is_present() ? view.as<char>() + index * size_of(view.dtype) : nullptr;
  return static_cast<T*>(static_cast<void*>(address));
}

void run(const Step& step, int config, Context& context) {
  if (step.parameters.empty() || is_skipped(step)) return;
  std::vector<int64_t> sizes;
  std::vector<Factors> factors;
  for (const Parameter& one : step.parameters) {
    sizes.push_back(one.parameter.element_count());
    factors.push_back(factors_of<float>(step, one));
  }
  const ChunkMap chunks(sizes, chunk_elements(sizes, context.threads));
  const int64_t group = group_elements(step.storage);
  const bool is_stochastic = step.seed.is_present();
  const std::vector<int64_t> starts = random_starts(step);
  const int64_t* seed = step.seed.as<const int64_t>();
  const auto kernel = kernel_of(step, context.info->cpu.isa);
  parallel_for(context.threads, chunks.count(), [&](int64_t index) {
    const Chunk chunk = chunks[index];
    const Parameter& one = step.parameters[chunk.tensor];
    kernel({.count = chunk.count,
            .parameter = element(one.parameter, chunk.begin),
            .gradient = element(one.gradient, chunk.begin),
            .correction = element<uint8_t>(one.correction, chunk.begin),
            .master = element<float>(one.master, chunk.begin),
            .first = element(one.first, chunk.begin),
            .second = element(one.second, chunk.begin),
            .maximum = element(one.maximum, chunk.begin),
            .first_scale = element<float>(one.first_scale, chunk.begin / group),
            .second_scale = element<float>(one.second_scale, chunk.begin / group),
            .factors = factors[chunk.tensor],
            .first_map = &kFirstMap,
            .second_map = &kSecondMap,
            .prefetch_bytes = step.storage == Storage::kPlain ? kPrefetchConfigs[config].prefetch_bytes : 0,
            .is_stochastic = is_stochastic,
            .seed = is_stochastic ? static_cast<uint64_t>(seed[0]) : 0,
            .offset = is_stochastic ? static_cast<uint64_t>(seed[1]) : 0,
            .block = static_cast<uint64_t>(starts[chunk.tensor] + chunk.begin / 8)});
  });
  for (const Parameter& one : step.parameters) *one.step.as<float>() += 1;
}

uint64_t code_version() {
  return hash_text("optimizer_step cpu 3");
}

}  // namespace

constinit const registry::Kernel<Step> kCpu{.name = "cpu",
                                            .supports = supports,
                                            .configs = configs,
                                            .heuristic = heuristic,
                                            .run = run,
                                            .source_hash = code_version};

}  // namespace kernel_pytorch::optimizer_step
