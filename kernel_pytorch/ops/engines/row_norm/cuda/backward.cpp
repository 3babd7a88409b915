// The backward CUDA kernels that hold a row in registers, as in engines/row_norm/cuda/forward.cpp. All of them are
// persistent: the fewer blocks share the rows out, the fewer partial rows of the weight's gradient there are to sum.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/row_norm/cuda/launch.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"
#include "kernel_pytorch/ops/support/column_sums.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/engines/row_norm/cuda/backward.cuh";

using enum Source;
using enum Weight;

// clang-format off
// Behind a row: as in engines/row_norm/cuda/forward.cpp. With grad_sum the rings reach 92 % to 94 %.
constexpr LaunchConfig kWarpConfigs[] = {
    {.rows = {.threads = 128, .row_threads = 8, .vectors = 2, .weight = kRegisters, .blocks = 4}},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 2, .weight = kRegisters, .blocks = 4}},
    {.rows = {.threads = 128, .row_threads = 32, .vectors = 4, .blocks = 3}},  // 32768x1024: 76 % / 70 %
};
static_assert(are_legal(kWarpConfigs));
constexpr LaunchConfig kBlockConfigs[] = {
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .weight = kRegisters, .blocks = 2}},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 1, .weight = kRegisters, .blocks = 2}},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 1, .source = kPrefetch, .weight = kRegisters, .blocks = 1}},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 2, .weight = kRegisters, .blocks = 1}},
    {.rows = {.threads = 256, .row_threads = 64, .vectors = 3, .weight = kRegisters, .blocks = 2}, .float_only = true},  // 768 of fp32
};
static_assert(are_legal(kBlockConfigs));
constexpr LaunchConfig kBulkConfigs[] = {
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 2}, .stages = 4},  // 16384x4096: 92 % / 93 %
    {.rows = {.threads = 256, .row_threads = 256, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 2}, .stages = 8},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 1, .source = kRing, .weight = kRegisters, .blocks = 2}, .stages = 8},
    {.rows = {.threads = 512, .row_threads = 512, .vectors = 2, .source = kRing, .weight = kRegisters, .blocks = 1}, .stages = 8},  // 8192x8192: 92 % / 90 %
    {.rows = {.threads = 1024, .row_threads = 1024, .vectors = 1, .source = kRing, .weight = kRegisters, .blocks = 1}, .stages = 8},
    {.rows = {.threads = 64, .row_threads = 64, .vectors = 3, .source = kRing, .weight = kRegisters, .blocks = 8}, .stages = 4, .float_only = true},  // likewise
};
static_assert(are_legal(kBulkConfigs));
constexpr RowConfig kTwoVectors = {.threads = 512, .row_threads = 512, .vectors = 2, .source = kRing, .clustered = true, .weight = kRegisters, .blocks = 1};
constexpr RowConfig kFourVectors = {.threads = 512, .row_threads = 512, .vectors = 4, .source = kRing, .clustered = true, .blocks = 1};
constexpr LaunchConfig kClusterConfigs[] = {
    {.rows = kTwoVectors, .stages = 8, .cluster = 2},  // 4096x16384: 91 % / 84 %
    {.rows = kTwoVectors, .stages = 8, .cluster = 4},
    {.rows = kTwoVectors, .stages = 8, .cluster = 8},
    {.rows = kTwoVectors, .stages = 8, .cluster = 16},
    {.rows = kFourVectors, .stages = 8, .cluster = 2, .max_accumulators = 32},
    {.rows = kFourVectors, .stages = 8, .cluster = 4, .max_accumulators = 32},
    {.rows = kFourVectors, .stages = 8, .cluster = 8, .max_accumulators = 32},
    {.rows = kFourVectors, .stages = 8, .cluster = 16, .max_accumulators = 32},
    {.rows = kFourVectors, .stages = 8, .cluster = 8, .rows_per_block = 32, .max_accumulators = 32},
};
static_assert(are_legal(kClusterConfigs));
// clang-format on

RowWork work_of(const BackwardProblem& problem) {
  return with_dimensions({.rows = rows_of(problem.value),
                          .columns = columns_of(problem.value),
                          .element_bytes = static_cast<int>(size_of(problem.value.dtype)),
                          .tensors = problem.grad_sum.is_present() ? 3 : 2,
                          .column_sums = problem.norm == Norm::kLayer ? 2 : 1,
                          .narrow = problem.grad_output.dtype != problem.value.dtype},
                         problem.value);
}

constexpr Preference kWarpPreference[] = {{16, 0}, {64, 1}, {128, 2}};
constexpr Preference kBlockPreference[] = {{512, 1}, {1024, 3}};
constexpr Preference kBulkPreference[] = {{512, 0}, {1024, 3}, {1024, 4}};
constexpr Preference kClusterPreference[] = {{2048, 0}, {4096, 1}, {8192, 2}, {16384, 8}, {16384, 3}, {32768, 7}};

struct Variant {
  DType dtype;
  bool centered;
  bool grad_sum;
  bool strided;
  int index() const { return ((cuda_type_index(dtype) * 2 + centered) * 2 + grad_sum) * 2 + strided; }
};
constexpr int kVariants = 24;

