// Host side of the forward on mma: means of blocks as elements in scratch memory, then a block of threads for each
// tile.
#include <iterator>
#include <vector>

#include "kernel_pytorch/ops/native_sparse_attention/cuda_mma/launch.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/native_sparse_attention/cuda_mma/forward.cuh";
constexpr int64_t kMostBlocks = int64_t{1} << 31;

// `size` 0: the kernel of means.
DeviceCode code_of(DType dtype, int size) {
  const std::string own(element_type_name(dtype)), of = "kernel_pytorch::native_sparse_attention::";
  return {.source = kSource,
          .entry =
              size == 0 ? concat(of, "compress_elements<", own, ">") : concat(of, "mma_forward<", own, ", ", size, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
std::vector<DeviceCode> all_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kMmaTypes) {
    codes.push_back(code_of(dtype, 0));
    for (const int size : kMmaSizes) codes.push_back(code_of(dtype, size));
  }
  return codes;
}

registry::Support supports(const Forward& problem, const DeviceInfo& device) {
  const DType dtype = problem.query.dtype;
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) return registry::Support::no("takes bf16 and fp16");
  const Arguments a = arguments_of(problem);
  if (int64_t{a.batch} * std::max(a.queries, a.compressed) * a.key_heads >= kMostBlocks) {
    return registry::Support::no("has 2^31 tokens of key heads or more");
  }
  return registry::Support::unless(mma_obstacle(a, dtype, device, false));
}

void run(const Forward& problem, int, Context& context) {
  static KernelTable<std::size(kCudaTypes) * 3> table;
  const DType dtype = problem.query.dtype;
  const auto kernel = [&](int size) {
    const int index = cuda_type_index(dtype) * 3 + (size == 0 ? 0 : size == kMmaSizes[0] ? 1 : 2);
    return table.get(index, context, [&] { return code_of(dtype, size); });
  };
  Arguments all = arguments_of(problem);
  const bool needs_means =
      !problem.compressed_key.is_present() && (problem.gate_compressed.is_present() || all.chooses);
  if (needs_means) {
    all.means_of_key = all.compressed_key = scratch_rows(context, all, all.compressed, all.size, 2);
    all.means_of_value = all.compressed_value = scratch_rows(context, all, all.compressed, all.value_size, 2);
  }
  MmaArguments a = mma_arguments(all, context.info->cuda.shared_bytes_per_block, false);
  const int64_t heads = int64_t{all.batch} * all.key_heads;
  if (needs_means) start_mma(context, kernel(0), heads * all.compressed, 0, a);
  const int size = mma_size(all);
  start_mma(context, kernel(size), heads * a.tiles, mma_shared_bytes(a, size, false), a);
}

uint64_t hash() {
  return jit::source_hash(kSource);
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardMma{
    .name = "cuda_mma", .supports = supports, .run = run, .source_hash = hash, .device_code = all_code};

}  // namespace kernel_pytorch::native_sparse_attention
