// The forward CUDA kernels that hold a row in registers: cuda_warp, cuda_block, cuda_bulk and cuda_cluster are lists of
// configs of the one device function in row_norm_forward_cuda.cuh.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/row_norm/row_norm_launch.h"
#include "kernel_pytorch/ops/row_norm/row_norm_operation.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/row_norm/row_norm_forward_cuda.cuh";

// Each list begins with its least capacity. Fields: threads, row_threads, vectors, source, clustered, weight, blocks;
// then stages, cluster, rows_per_block, and what the registers cannot hold.
constexpr LaunchConfig kWarpConfigs[] = {
    {{128, 8, 2, Source::kDirect, false, Weight::kRegisters, 7}, 0, 1, 1},
    {{128, 8, 2, Source::kDirect, false, Weight::kRegisters, 7}, 0, 1, 0},
    {{128, 32, 2, Source::kDirect, false, Weight::kRegisters, 7}, 0, 1, 1},
    {{128, 32, 2, Source::kDirect, false, Weight::kRegisters, 7}, 0, 1, 0},
    {{128, 32, 4, Source::kDirect, false, Weight::kReread, 6}, 0, 1, 1},
    {{128, 32, 4, Source::kDirect, false, Weight::kReread, 6}, 0, 1, 0},
    {{128, 32, 8, Source::kDirect, false, Weight::kReread, 4}, 0, 1, 1, 1},
};
// One row a block and no more: blocks come and go as rows are ready, which no fixed share of the rows equals. The
// weight is read again for each row, through L1, which the rows pass by.
constexpr LaunchConfig kBlockConfigs[] = {
    {{128, 128, 4, Source::kDirect, false, Weight::kReread, 6}, 0, 1, 1},
    {{256, 256, 2, Source::kDirect, false, Weight::kReread, 4}, 0, 1, 1},
    {{256, 256, 4, Source::kDirect, false, Weight::kReread, 4}, 0, 1, 1, 1},
    {{512, 512, 2, Source::kDirect, false, Weight::kReread, 2}, 0, 1, 1},
    {{512, 512, 4, Source::kDirect, false, Weight::kReread, 2}, 0, 1, 1, 1},
    {{1024, 1024, 2, Source::kDirect, false, Weight::kReread, 1}, 0, 1, 1},
    {{1024, 1024, 2, Source::kAsync, false, Weight::kRegisters, 1}, kAsyncStages, 1, 0, 3, 64, false},
    {{128, 64, 3, Source::kDirect, false, Weight::kReread, 8}, 0, 1, 1, 3, 64, true, true},  // 768 of fp32
};
constexpr LaunchConfig kBulkConfigs[] = {
    {{256, 256, 2, Source::kRing, false, Weight::kRegisters, 3}, 4, 1, 0},
    {{512, 512, 2, Source::kRing, false, Weight::kRegisters, 1}, 12, 1, 0},
    {{1024, 1024, 2, Source::kRing, false, Weight::kRegisters, 1}, 12, 1, 0},
};
// Wide rows cannot leave the weight to L1: a cluster keeps it for the rows it takes.
constexpr LaunchConfig kClusterConfigs[] = {
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 2, 16},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 4, 16},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 8, 16},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 16, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 2, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 4, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 8, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 16, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 1}, 6, 2, 8},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 1}, 6, 4, 8},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 1}, 6, 8, 8},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 1}, 6, 16, 8},
    {{1024, 1024, 4, Source::kDirect, true, Weight::kReread, 1}, 0, 16, 1, 3, 64, true, true},
};

bool parameters_are_float(const ForwardProblem& problem) {
  const TensorView& parameters = problem.weight.is_present() ? problem.weight : problem.bias;
  return (parameters.is_present() ? parameters : problem.x).dtype == DType::kFloat32;
}

RowWork work_of(const ForwardProblem& problem) {
  return {.rows = rows_of(problem.x),
          .columns = columns_of(problem.x),
          .element_bytes = static_cast<int>(size_of(problem.x.dtype)),
          .tensors = problem.residual.is_present() ? 2 : 1,
          .centered = problem.norm == Norm::kLayer,
          .parameter_bytes = parameters_are_float(problem) ? 4 : static_cast<int>(size_of(problem.x.dtype)),
          .narrow = problem.residual.is_present() && problem.residual.dtype != problem.x.dtype};
}

