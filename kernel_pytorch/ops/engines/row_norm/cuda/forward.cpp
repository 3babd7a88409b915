// The forward CUDA kernels that hold a row in registers: cuda_warp, cuda_block, cuda_bulk and cuda_cluster are lists of
// configs of the one device function in engines/row_norm/cuda/forward.cuh.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/row_norm/cuda/launch.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/engines/row_norm/cuda/forward.cuh";

using enum Source;
using enum Weight;

// clang-format off
// Each list begins with its least capacity. Behind a row: the share of a copy's bandwidth on an H200 in bf16, rms_norm /
// layer_norm, of the problem for which it is preferred.
constexpr LaunchConfig kWarpConfigs[] = {
    {.rows = {.threads = 128, .row_threads = 8, .vectors = 2, .weight = kRegisters, .blocks = 7}, .rows_per_block = 1},
    {.rows = {.threads = 128, .row_threads = 8, .vectors = 2, .weight = kRegisters, .blocks = 7}},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 2, .weight = kRegisters, .blocks = 7}, .rows_per_block = 1},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 2, .weight = kRegisters, .blocks = 7}},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 4, .blocks = 6}, .rows_per_block = 1},  // 32768x1024: 97 % / 94 %
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 4, .blocks = 6}},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 8, .blocks = 4}, .rows_per_block = 1, .max_tensors = 1},
};
static_assert(are_legal(kWarpConfigs));
// One row a block and no more: blocks come and go as rows are ready, which no fixed share of the rows equals. The
// weight is read again for each row, through L1, which the rows pass by.
constexpr LaunchConfig kBlockConfigs[] = {
    {.rows = {.threads = 128, .row_threads = 128, .vectors = 4, .blocks = 6}, .rows_per_block = 1},  // 16384x4096: 91 to 94 % / 92 %, with residual 94 % / 92 %
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .blocks = 4}, .rows_per_block = 1},
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 4, .blocks = 4}, .rows_per_block = 1, .max_tensors = 1},  // 8192x8192: 91 to 93 % / 94 %
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 2, .blocks = 2}, .rows_per_block = 1},  // 8192x8192 with residual: 92 % / 92 %
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 4, .blocks = 2}, .rows_per_block = 1, .max_tensors = 1},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 2, .blocks = 1}, .rows_per_block = 1},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 2, .source = kAsync, .weight = kRegisters, .blocks = 1}, .stages = kAsyncStages, .takes_mean = false},
    {.rows = {.threads = 128, .row_threads = 64, .vectors = 3, .blocks = 8}, .rows_per_block = 1, .float_only = true},  // 768 of fp32
};
static_assert(are_legal(kBlockConfigs));
constexpr LaunchConfig kBulkConfigs[] = {
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 3}, .stages = 4},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 1}, .stages = 12},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 1}, .stages = 12},  // 4096x16384: 89 % / 85 %
};
static_assert(are_legal(kBulkConfigs));
// Wide rows cannot leave the weight to L1: a cluster keeps it for the rows it takes.
constexpr RowConfig kSharedWeight256 = {.threads = 256, .row_threads = 256, .vectors = 4, .source = kRing, .clustered = true, .weight = kShared, .blocks = 3};
constexpr RowConfig kSharedWeight512 = {.threads = 512, .row_threads = 512, .vectors = 4, .source = kRing, .clustered = true, .weight = kShared, .blocks = 2};
constexpr RowConfig kRereadWeight512 = {.threads = 512, .row_threads = 512, .vectors = 4, .source = kRing, .clustered = true, .blocks = 1};
constexpr LaunchConfig kClusterConfigs[] = {
    {.rows = kSharedWeight256, .stages = 3, .cluster = 2, .rows_per_block = 16},
    {.rows = kSharedWeight256, .stages = 3, .cluster = 4, .rows_per_block = 16},
    {.rows = kSharedWeight256, .stages = 3, .cluster = 8, .rows_per_block = 16},
    {.rows = kSharedWeight256, .stages = 3, .cluster = 16, .rows_per_block = 16},  // 2048x131072: layer_norm 82 %
    {.rows = kSharedWeight512, .stages = 4, .cluster = 2, .rows_per_block = 16},
    {.rows = kSharedWeight512, .stages = 4, .cluster = 4, .rows_per_block = 16},
    {.rows = kSharedWeight512, .stages = 4, .cluster = 8, .rows_per_block = 16},  // 2048x131072: rms_norm 92 %
    {.rows = kSharedWeight512, .stages = 4, .cluster = 16, .rows_per_block = 16},
    {.rows = kRereadWeight512, .stages = 6, .cluster = 2, .rows_per_block = 8},
    {.rows = kRereadWeight512, .stages = 6, .cluster = 4, .rows_per_block = 8},
    {.rows = kRereadWeight512, .stages = 6, .cluster = 8, .rows_per_block = 8},
    {.rows = kRereadWeight512, .stages = 6, .cluster = 16, .rows_per_block = 8},
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 4, .clustered = true, .blocks = 1}, .cluster = 16, .rows_per_block = 1, .float_only = true},
};
static_assert(are_legal(kClusterConfigs));
// clang-format on

