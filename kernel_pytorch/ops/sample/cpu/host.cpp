// The host side of the CPU kernel: rows over the threads.
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/sample/cpu/row.h"
#include "kernel_pytorch/ops/sample/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sample {
namespace {

void run(const Draw& problem, int, Context& context) {
  const RowKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels);
  const auto draw_row = kernels.draw[cpu_type_index(problem.logits.dtype)];
  parallel_for(context.threads, problem.logits.sizes[0], [&](int64_t row) {
    const RowNumbers numbers = numbers_of(problem, row);
    const PhiloxBlock bits = philox(numbers.seed, numbers.position, 0);
    const int64_t token = draw_row({.logits = row_start(problem.logits, row),
                                    .count = problem.logits.sizes[1],
                                    .top_k = numbers.top_k,
                                    .temperature = numbers.temperature,
                                    .top_p = numbers.top_p,
                                    .min_p = numbers.min_p,
                                    .random = uint64_t{bits.words[1]} << 32 | bits.words[0]});
    problem.tokens.as<int32_t>()[row] = static_cast<int32_t>(token);
  });
}

uint64_t code_version() {
  return hash_text("sample cpu 1");
}

}  // namespace

constinit const registry::Kernel<Draw> kDrawCpu{
    .name = "cpu", .supports = supports_on_cpu<Draw>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::sample
