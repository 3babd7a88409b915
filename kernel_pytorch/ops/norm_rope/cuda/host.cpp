// Host side of norm_rope on a GPU: heads of whole, aligned vectors over a few lanes of a warp.
#include <algorithm>
#include <type_traits>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/norm_rope/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/norm_rope/operation.h"
#include "kernel_pytorch/ops/support/column_sums.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::norm_rope {

constexpr auto kHeadConfigFields = config_fields<HeadConfig>(
    config_field<&HeadConfig::lanes>(), config_field<&HeadConfig::heads>(), config_field<&HeadConfig::rest>());
constexpr ConfigFields fields_of(const HeadConfig&) {
  return kHeadConfigFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/norm_rope/cuda/kernel.cuh";
constexpr const char* kStrided = "columns of x, a gradient, cos or sin are not contiguous";
constexpr const char* kMisaligned = "heads, or rows of cos and sin, do not start at multiples of 16 bytes";
constexpr const char* kRagged = "rotary_dim / 2 or the columns behind rotary_dim are no whole vectors of 16 bytes";
constexpr const char* kWide = "a head does not fit the registers of a warp";
constexpr const char* kTooMany = "2^31 or more heads";
// Heads at a time. Backward holds two tensors: four heads of them would spill.
template <class Problem>
constexpr int kMostHeads = std::is_same_v<Problem, Forward> ? 4 : 2;

template <class Problem>
int64_t vector_count(const Problem& problem, int64_t columns) {
  return columns * size_of(problem.x.dtype) / kVectorBytes;
}
// Lanes that hold the pairs in one turn and the rest in two; 0: more than a warp has.
template <class Problem>
int lanes_of(const Problem& problem) {
  const int64_t pairs = vector_count(problem, problem.rotary_dim / 2);
  const int64_t rest = vector_count(problem, problem.x.sizes[3] - problem.rotary_dim);
  for (int lanes : {4, 8, 16, 32}) {
    if (pairs <= lanes && rest <= 2 * lanes) return lanes;
  }
  return 0;
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device,
                        std::initializer_list<const TensorView*> tensors) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  for (const TensorView* view : tensors) {
    if (!view->is_present()) continue;
    if (view->size(-1) > 1 && view->stride(-1) != 1) return kStrided;
    if (!has_aligned_rows(*view)) return kMisaligned;
  }
  const int64_t count = kVectorBytes / size_of(problem.x.dtype);
  if (problem.rotary_dim / 2 % count != 0 || problem.x.sizes[3] % count != 0) return kRagged;
  if (lanes_of(problem) == 0) return kWide;
  if (rows_of(problem.x) >= int64_t{1} << 31) return kTooMany;
  return parameter_obstacle(problem.weight);
}
registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(
      obstacle_of(problem, device, {&problem.x, &problem.output, &problem.cos, &problem.sin}));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(
      obstacle_of(problem, device, {&problem.x, &problem.grad_output, &problem.grad_x, &problem.cos, &problem.sin}));
}

template <class Problem>
HeadConfig config_of(const Problem& problem, int config) {
  return {.lanes = lanes_of(problem), .heads = 1 << config, .rest = problem.x.sizes[3] > problem.rotary_dim};
}
template <class Problem>
std::vector<std::string> configs(const Problem& problem, const DeviceInfo&) {
  std::vector<std::string> texts;
  for (int i = 0; 1 << i <= kMostHeads<Problem>; ++i) texts.push_back(config_text(config_of(problem, i)));
  return texts;
}
template <class Problem>
int64_t items_of(const Problem& problem, const HeadConfig& config) {
  const int64_t heads = std::max<int64_t>(problem.x.sizes[head_dimension(problem)], 1);
  return rows_of(problem.x) / heads * ((heads + config.heads - 1) / config.heads);
}
// Several heads for one load of the tables, as long as there are four blocks for each multiprocessor.
template <class Problem>
int heuristic(const Problem& problem, const DeviceInfo& device) {
  for (int config = kMostHeads<Problem> / 2; config > 0; --config) {
    const HeadConfig wanted = config_of(problem, config);
    const int64_t blocks = items_of(problem, wanted) * wanted.lanes / kThreads;
    if (problem.x.sizes[head_dimension(problem)] >= wanted.heads && blocks >= 4 * device.cuda.multiprocessors) {
      return config;
    }
  }
  return 0;
}

template <class Problem>
HeadTensor head_tensor(const Problem& problem, const TensorView& view) {
  if (!view.is_present()) return {nullptr, {}};
  const int64_t bytes = size_of(view.dtype);
  return {view.data,
          {view.strides[0] * bytes, view.strides[sequence_dimension(problem)] * bytes,
           view.strides[head_dimension(problem)] * bytes}};
}
Table table_of(const TensorView& view) {
  const int64_t bytes = size_of(view.dtype);
  return {view.data, {table_batch_stride(view) * bytes, table_row_stride(view) * bytes}};
}