DeviceCode code_of(const RowConfig& rows, const Variant& variant) {
  const bool needs_hopper = rows.clustered || rows.source == Source::kRing;
  return {.source = kSource,
          .entry = concat("kernel_pytorch::row_norm::backward_rows<", element_type_name(variant.dtype), ", ",
                          bool_name(variant.centered), ", ", bool_name(variant.grad_sum), ", ", device_text(rows),
                          variant.strided ? ", true>" : ">"),
          .minimum_capability = needs_hopper ? 90 : 80,
          .architecture_specific = false};
}

const char* obstacle_of(const BackwardProblem& problem, const DeviceInfo& device, bool takes_strides) {
  if (const char* obstacle = cuda_obstacle(problem.value.dtype, device)) return obstacle;
  if (problem.norm == Norm::kRms && problem.grad_bias.is_present()) return kRmsBias;
  for (const TensorView* view : {&problem.grad_output, &problem.value, &problem.grad_sum, &problem.grad_input}) {
    if (const char* obstacle = row_obstacle(*view, takes_strides)) return obstacle;
  }
  return parameter_obstacle(problem.weight);
}

BackwardArguments make_arguments(const BackwardProblem& problem, const RowShape& shape, const ColumnSums& sums) {
  const DType dtype = problem.value.dtype;
  return {.shape = shape,
          .inputs = {row_tensor(dtype, problem.grad_output), row_tensor(dtype, problem.value),
                     row_tensor(dtype, problem.grad_sum)},
          .weight = problem.weight.data,
          .mean = problem.mean.as<float>(),
          .rstd = problem.rstd.as<float>(),
          .grad_input = problem.grad_input.data,
          .weight_partial = sums.partials[0],
          .bias_partial = sums.partials[1],
          .weight_offset = static_cast<float>(problem.weight_offset),
          .weight_is_float = problem.weight.dtype == DType::kFloat32};
}

template <const auto& kConfigs, const auto& kPreference, bool kManyRows>
struct BackwardRows : RowKernel<BackwardRows<kConfigs, kPreference, kManyRows>, BackwardProblem> {
  static constexpr ConfigList kList{kConfigs};
  static constexpr bool kWantsManyRows = kManyRows;

  static RowWork work(const BackwardProblem& problem) { return work_of(problem); }
  static const char* obstacle(const BackwardProblem& problem, const DeviceInfo& device) {
    return obstacle_of(problem, device, has_variants(kConfigs[0]));
  }
  static std::span<const Preference> preference(const BackwardProblem&) { return kPreference; }
  static void run(const BackwardProblem& problem, int config, Context& context) {
    static const std::string kLabel = "row_norm backward";
    static KernelTable<std::size(kConfigs) * kVariants> table;
    const RowWork work = work_of(problem);
    if (work.rows == 0 || work.columns == 0) return zero_column_sums(problem.grad_weight, problem.grad_bias, context);
    const int position = kList.position(config, work, *context.info);
    const LaunchConfig& chosen = kConfigs[position];
    const Variant variant{problem.value.dtype, problem.norm == Norm::kLayer, problem.grad_sum.is_present(),
                          is_strided(problem.value)};
    CUkern_st* kernel =
        table.get(position * kVariants + variant.index(), context, [&] { return code_of(chosen.rows, variant); });
    const int64_t units = unit_count(chosen, work, *context.info);
    const ColumnSums sums = allocate_column_sums(problem.grad_weight, problem.grad_bias, work.columns, units, context);
    BackwardArguments arguments = make_arguments(problem, make_shape(chosen, work, *context.info), sums);
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape = launch_shape(chosen, work, *context.info);
    // Blocks that hold several rows add their column sums up in shared memory.
    if (chosen.rows.row_threads < chosen.rows.threads) shape.shared_bytes = work.columns * sizeof(float);
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
    add_column_sums(sums, context);
  }
  static uint64_t source_hash() {
    HashMixer mixer;
    mixer.add(jit::source_hash(kSource));
    mixer.add(column_sums_source_hash());
    return mixer.value();
  }
  static std::vector<DeviceCode> device_code() {
    std::vector<DeviceCode> codes = column_sums_device_code();
    for (const LaunchConfig& config : kConfigs) {
      for (DType dtype : kCudaTypes) {
        for (int flags = 0; flags < (has_variants(config) ? 8 : 4); ++flags) {
          const Variant variant{dtype, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
          // Others differ in their loads alone; they are compiled when asked for.
          if (variant.strided && (variant.grad_sum || dtype != DType::kBFloat16)) continue;
          const int sums = config.rows.vectors * 16 / static_cast<int>(size_of(dtype)) * (variant.centered ? 2 : 1);
          if (sums > config.max_accumulators || (config.float_only && dtype != DType::kFloat32)) continue;
          DeviceCode code = code_of(config.rows, variant);
          if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(std::move(code));
        }
      }
    }
    return codes;
  }
};

}  // namespace

constinit const registry::Kernel<BackwardProblem> kBackwardCudaWarp =
    BackwardRows<kWarpConfigs, kWarpPreference, false>::kernel("cuda_warp");
constinit const registry::Kernel<BackwardProblem> kBackwardCudaBlock =
    BackwardRows<kBlockConfigs, kBlockPreference, false>::kernel("cuda_block");
constinit const registry::Kernel<BackwardProblem> kBackwardCudaBulk =
    BackwardRows<kBulkConfigs, kBulkPreference, true>::kernel("cuda_bulk");
constinit const registry::Kernel<BackwardProblem> kBackwardCudaCluster =
    BackwardRows<kClusterConfigs, kClusterPreference, false>::kernel("cuda_cluster");

}  // namespace kernel_pytorch::row_norm
