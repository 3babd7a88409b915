// The host side of the CPU kernel: chunks of all parameters over the threads, one list of them for the whole call.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/optimizer_step/cpu/chunk.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::optimizer_step {
namespace {

constexpr int64_t kChunkElements = 32768;  // a multiple of every group

constexpr DynamicMap<true> kFirstMap = make_dynamic_map<true>();
constexpr DynamicMap<false> kSecondMap = make_dynamic_map<false>();

registry::Support supports(const Step& problem, const DeviceInfo& device) {
  const DType dtype = problem.parameters.empty() ? DType::kFloat32 : problem.parameters[0].parameter.dtype;
  return registry::Support::unless(cpu_obstacle(dtype, device));
}

template <class T = void>
T* element(const TensorView& view, int64_t index) {
  char* address = view.is_present() ? view.as<char>() + index * size_of(view.dtype) : nullptr;
  return static_cast<T*>(static_cast<void*>(address));
}

void run(const Step& step, int, Context& context) {
  if (step.parameters.empty() || is_skipped(step)) return;
  std::vector<int64_t> sizes;
  std::vector<Factors> factors;
  for (const Parameter& one : step.parameters) {
    sizes.push_back(one.parameter.element_count());
    factors.push_back(factors_of(step, one));
  }
  const ChunkMap chunks(sizes, kChunkElements);
  const int64_t group = group_elements(step.storage);
  const auto kernel = KP_AT_CPU_LEVEL(context.info->cpu.isa, kChunkKernels)
                          .step[static_cast<int>(step.rule)][static_cast<int>(step.storage)]
                               [cpu_type_index(step.parameters[0].parameter.dtype)];
  parallel_for(context.threads, chunks.count(), [&](int64_t index) {
    const Chunk chunk = chunks[index];
    const Parameter& one = step.parameters[chunk.tensor];
    kernel({.count = chunk.count,
            .parameter = element(one.parameter, chunk.begin),
            .gradient = element(one.gradient, chunk.begin),
            .correction = element<uint8_t>(one.correction, chunk.begin),
            .first = element(one.first, chunk.begin),
            .second = element(one.second, chunk.begin),
            .first_scale = element<float>(one.first_scale, chunk.begin / group),
            .second_scale = element<float>(one.second_scale, chunk.begin / group),
            .factors = factors[chunk.tensor],
            .first_map = &kFirstMap,
            .second_map = &kSecondMap});
  });
  for (const Parameter& one : step.parameters) *one.step.as<float>() += 1;
}

uint64_t code_version() {
  return hash_text("optimizer_step cpu 2");
}

}  // namespace

constinit const registry::Kernel<Step> kCpu{
    .name = "cpu", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::optimizer_step