bool parameters_are_float(const ForwardProblem& problem) {
  const TensorView& parameters = problem.weight.is_present() ? problem.weight : problem.bias;
  return (parameters.is_present() ? parameters : problem.x).dtype == DType::kFloat32;
}

RowWork work_of(const ForwardProblem& problem) {
  return with_dimensions(
      {.rows = rows_of(problem.x),
       .columns = columns_of(problem.x),
       .element_bytes = static_cast<int>(size_of(problem.x.dtype)),
       .tensors = problem.residual.is_present() ? 2 : 1,
       .centered = problem.norm == Norm::kLayer,
       .parameter_bytes = parameters_are_float(problem) ? 4 : static_cast<int>(size_of(problem.x.dtype)),
       .narrow = problem.residual.is_present() && problem.residual.dtype != problem.x.dtype},
      problem.x);
}

constexpr Preference kWarpPreference[] = {{16, 0}, {64, 2}, {128, 4}, {256, 6}};
constexpr Preference kBlockPreference[] = {{512, 0}, {1024, 2}, {1024, 3}, {2048, 4}, {2048, 5}};
constexpr Preference kBulkPreference[] = {{512, 0}, {1024, 1}, {2048, 2}};
constexpr Preference kClusterRmsPreference[] = {{4096, 4},   {8192, 5},   {16384, 6}, {32768, 7},
                                                {16384, 10}, {32768, 11}, {65536, 12}};
constexpr Preference kClusterLayerPreference[] = {{4096, 1},   {8192, 2},   {16384, 3},
                                                  {16384, 10}, {32768, 11}, {65536, 12}};

struct Variant {
  DType dtype;
  bool float_parameters;  // weight and bias; always with fp32
  bool centered;
  bool residual;
  bool activated;
  bool strided;
  int index() const {
    const int flags = ((float_parameters * 2 + centered) * 2 + residual) * 2 + activated;
    return (cuda_type_index(dtype) * 16 + flags) * 2 + strided;
  }
};
constexpr int kVariants = 96;
constexpr const char* kActivation = "an activation: cuda_warp, cuda_block and cuda_any have it";

DeviceCode code_of(const RowConfig& rows, const Variant& variant) {
  const bool needs_hopper = rows.clustered || rows.source == Source::kRing;
  return {.source = kSource,
          .entry = concat("kernel_pytorch::row_norm::forward_rows<", element_type_name(variant.dtype), ", ",
                          bool_name(variant.float_parameters), ", ", bool_name(variant.centered), ", ",
                          bool_name(variant.residual), ", ", device_text(rows), ", ", bool_name(variant.activated),
                          variant.strided ? ", true>" : ">"),
          .minimum_capability = needs_hopper ? 90 : 80,
          .architecture_specific = false};
}

const char* obstacle_of(const ForwardProblem& problem, const DeviceInfo& device, bool takes_strides) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  if (problem.norm == Norm::kRms && problem.bias.is_present()) return kRmsBias;
  for (const TensorView* view : {&problem.x, &problem.residual, &problem.output, &problem.sum}) {
    if (const char* obstacle = row_obstacle(*view, takes_strides)) return obstacle;
  }
  if (const char* obstacle = parameter_obstacle(problem.weight)) return obstacle;
  return parameter_obstacle(problem.bias);
}

