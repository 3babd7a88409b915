// Host side of rope on a GPU: cuda_vector for heads of whole, aligned vectors, cuda_any for the rest.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/rope/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::rope {
namespace {

constexpr const char* kVectorSource = "kernel_pytorch/ops/rope/cuda/kernel.cuh";
constexpr const char* kAnySource = "kernel_pytorch/ops/rope/cuda/any.cuh";
constexpr const char* kStridedColumns = "columns are not contiguous";
constexpr const char* kMisaligned = "heads do not start at multiples of 16 bytes";
constexpr const char* kRaggedPairs = "rotary_dim / 2 or head_dim is not a multiple of 16 bytes";
constexpr const char* kTooMany = "2^31 or more pairs of vectors";

struct VectorConfig {
  int heads = 1;  // that a thread turns with the same cos and sin
};
constexpr auto kVectorConfigFields = config_fields<VectorConfig>(config_field<&VectorConfig::heads>());
constexpr ConfigFields fields_of(const VectorConfig&) {
  return kVectorConfigFields;
}
// H200, 4x4096x32x128 bf16 with 8 key heads, share of a copy.
constexpr VectorConfig kVectorConfigs[] = {
    {.heads = 1},  // 75 %
    {.heads = 2},  // 85 %
    {.heads = 4},  // 94 %
};

const char* heads_obstacle(const TensorView& view) {
  if (!view.is_present()) return nullptr;
  if (view.sizes[3] > 1 && view.strides[3] != 1) return kStridedColumns;
  return has_aligned_rows(view) ? nullptr : kMisaligned;
}

int64_t key_heads(const Problem& problem) {
  return problem.key.is_present() ? problem.key.sizes[2] : 0;
}
// Pairs of vectors that a head has, those of columns that are only copied included.
int64_t items_per_head(const Problem& problem) {
  const int64_t count = kVectorBytes / size_of(problem.query.dtype);
  const int64_t copied = problem.in_place ? 0 : problem.head_dim() - problem.rotary_dim;
  return problem.pairs() / count + (copied / count + 1) / 2;
}
int64_t groups_of(int64_t heads, int per_thread) {
  return (heads + per_thread - 1) / per_thread;
}
int64_t items_of(const Problem& problem, int per_thread) {
  return problem.batch() * problem.sequence() *
         (groups_of(problem.query.sizes[2], per_thread) + groups_of(key_heads(problem), per_thread)) *
         items_per_head(problem);
}

registry::Support supports_vector(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  for (const TensorView* view : {&problem.query, &problem.key, &problem.output_of_query(), &problem.output_of_key()}) {
    if (const char* obstacle = heads_obstacle(*view)) return registry::Support::no(obstacle);
  }
  const int64_t count = kVectorBytes / size_of(problem.query.dtype);
  if (problem.pairs() % count != 0 || problem.head_dim() % count != 0) return registry::Support::no(kRaggedPairs);
  if (items_of(problem, 1) >= int64_t{1} << 31) return registry::Support::no(kTooMany);
  return registry::Support::yes();
}
registry::Support supports_any(const Problem& problem, const DeviceInfo& device) {
  const char* obstacle = cuda_obstacle(problem.query.dtype, device);
  return registry::Support::unless(obstacle);
}

std::vector<std::string> vector_configs(const Problem&, const DeviceInfo&) {
  return config_texts(kVectorConfigs);
}
int vector_heuristic(const Problem& problem, const DeviceInfo& device) {
  for (int config = static_cast<int>(std::size(kVectorConfigs)) - 1; config > 0; --config) {
    const int heads = kVectorConfigs[config].heads;
    const bool fills_device = items_of(problem, heads) >= 8 * kThreads * device.cuda.multiprocessors;
    if (problem.query.sizes[2] >= heads && fills_device) return config;
  }
  return 0;
}

Divider divider(int64_t divisor) {
  return make_divider(static_cast<uint32_t>(divisor));
}

HeadTensor head_tensor(const TensorView& view) {
  if (!view.is_present()) return {nullptr, {}, 0};
  return {view.data,
          {view.strides[0], view.strides[1], view.strides[2], view.strides[3]},
          static_cast<int32_t>(view.sizes[2])};
}

TableArguments table_arguments(const Problem& problem) {
  const int64_t step = problem.table_step();
  const TensorView &cos = problem.cos, &sin = problem.sin, &positions = problem.positions;
  return {.cos = cos.data,
          .sin = sin.data,
          .inverse_frequencies = problem.inverse_frequencies.as<float>(),
          .cos_strides = {cos.strides[0], cos.strides[1], cos.strides[2] * step},
          .sin_strides = {sin.strides[0], sin.strides[1], sin.strides[2] * step},
          .rows = cos.is_present() ? cos.sizes[1] : 0,
          .positions = positions.data,
          .position_strides = {positions.strides[0], positions.strides[1]},
          .scale = static_cast<float>(problem.scale),
          .is_float = cos.dtype == DType::kFloat32,
          .positions_are_64 = positions.dtype == DType::kInt64,
          .inverse = problem.inverse};
}

DeviceCode vector_code(DType dtype, bool interleaved, int heads) {
  return {.source = kVectorSource,
          .entry = concat("kernel_pytorch::rope::rotate_vectors<", element_type_name(dtype), ", ",
                          bool_name(interleaved), ", ", heads, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode any_code(DType dtype) {
  return {.source = kAnySource,
          .entry = concat("kernel_pytorch::rope::rotate_any<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void run_vector(const Problem& problem, int config, Context& context) {
  static const std::string kLabel = "rope rotate_vectors";
  static KernelTable<std::size(kVectorConfigs) * std::size(kCudaTypes) * 2> table;
  const int heads = kVectorConfigs[config].heads;
  const int64_t items = items_of(problem, heads);
  if (items == 0) return;
  const DType dtype = problem.query.dtype;
  const int entry =
      (config * static_cast<int>(std::size(kCudaTypes)) + cuda_type_index(dtype)) * 2 + (problem.interleaved ? 1 : 0);
  CUkern_st* kernel = table.get(entry, context, [&] { return vector_code(dtype, problem.interleaved, heads); });
  const int64_t per_head = items_per_head(problem), query_groups = groups_of(problem.query.sizes[2], heads);
  VectorArguments arguments{
      .query = head_tensor(problem.query),
      .key = head_tensor(problem.key),
      .query_output = head_tensor(problem.output_of_query()),
      .key_output = head_tensor(problem.output_of_key()),
      .table = table_arguments(problem),
      .items_per_token = divider((query_groups + groups_of(key_heads(problem), heads)) * per_head),
      .items_per_head = divider(per_head),
      .sequence = divider(problem.sequence()),
      .items = static_cast<uint32_t>(items),
      .query_groups = static_cast<int32_t>(query_groups),
      .pair_items = static_cast<int32_t>(problem.pairs() * size_of(dtype) / kVectorBytes),
      .pairs = static_cast<int32_t>(problem.pairs()),
      .head_dim = static_cast<int32_t>(problem.head_dim())};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  launch.grid_x = static_cast<unsigned>((items + kThreads - 1) / kThreads);
  launch.block_x = kThreads;
  launch.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
}

void run_any(const Problem& problem, int, Context& context) {
  static const std::string kLabel = "rope rotate_any";
  static KernelTable<std::size(kCudaTypes)> table;
  const int64_t heads = problem.query.sizes[2] + key_heads(problem);
  const int64_t items = problem.batch() * problem.sequence() * heads * problem.head_dim();
  if (items == 0) return;
  const DType dtype = problem.query.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return any_code(dtype); });
  AnyArguments arguments{.query = head_tensor(problem.query),
                         .key = head_tensor(problem.key),
                         .query_output = head_tensor(problem.output_of_query()),
                         .key_output = head_tensor(problem.output_of_key()),
                         .table = table_arguments(problem),
                         .batch = problem.batch(),
                         .sequence = problem.sequence(),
                         .head_dim = static_cast<int32_t>(problem.head_dim()),
                         .pairs = static_cast<int32_t>(problem.pairs()),
                         .interleaved = problem.interleaved,
                         .copies_rest = !problem.in_place};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  const int64_t most = 64 * std::max<int64_t>(context.info->cuda.multiprocessors, 1);
  launch.grid_x = static_cast<unsigned>(std::min((items / 2 + kThreads) / kThreads, most));
  launch.block_x = kThreads;
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
}

uint64_t vector_hash() {
  return jit::source_hash(kVectorSource);
}
uint64_t any_hash() {
  return jit::source_hash(kAnySource);
}
std::vector<DeviceCode> vector_codes() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (const VectorConfig& config : kVectorConfigs) {
      for (bool interleaved : {false, true}) codes.push_back(vector_code(dtype, interleaved, config.heads));
    }
  }
  return codes;
}
std::vector<DeviceCode> any_codes() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) codes.push_back(any_code(dtype));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Problem> kCudaVector{.name = "cuda_vector",
                                                      .origin = registry::Origin::kOurs,
                                                      .supports = supports_vector,
                                                      .configs = vector_configs,
                                                      .heuristic = vector_heuristic,
                                                      .run = run_vector,
                                                      .source_hash = vector_hash,
                                                      .device_code = vector_codes};
constinit const registry::Kernel<Problem> kCudaAny{.name = "cuda_any",
                                                   .origin = registry::Origin::kOurs,
                                                   .supports = supports_any,
                                                   .run = run_any,
                                                   .source_hash = any_hash,
                                                   .device_code = any_codes};

}  // namespace kernel_pytorch::rope
