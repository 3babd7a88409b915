// The host side of the CPU kernel: chunks over threads, their sums added in the order of the chunks.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/reduce_norm/cpu/chunk.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::reduce_norm {
namespace {

void run(const Norm& problem, int, Context& context) {
  std::vector<int64_t> sizes;
  for (const TensorView& tensor : problem.tensors) sizes.push_back(tensor.element_count());
  const ChunkMap chunks(sizes, kChunkElements);
  std::vector<double> sums(static_cast<size_t>(chunks.count()));
  const ChunkKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kChunkKernels);
  constexpr int64_t kChunksPerTask = 4;
  parallel_for(context.threads, (chunks.count() + kChunksPerTask - 1) / kChunksPerTask, [&](int64_t task) {
    const int64_t end = std::min(chunks.count(), (task + 1) * kChunksPerTask);
    for (int64_t i = task * kChunksPerTask; i < end; ++i) {
      const Chunk chunk = chunks[i];
      const TensorView& tensor = problem.tensors[chunk.tensor];
      const char* start = tensor.as<const char>() + chunk.begin * size_of(tensor.dtype);
      sums[i] = kernels.sum_squares[static_cast<int>(tensor.dtype)](start, chunk.count);
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  store_element(problem.output.data, problem.output.dtype, 0, std::sqrt(total));
}

uint64_t code_version() {
  return hash_text("reduce_norm cpu 1");
}

}  // namespace

constinit const registry::Kernel<Norm> kCpu{
    .name = "cpu", .supports = supports_on_cpu<Norm>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::reduce_norm