// Measured on an H200 in bf16, share of the bandwidth of a copy of the same bytes: rms_norm / layer_norm.
constexpr Preference kWarpPreference[] = {{16, 0}, {64, 2}, {128, 4}, {256, 6}};  // 32768x1024: 97 % / 94 %
// 16384x4096: 91 to 94 % / 92 %, with residual 94 % / 92 %. 8192x8192: 91 to 93 % / 94 %, with residual 92 % / 92 %.
constexpr Preference kBlockPreference[] = {{512, 0}, {1024, 2}, {1024, 3}, {2048, 4}, {2048, 5}};
constexpr Preference kBulkPreference[] = {{512, 0}, {1024, 1}, {2048, 2}};  // 4096x16384: 89 % / 85 %
constexpr Preference kClusterRmsPreference[] = {{4096, 4},   {8192, 5},   {16384, 6}, {32768, 7},
                                                {16384, 10}, {32768, 11}, {65536, 12}};  // 2048x131072: 92 %
constexpr Preference kClusterLayerPreference[] = {{4096, 1},   {8192, 2},   {16384, 3},
                                                  {16384, 10}, {32768, 11}, {65536, 12}};  // 2048x131072: 82 %

struct Variant {
  DType dtype;
  bool float_parameters;  // weight and bias; always with fp32
  bool centered;
  bool residual;
  int index() const { return ((cuda_type_index(dtype) * 2 + float_parameters) * 2 + centered) * 2 + residual; }
};
constexpr int kVariants = 24;

DeviceCode code_of(const RowConfig& rows, const Variant& variant) {
  const bool needs_hopper = rows.clustered || rows.source == Source::kRing;
  return {.source = kSource,
          .entry = concat("kernel_pytorch::row_norm::forward_rows<", element_type_name(variant.dtype), ", ",
                          bool_name(variant.float_parameters), ", ", bool_name(variant.centered), ", ",
                          bool_name(variant.residual), ", ", type_expression(rows), ">"),
          .minimum_capability = needs_hopper ? 90 : 80,
          .architecture_specific = false};
}

const char* obstacle_of(const ForwardProblem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  if (problem.norm == Norm::kRms && problem.bias.is_present()) return kRmsBias;
  for (const TensorView* view : {&problem.x, &problem.residual, &problem.output, &problem.sum}) {
    if (const char* obstacle = vector_access_obstacle(*view)) return obstacle;
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
          .output_type = beside(problem.x.dtype, problem.output)};
}

// The functions of a registry row for one list of configs.
template <const auto& kConfigs, const auto& kRmsPreference, const auto& kLayerPreference, bool kManyRows>
struct ForwardRows : RowKernel<ForwardRows<kConfigs, kRmsPreference, kLayerPreference, kManyRows>, ForwardProblem> {
  static constexpr ConfigList kList{kConfigs};
  static constexpr bool kWantsManyRows = kManyRows;

  static RowWork work(const ForwardProblem& problem) { return work_of(problem); }
  static const char* obstacle(const ForwardProblem& problem, const DeviceInfo& device) {
    return obstacle_of(problem, device);
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
    const Variant variant{problem.x.dtype, parameters_are_float(problem), problem.norm == Norm::kLayer,
                          problem.residual.is_present()};
    CUkern_st* kernel =
        table.get(position * kVariants + variant.index(), context, [&] { return code_of(chosen.rows, variant); });
    ForwardArguments arguments = make_arguments(problem, make_shape(chosen, work, *context.info));
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape = launch_shape(chosen, work, *context.info);
    shape.programmatic_dependent = context.info->cuda.capability() >= 90;
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
  }
  static uint64_t source_hash() { return jit::source_hash(kSource); }
  static std::vector<DeviceCode> device_code() {
    std::vector<DeviceCode> codes;
    for (const LaunchConfig& config : kConfigs) {
      for (DType dtype : kCudaTypes) {
        for (int flags = 0; flags < 8; ++flags) {
          const Variant variant{dtype, (flags & 4) != 0, (flags & 1) != 0, (flags & 2) != 0};
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
