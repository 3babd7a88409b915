// Host side of the CUDA kernels: means of blocks into scratch memory, then a block of threads for each token of a key
// head; backward: the same for gradients of queries, then a block for each tile of compressed rows and of keys.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/native_sparse_attention/cuda/arguments.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::native_sparse_attention {
namespace {

constexpr const char* kForwardSource = "kernel_pytorch/ops/native_sparse_attention/cuda/forward.cuh";
constexpr const char* kBackwardSource = "kernel_pytorch/ops/native_sparse_attention/cuda/backward.cuh";
constexpr int64_t kMostBlocks = int64_t{1} << 31;

enum class Entry : uint8_t { kCompress, kForward, kBackwardQuery, kBackwardCompressed, kBackwardKeys };
constexpr Entry kForwardEntries[] = {Entry::kCompress, Entry::kForward};
constexpr Entry kBackwardEntries[] = {Entry::kCompress, Entry::kBackwardQuery, Entry::kBackwardCompressed,
                                      Entry::kBackwardKeys};

// `has_means`: compressed rows are means, in float.
DeviceCode code_of(Entry entry, DType dtype, bool has_means, bool is_backward) {
  const std::string own(element_type_name(dtype)), rows = has_means ? "float" : own, both = concat(own, ", ", rows);
  const auto text = [&]() -> std::string {
    switch (entry) {
      case Entry::kCompress:
        return concat("compress<", own, ">");
      case Entry::kForward:
        return concat("forward<", both, ">");
      case Entry::kBackwardQuery:
        return concat("backward_query<", both, ">");
      case Entry::kBackwardCompressed:
        return concat("backward_keys<", both, ", true>");
      case Entry::kBackwardKeys:
        return concat("backward_keys<", own, ", ", own, ", false>");
    }
    return "";
  };
  return {.source = is_backward ? kBackwardSource : kForwardSource,
          .entry = concat("kernel_pytorch::native_sparse_attention::", text()),
          .minimum_capability = 80,
          .architecture_specific = false};
}
template <const auto& kEntries, bool kIsBackward>
std::vector<DeviceCode> all_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) {
    for (const Entry entry : kEntries) {
      codes.push_back(code_of(entry, dtype, true, kIsBackward));
      const bool has_rows = entry != Entry::kCompress && entry != Entry::kBackwardKeys;
      if (has_rows && dtype != DType::kFloat32) codes.push_back(code_of(entry, dtype, false, kIsBackward));
    }
  }
  return codes;
}

int64_t list_rows(const Arguments& a) {
  return int64_t{a.list_length} * a.block_size;
}

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  const Arguments a = arguments_of(problem);
  const bool is_backward = requires {
    problem.grad_output;
  };
  const int64_t floats = is_backward ? std::max(backward_floats(a), tile_floats(a)) : forward_floats(a);
  if (floats * 4 + 1024 > device.cuda.shared_bytes_per_block) {
    return registry::Support::no(
        "heads of a group, their sizes, the list or the blocks of keys do not fit into shared memory");
  }
  const int64_t tokens = int64_t{a.batch} * a.queries * a.key_heads;
  const int64_t rows = int64_t{a.batch} * std::max(a.compressed, a.keys) * a.key_heads;
  if (std::max(tokens, rows) >= kMostBlocks) return registry::Support::no("has 2^31 tokens of key heads or more");
  return registry::Support::unless(list_rows(a) >= kMostBlocks ? "a list names 2^31 keys or more" : nullptr);
}

void start(Context& context, CUkern_st* kernel, int64_t blocks, int64_t floats, Arguments& arguments) {
  static const std::string kLabel = "native_sparse_attention";
  if (blocks == 0) return;
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  shape.shared_bytes = static_cast<unsigned>(floats * 4);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

template <class Problem>
struct Launcher {
  static constexpr bool kIsBackward = requires(const Problem& problem) { problem.grad_output; };
  Context& context;
  DType dtype;
  bool has_means;

  void operator()(Entry entry, int64_t blocks, int64_t floats, Arguments& arguments) const {
    static KernelTable<5 * std::size(kCudaTypes) * 2> table;
    const int index = (static_cast<int>(entry) * static_cast<int>(std::size(kCudaTypes)) + cuda_type_index(dtype)) * 2;
    CUkern_st* kernel =
        table.get(index + has_means, context, [&] { return code_of(entry, dtype, has_means, kIsBackward); });
    start(context, kernel, blocks, floats, arguments);
  }
};

void run_forward(const Forward& problem, int, Context& context) {
  Arguments a = arguments_of(problem);
  const bool needs_rows = problem.gate_compressed.is_present() || a.chooses;
  const bool has_means = !problem.compressed_key.is_present();
  const Launcher<Forward> launch{context, problem.query.dtype, has_means};
  if (needs_rows && has_means) {
    a.means_of_key = a.compressed_key = scratch_rows(context, a, a.compressed, a.size, sizeof(float));
    a.means_of_value = a.compressed_value = scratch_rows(context, a, a.compressed, a.value_size, sizeof(float));
    launch(Entry::kCompress, int64_t{a.batch} * a.key_heads * a.compressed, 0, a);
  }
  launch(Entry::kForward, int64_t{a.batch} * a.queries * a.key_heads, forward_floats(a), a);
}

void run_backward(const Backward& problem, int, Context& context) {
  Arguments a = arguments_of(problem);
  const DType dtype = problem.query.dtype;
  const bool has_branch = problem.gate_compressed.is_present(), has_means = !problem.compressed_key.is_present();
  const Launcher<Backward> launch{context, dtype, has_means};
  const int64_t heads = int64_t{a.batch} * a.key_heads;
  allocate_deltas(context, a);
  if (has_branch && has_means) {
    a.means_of_key = a.compressed_key = scratch_rows(context, a, a.compressed, a.size, sizeof(float));
    a.means_of_value = a.compressed_value = scratch_rows(context, a, a.compressed, a.value_size, sizeof(float));
    a.grad_compressed_key = scratch_rows(context, a, a.compressed, a.size, sizeof(float));
    a.grad_compressed_value = scratch_rows(context, a, a.compressed, a.value_size, sizeof(float));
    a.adds_means = true;
    launch(Entry::kCompress, heads * a.compressed, 0, a);
  }
  launch(Entry::kBackwardQuery, int64_t{a.batch} * a.queries * a.key_heads, backward_floats(a), a);
  if (has_branch || a.grad_compressed_key.data != nullptr) {
    launch(Entry::kBackwardCompressed, heads * divide_up(a.compressed, kTileRows), tile_floats(a), a);
  }
  launch(Entry::kBackwardKeys, heads * divide_up(a.keys, kTileRows), tile_floats(a), a);
}

uint64_t forward_hash() {
  return jit::source_hash(kForwardSource);
}
uint64_t backward_hash() {
  return jit::source_hash(kBackwardSource);
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda",
                                                       .supports = supports<Forward>,
                                                       .run = run_forward,
                                                       .source_hash = forward_hash,
                                                       .device_code = all_code<kForwardEntries, false>};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda",
                                                         .supports = supports<Backward>,
                                                         .run = run_backward,
                                                         .source_hash = backward_hash,
                                                         .device_code = all_code<kBackwardEntries, true>};

}  // namespace kernel_pytorch::native_sparse_attention