template <class Problem>
Arguments arguments_of(const Problem& problem, const HeadConfig& config) {
  const int64_t heads = problem.x.sizes[head_dimension(problem)];
  return {.x = head_tensor(problem, problem.x),
          .grad_output = {},
          .output = {},
          .cos = table_of(problem.cos),
          .sin = table_of(problem.sin),
          .weight = problem.weight.data,
          .weight_partial = nullptr,
          .head_groups = make_divider(static_cast<uint32_t>((heads + config.heads - 1) / config.heads)),
          .sequence = make_divider(static_cast<uint32_t>(problem.x.sizes[sequence_dimension(problem)])),
          .items = static_cast<uint32_t>(items_of(problem, config)),
          .heads = static_cast<int32_t>(heads),
          .pairs = static_cast<int32_t>(problem.rotary_dim / 2),
          .head_dim = static_cast<int32_t>(problem.x.sizes[3]),
          .eps = static_cast<float>(problem.eps),
          .weight_offset = static_cast<float>(problem.weight_offset),
          .weight_is_float = problem.weight.dtype == DType::kFloat32,
          .table_is_float = problem.cos.dtype == DType::kFloat32};
}

DeviceCode code_of(std::string_view function, DType dtype, const HeadConfig& config) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::norm_rope::", function, "<", element_type_name(dtype), ", ",
                          device_text(config), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
// The place of a compiled kernel in a table of them.
int entry_of(DType dtype, const HeadConfig& config) {
  const int lanes = config.lanes == 4 ? 0 : config.lanes == 8 ? 1 : config.lanes == 16 ? 2 : 3;
  const int heads = config.heads == 1 ? 0 : config.heads == 2 ? 1 : 2;
  return ((cuda_type_index(dtype) * 4 + lanes) * 3 + heads) * 2 + config.rest;
}
constexpr int kEntries = 3 * 4 * 3 * 2;

int64_t blocks_of(const Arguments& arguments, const HeadConfig& config) {
  return (static_cast<int64_t>(arguments.items) * config.lanes + kThreads - 1) / kThreads;
}

void run_forward(const Forward& problem, int config, Context& context) {
  static const std::string kLabel = "norm_rope forward";
  static KernelTable<kEntries> table;
  if (problem.x.element_count() == 0) return;
  const HeadConfig chosen = config_of(problem, config);
  CUkern_st* kernel = table.get(entry_of(problem.x.dtype, chosen), context,
                                [&] { return code_of("forward_heads", problem.x.dtype, chosen); });
  Arguments arguments = arguments_of(problem, chosen);
  arguments.output = head_tensor(problem, problem.output);
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  launch.grid_x = static_cast<unsigned>(blocks_of(arguments, chosen));
  launch.block_x = kThreads;
  launch.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
}

void run_backward(const Backward& problem, int config, Context& context) {
  static const std::string kLabel = "norm_rope backward";
  static KernelTable<kEntries> table;
  if (problem.x.element_count() == 0) return zero_column_sums(problem.grad_weight, {}, context);
  const HeadConfig chosen = config_of(problem, config);
  CUkern_st* kernel = table.get(entry_of(problem.x.dtype, chosen), context,
                                [&] { return code_of("backward_heads", problem.x.dtype, chosen); });
  Arguments arguments = arguments_of(problem, chosen);
  arguments.grad_output = head_tensor(problem, problem.grad_output);
  arguments.output = head_tensor(problem, problem.grad_x);
  // As many blocks as run at once: each has many heads, and the fewer there are, the fewer partial rows are left to
  // add.
  const int64_t resident = 4 * std::max<int64_t>(context.info->cuda.multiprocessors, 1);
  const int64_t blocks = std::min(blocks_of(arguments, chosen), resident);
  const ColumnSums sums = allocate_column_sums(problem.grad_weight, {}, arguments.head_dim, blocks, context);
  arguments.weight_partial = sums.partials[0];
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  launch.grid_x = static_cast<unsigned>(blocks);
  launch.block_x = kThreads;
  launch.shared_bytes = static_cast<unsigned>(arguments.head_dim * sizeof(float));
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
  add_column_sums(sums, context);
}

uint64_t forward_hash() {
  return jit::source_hash(kSource);
}
uint64_t backward_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kSource));
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

// Every shape of kernel in bf16, and the usual ones in other types; those are otherwise alike, and compiled when asked
// for.
std::vector<DeviceCode> codes_of(std::string_view function, int most_heads) {
  std::vector<DeviceCode> codes;
  for (int lanes : {4, 8, 16, 32}) {
    for (int heads = 1; heads <= most_heads; heads *= 2) {
      for (bool rest : {false, true}) codes.push_back(code_of(function, DType::kBFloat16, {lanes, heads, rest}));
    }
  }
  codes.push_back(code_of(function, DType::kFloat16, {8, 2, false}));
  for (int lanes : {16, 32}) codes.push_back(code_of(function, DType::kFloat32, {lanes, 2, lanes == 32}));
  return codes;
}
std::vector<DeviceCode> forward_codes() {
  return codes_of("forward_heads", kMostHeads<Forward>);
}
std::vector<DeviceCode> backward_codes() {
  std::vector<DeviceCode> codes = column_sums_device_code();
  for (DeviceCode& code : codes_of("backward_heads", kMostHeads<Backward>)) codes.push_back(std::move(code));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda_heads",
                                                       .origin = registry::Origin::kOurs,
                                                       .supports = supports_forward,
                                                       .configs = configs<Forward>,
                                                       .heuristic = heuristic<Forward>,
                                                       .run = run_forward,
                                                       .source_hash = forward_hash,
                                                       .device_code = forward_codes};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda_heads",
                                                         .origin = registry::Origin::kOurs,
                                                         .supports = supports_backward,
                                                         .configs = configs<Backward>,
                                                         .heuristic = heuristic<Backward>,
                                                         .run = run_backward,
                                                         .source_hash = backward_hash,
                                                         .device_code = backward_codes};

}  // namespace kernel_pytorch::norm_rope