ForwardArguments make_arguments(const ForwardProblem& problem, const RowShape& shape) {
  return {.shape = shape,
          .inputs = {row_tensor(problem.x.dtype, problem.x), row_tensor(problem.x.dtype, problem.residual)},
          .weight = problem.weight.data,
          .bias = problem.bias.data,
          .output = problem.output.data,
          .sum = problem.sum.data,
          .mean = problem.mean.as<float>(),
          .rstd = problem.rstd.as<float>(),
          .eps = static_cast<float>(*problem.eps),
          .weight_offset = static_cast<float>(problem.weight_offset),
          .output_type = mixed_type(problem.x.dtype, problem.output),
          .activation = problem.activation};
}

// The functions of a registry row for one list of configs.
template <const auto& kConfigs, const auto& kRmsPreference, const auto& kLayerPreference, bool kManyRows>
struct ForwardRows : RowKernel<ForwardRows<kConfigs, kRmsPreference, kLayerPreference, kManyRows>, ForwardProblem> {
  static constexpr ConfigList kList{kConfigs};
  static constexpr bool kWantsManyRows = kManyRows;
  static constexpr bool kHasVariants = has_variants(kConfigs[0]);

  static RowWork work(const ForwardProblem& problem) { return work_of(problem); }
  static const char* obstacle(const ForwardProblem& problem, const DeviceInfo& device) {
    if (!kHasVariants && problem.activation != Activation::kIdentity) return kActivation;
    return obstacle_of(problem, device, kHasVariants);
  }
  static std::span<const Preference> preference(const ForwardProblem& problem) {
    if (problem.norm == Norm::kRms) return kRmsPreference;
    return kLayerPreference;
  }
  static void run(const ForwardProblem& problem, int config, Context& context) {
    static const std::string kLabel = "row_norm forward";
    static KernelTable<std::size(kConfigs) * kVariants> table;
    const RowWork work = work_of(problem);
    if (work.rows == 0 || work.columns == 0) return;
    const int position = kList.position(config, work, *context.info);
    const LaunchConfig& chosen = kConfigs[position];
    const Variant variant{problem.x.dtype,
                          parameters_are_float(problem),
                          problem.norm == Norm::kLayer,
                          problem.residual.is_present(),
                          problem.activation != Activation::kIdentity,
                          is_strided(problem.x)};
    CUkern_st* kernel =
        table.get(position * kVariants + variant.index(), context, [&] { return code_of(chosen.rows, variant); });
    ForwardArguments arguments = make_arguments(problem, make_shape(chosen, work, *context.info));
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape = launch_shape(chosen, work, *context.info);
    shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  }
  static uint64_t source_hash() { return jit::source_hash(kSource); }
  static std::vector<DeviceCode> device_code() {
    std::vector<DeviceCode> codes;
    for (const LaunchConfig& config : kConfigs) {
      for (DType dtype : kCudaTypes) {
        for (int flags = 0; flags < (kHasVariants ? 32 : 8); ++flags) {
          const Variant variant{
              dtype, (flags & 4) != 0, (flags & 1) != 0, (flags & 2) != 0, (flags & 8) != 0, (flags & 16) != 0};
          if (variant.activated && variant.residual) continue;  // compiled when asked for: no front end does
          if (variant.strided && (flags & 14 || dtype != DType::kBFloat16)) continue;  // likewise: loads alone differ
          if (dtype == DType::kFloat32 && !variant.float_parameters) continue;
          if ((variant.residual && config.max_tensors < 2) || (variant.centered && !config.takes_mean)) continue;
          if (config.float_only && dtype != DType::kFloat32) continue;
          DeviceCode code = code_of(config.rows, variant);
          if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(std::move(code));
        }
      }
    }
    return codes;
  }
};

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaWarp =
    ForwardRows<kWarpConfigs, kWarpPreference, kWarpPreference, false>::kernel("cuda_warp");
constinit const registry::Kernel<ForwardProblem> kForwardCudaBlock =
    ForwardRows<kBlockConfigs, kBlockPreference, kBlockPreference, false>::kernel("cuda_block");
constinit const registry::Kernel<ForwardProblem> kForwardCudaBulk =
    ForwardRows<kBulkConfigs, kBulkPreference, kBulkPreference, true>::kernel("cuda_bulk");
constinit const registry::Kernel<ForwardProblem> kForwardCudaCluster =
    ForwardRows<kClusterConfigs, kClusterRmsPreference, kClusterLayerPreference, false>::kernel("cuda_cluster");

}  // namespace kernel_pytorch::row_norm
