// Host side of the norm of a list on the GPU: one launch for every 1,024 tensors, and a memset of the counter by which
// the last block knows itself.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/reduce_norm/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"
#include "kernel_pytorch/ops/support/tensor_list.h"

namespace kernel_pytorch::reduce_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/reduce_norm/cuda/kernel.cuh";
constexpr int64_t kMostChunks = int64_t{1} << 31;
static_assert(kBlockElements == kChunkElements);

DeviceCode device_code() {
  return {.source = kSource,
          .entry = "kernel_pytorch::reduce_norm::norm",
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports(const Norm& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  for (const TensorView& tensor : problem.tensors) {
    if (cuda_type_index(tensor.dtype) < 0) return registry::Support::no(kNeedsSmallFloat);
  }
  return registry::Support::yes();
}

void run(const Norm& problem, int, Context& context) {
  static const std::string kLabel = "reduce_norm";
  static KernelTable<1> table;
  const int device = context.info->device.index;
  std::vector<const TensorView*> tensors;
  std::vector<int64_t> sizes;
  for (const TensorView& tensor : problem.tensors) {
    if (tensor.element_count() == 0) continue;
    tensors.push_back(&tensor);
    sizes.push_back(tensor.element_count());
  }
  const int64_t all_chunks = ChunkMap(sizes, kChunkElements).count();
  KP_CHECK(all_chunks < kMostChunks, "reduce_norm: the list has ", all_chunks, " chunks of ", kChunkElements,
           " elements; at most ", kMostChunks, " are supported, split it");
  if (tensors.empty()) {
    return cuda_device::fill_bytes(device, problem.output.data, 0, sizeof(float), context.stream);
  }
  CUkern_st* kernel = table.get(0, context, device_code);
  Arguments arguments{};
  arguments.all_partials = static_cast<int32_t>(all_chunks);
  arguments.partials = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(all_chunks) * sizeof(float)));
  auto* arrived = static_cast<uint32_t*>(context.scratch->allocate(sizeof(uint32_t)));
  cuda_device::fill_bytes(device, arrived, 0, sizeof(uint32_t), context.stream);
  arguments.output = problem.output.as<float>();
  for (size_t first = 0; first < tensors.size(); first += kMaxTensors) {
    const size_t count = std::min<size_t>(kMaxTensors, tensors.size() - first);
    const ChunkMap chunks({sizes.data() + first, count}, kChunkElements);
    for (size_t i = 0; i < count; ++i) {
      arguments.data[i] = tensors[first + i]->data;
      arguments.elements[i] = sizes[first + i];
      arguments.chunk_end[i] = static_cast<int32_t>(chunks.end_of(static_cast<int64_t>(i)));
      arguments.type[i] = static_cast<Element>(cuda_type_index(tensors[first + i]->dtype));
    }
    arguments.tensors = static_cast<int32_t>(count);
    arguments.arrived = first + count == tensors.size() ? arrived : nullptr;
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.grid_x = static_cast<unsigned>(chunks.count());
    shape.block_x = kThreads;
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
    arguments.first_partial += static_cast<int32_t>(chunks.count());
  }
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}

std::vector<DeviceCode> all_device_code() {
  return {device_code()};
}

}  // namespace

constinit const registry::Kernel<Norm> kCuda{
    .name = "cuda", .supports = supports, .run = run, .source_hash = source_hash, .device_code = all_device_code};

}  // namespace kernel_pytorch::reduce_norm
