// The forward CUDA kernels that hold a row in registers: cuda_warp, cuda_block, cuda_bulk and cuda_cluster are lists of
// configs of the one device function in row_norm_forward_cuda.cuh.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/row_norm/row_norm.h"
#include "kernel_pytorch/ops/row_norm/row_norm_launch.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/row_norm/row_norm_forward_cuda.cuh";
constexpr const char* kRingIsBetter = "cuda_bulk is faster for layer norm of many rows this wide";
constexpr const char* kFewRows = "fewer rows than four per multiprocessor: no ring to fill";

// Each list begins with its least capacity. Fields: threads, row_threads, vectors, source, clustered, weight,
// blocks; then stages, cluster, rows_per_block, and what the registers cannot hold.
constexpr LaunchConfig kWarpConfigs[] = {
    {{128, 8, 2, Source::kDirect, false, Weight::kRegisters, 8}, 0, 1, 1},
    {{128, 8, 2, Source::kDirect, false, Weight::kRegisters, 8}, 0, 1, 0},
    {{128, 32, 2, Source::kDirect, false, Weight::kRegisters, 8}, 0, 1, 1},
    {{128, 32, 2, Source::kDirect, false, Weight::kRegisters, 8}, 0, 1, 0},
    {{128, 32, 4, Source::kDirect, false, Weight::kReread, 8}, 0, 1, 1},
    {{128, 32, 4, Source::kDirect, false, Weight::kReread, 8}, 0, 1, 0},
    {{128, 32, 8, Source::kDirect, false, Weight::kReread, 4}, 0, 1, 1, 1},
};
constexpr LaunchConfig kBlockConfigs[] = {
    {{128, 128, 4, Source::kDirect, false, Weight::kReread, 8}, 0, 1, 1, 3, 64, false},
    {{256, 256, 2, Source::kDirect, false, Weight::kRegisters, 4}, 0, 1, 1},
    {{256, 256, 2, Source::kPrefetch, false, Weight::kRegisters, 3}, 0, 1, 0},
    {{512, 512, 1, Source::kAsync, false, Weight::kRegisters, 2}, kAsyncStages, 1, 0},
    {{256, 256, 4, Source::kDirect, false, Weight::kReread, 4}, 0, 1, 1, 3, 64, false},
    {{512, 512, 2, Source::kPrefetch, false, Weight::kRegisters, 2}, 0, 1, 0, 1, 64, false},
    {{512, 512, 2, Source::kDirect, false, Weight::kRegisters, 2}, 0, 1, 1},
    {{1024, 1024, 2, Source::kAsync, false, Weight::kRegisters, 1}, kAsyncStages, 1, 0, 3, 64, false},
    {{1024, 1024, 2, Source::kDirect, false, Weight::kReread, 1}, 0, 1, 1},
    {{512, 64, 8, Source::kDirect, false, Weight::kSharedFloat, 1}, 0, 1, 0},
    {{512, 64, 8, Source::kPrefetch, false, Weight::kSharedFloat, 1}, 0, 1, 0, 1},
    {{512, 128, 4, Source::kPrefetch, false, Weight::kSharedFloat, 1}, 0, 1, 0},
    {{768, 128, 4, Source::kPrefetch, false, Weight::kSharedFloat, 1}, 0, 1, 0},
    {{512, 256, 8, Source::kPrefetch, false, Weight::kSharedFloat, 1}, 0, 1, 0, 1},
    {{512, 32, 8, Source::kDirect, false, Weight::kSharedFloat, 1}, 0, 1, 0},
    {{256, 32, 4, Source::kDirect, false, Weight::kSharedFloat, 4}, 0, 1, 0},
    {{256, 32, 4, Source::kPrefetch, false, Weight::kSharedFloat, 3}, 0, 1, 0},
    {{256, 32, 4, Source::kDirect, false, Weight::kSharedFloat, 4}, 0, 1, 4},
    {{128, 128, 4, Source::kDirect, false, Weight::kShared, 8}, 0, 1, 4},
    {{128, 128, 4, Source::kDirect, false, Weight::kShared, 8}, 0, 1, 8},
    {{64, 64, 8, Source::kDirect, false, Weight::kShared, 8}, 0, 1, 4},
    {{64, 64, 8, Source::kDirect, false, Weight::kShared, 8}, 0, 1, 8},
    {{256, 64, 8, Source::kDirect, false, Weight::kSharedFloat, 2}, 0, 1, 2},
    {{256, 64, 8, Source::kDirect, false, Weight::kSharedFloat, 2}, 0, 1, 4},
    {{256, 128, 4, Source::kDirect, false, Weight::kSharedFloat, 4}, 0, 1, 2},
    {{256, 128, 4, Source::kDirect, false, Weight::kSharedFloat, 4}, 0, 1, 4},
    {{256, 128, 4, Source::kDirect, false, Weight::kSharedFloat, 4}, 0, 1, 8},
    {{256, 256, 4, Source::kDirect, false, Weight::kShared, 4}, 0, 1, 4},
    {{256, 256, 4, Source::kDirect, false, Weight::kShared, 4}, 0, 1, 8},
    {{256, 128, 8, Source::kDirect, false, Weight::kSharedFloat, 2}, 0, 1, 2},
    {{256, 128, 8, Source::kDirect, false, Weight::kSharedFloat, 2}, 0, 1, 4},
    {{512, 256, 4, Source::kDirect, false, Weight::kSharedFloat, 2}, 0, 1, 4},
};
constexpr LaunchConfig kBulkConfigs[] = {
    {{256, 256, 2, Source::kRing, false, Weight::kRegisters, 3}, 8, 1, 0},
    {{256, 256, 2, Source::kRing, false, Weight::kRegisters, 3}, 4, 1, 0},
    {{512, 512, 2, Source::kRing, false, Weight::kRegisters, 1}, 12, 1, 0},
    {{1024, 1024, 2, Source::kRing, false, Weight::kRegisters, 1}, 12, 1, 0},
    {{128, 128, 4, Source::kRing, false, Weight::kShared, 8}, 2, 1, 0},
    {{256, 256, 4, Source::kRing, false, Weight::kShared, 4}, 3, 1, 0},
    {{512, 512, 4, Source::kRing, false, Weight::kShared, 2}, 3, 1, 0},
};
constexpr LaunchConfig kClusterConfigs[] = {
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 2, 0},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 4, 0},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 4, 8},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 8, 8},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 8, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kReread, 2}, 6, 16, 8},
    {{512, 512, 4, Source::kDirect, true, Weight::kReread, 2}, 0, 2, 1, 1},
    {{512, 512, 4, Source::kDirect, true, Weight::kReread, 2}, 0, 4, 1, 1},
    {{512, 512, 4, Source::kDirect, true, Weight::kReread, 2}, 0, 8, 1, 1},
    {{1024, 1024, 4, Source::kDirect, true, Weight::kReread, 1}, 0, 16, 1, 3, 64, true, true},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 4}, 2, 16, 16},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 16, 16},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 16, 32},
    {{256, 256, 4, Source::kRing, true, Weight::kShared, 3}, 3, 16, 0},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 8, 16},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 8, 32},
    {{512, 512, 4, Source::kRing, true, Weight::kShared, 2}, 4, 8, 0},
    {{512, 512, 2, Source::kRing, true, Weight::kShared, 2}, 5, 16, 16},
    {{512, 512, 2, Source::kRing, true, Weight::kRegisters, 2}, 6, 16, 16},
    {{512, 512, 2, Source::kRing, true, Weight::kRegisters, 2}, 6, 16, 32},
    {{256, 256, 4, Source::kDirect, true, Weight::kShared, 4}, 0, 16, 16},
    {{512, 512, 4, Source::kDirect, true, Weight::kShared, 2}, 0, 8, 16},
    {{1024, 1024, 4, Source::kRing, true, Weight::kShared, 1}, 4, 4, 32},
    {{1024, 1024, 2, Source::kRing, true, Weight::kShared, 1}, 6, 8, 32},
};

int parameter_bytes(const TensorView& view) {
  return view.is_present() ? static_cast<int>(size_of(view.dtype)) : 0;
}

RowWork work_of(const ForwardProblem& problem) {
  return {.rows = rows_of(problem.x),
          .columns = columns_of(problem.x),
          .element_bytes = static_cast<int>(size_of(problem.x.dtype)),
          .tensors = problem.residual.is_present() ? 2 : 1,
          .centered = problem.norm == Norm::kLayer,
          .parameter_bytes = parameter_bytes(problem.weight) + parameter_bytes(problem.bias)};
}

// Measured on an H200 in bf16, share of the bandwidth of a copy of the same bytes: rms_norm / layer_norm.
constexpr Preference kWarpPreference[] = {{16, 0}, {64, 2}, {128, 4}, {256, 6}};  // 32768x1024: 97 % / 88 %
// 16384x4096: 96 % with many small blocks, 92 % prefetched; with residual 98 %. 8192x8192: 94 %; with residual 96 %.
constexpr Preference kBlockRmsPreference[] = {{512, 0}, {1024, 6, 2}, {1024, 5}, {2048, 7}, {2048, 8}};
// 16384x4096: 89 % prefetched, 79 % with many small blocks; with residual 93 %. 8192x8192 with residual: 90 %.
constexpr Preference kBlockLayerPreference[] = {{512, 1, 2}, {512, 2}, {1024, 6}, {2048, 8}};
constexpr Preference kBulkPreference[] = {
    {512, 0}, {1024, 2}, {2048, 3}};  // 8192x8192: 90 % / 87 %; 4096x16384: 90 % / 86 %
constexpr Preference kClusterPreference[] = {
    {4096, 0}, {8192, 2}, {16384, 3}, {32768, 5}, {65536, 9}};  // 2048x131072: 82 % / 63 %

struct Variant {
  DType dtype;
  bool centered;
  bool residual;
  int index() const { return (cuda_type_index(dtype) * 2 + centered) * 2 + residual; }
};
constexpr int kVariants = 12;

DeviceCode code_of(const RowConfig& rows, const Variant& variant) {
  const bool needs_hopper = rows.clustered || rows.source == Source::kRing;
  return {
      .source = kSource,
      .entry = concat("kernel_pytorch::row_norm::forward_rows<", element_type_name(variant.dtype), ", ",
                      bool_name(variant.centered), ", ", bool_name(variant.residual), ", ", type_expression(rows), ">"),
      .minimum_capability = needs_hopper ? 90 : 80,
      .architecture_specific = false};
}

const char* obstacle_of(const ForwardProblem& problem, const DeviceInfo& device) {
  if (!device.is_cuda()) return kNeedsCuda;
  if (device.cuda.capability() < 80) return kNeedsAmpere;
  if (cuda_type_index(problem.x.dtype) < 0) return kNeedsSmallFloat;
  if (problem.norm == Norm::kRms && problem.bias.is_present()) return kRmsBias;
  for (const TensorView* view : {&problem.x, &problem.residual, &problem.output, &problem.sum}) {
    if (const char* obstacle = vector_access_obstacle(*view)) return obstacle;
  }
  if (const char* obstacle = parameter_obstacle(problem.weight)) return obstacle;
  return parameter_obstacle(problem.bias);
}

ForwardArguments make_arguments(const ForwardProblem& problem, const RowShape& shape) {
  return {.shape = shape,
          .inputs = {row_tensor(problem.x), row_tensor(problem.residual)},
          .weight = problem.weight.data,
          .bias = problem.bias.data,
          .output = problem.output.data,
          .sum = problem.sum.data,
          .mean = problem.mean.as<float>(),
          .rstd = problem.rstd.as<float>(),
          .eps = static_cast<float>(problem.eps),
          .weight_offset = static_cast<float>(problem.weight_offset),
          .weight_is_float = (problem.weight.is_present() ? problem.weight : problem.bias).dtype == DType::kFloat32};
}

// The functions of a registry row for one list of configs.
template <const auto& kConfigs, const auto& kRmsPreference, const auto& kLayerPreference, bool kWantsManyRows>
struct ForwardRows {
  static constexpr ConfigList kList{kConfigs};

  static registry::Support supports(const ForwardProblem& problem, const DeviceInfo& device) {
    if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
    const bool needs_hopper = kConfigs[0].rows.clustered || kConfigs[0].rows.source == Source::kRing;
    if (needs_hopper && device.cuda.capability() < 90) return registry::Support::no(kNeedsHopper);
    const RowWork work = work_of(problem);
    if (kWantsManyRows && work.rows < 4 * device.cuda.multiprocessors) return registry::Support::no(kFewRows);
    if (!kList.any_fits(work, device)) return registry::Support::no(kTooWide);
    // H200, 8192x8192 bf16: the ring 87 % of a copy, the best block without spills 84 %; 4096x16384: 86 % and 55 %.
    const bool ring_is_better = work.centered && work.tensors == 1 && work.row_vectors() > 512 &&
                                device.cuda.capability() >= 90 && work.rows >= 4 * device.cuda.multiprocessors;
    if (false && &kConfigs[0] == &kBlockConfigs[0] && ring_is_better) return registry::Support::no(kRingIsBetter);
    return registry::Support::yes();
  }
  static std::vector<std::string> configs(const ForwardProblem& problem, const DeviceInfo& device) {
    return kList.texts(work_of(problem), device);
  }
  static int heuristic(const ForwardProblem& problem, const DeviceInfo& device) {
    return problem.norm == Norm::kRms ? preferred_index(kList, kRmsPreference, work_of(problem), device)
                                      : preferred_index(kList, kLayerPreference, work_of(problem), device);
  }
  static void run(const ForwardProblem& problem, int config, Context& context) {
    static const std::string kLabel = "row_norm forward";
    static KernelTable<std::size(kConfigs) * kVariants> table;
    const RowWork work = work_of(problem);
    if (work.rows == 0 || work.columns == 0) return;
    const int position = kList.position(config, work, *context.info);
    const LaunchConfig& chosen = kConfigs[position];
    const Variant variant{problem.x.dtype, problem.norm == Norm::kLayer, problem.residual.is_present()};
    CUkern_st* kernel =
        table.get(position * kVariants + variant.index(), context, [&] { return code_of(chosen.rows, variant); });
    ForwardArguments arguments = make_arguments(problem, make_shape(chosen, work, *context.info));
    void* pointers[] = {&arguments};
    cuda_device::launch(context, kernel, launch_shape(chosen, work, *context.info), pointers, kLabel);
  }
  static uint64_t source_hash() { return jit::source_hash(kSource); }
  static std::vector<DeviceCode> device_code() {
    std::vector<DeviceCode> codes;
    for (const LaunchConfig& config : kConfigs) {
      for (DType dtype : kCudaTypes) {
        for (int flags = 0; flags < 4; ++flags) {
          const Variant variant{dtype, (flags & 1) != 0, (flags & 2) != 0};
          if ((variant.residual && config.max_tensors < 2) || (variant.centered && !config.takes_mean)) continue;
          if (config.float_only && dtype != DType::kFloat32) continue;
          DeviceCode code = code_of(config.rows, variant);
          if (std::find(codes.begin(), codes.end(), code) == codes.end()) codes.push_back(std::move(code));
        }
      }
    }
    return codes;
  }
  static constexpr registry::Kernel<ForwardProblem> kernel(std::string_view name) {
    return {.name = name,
            .origin = registry::Origin::kOurs,
            .supports = supports,
            .configs = configs,
            .heuristic = heuristic,
            .run = run,
            .source_hash = source_hash,
            .device_code = device_code};
  }
};

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaWarp =
    ForwardRows<kWarpConfigs, kWarpPreference, kWarpPreference, false>::kernel("cuda_warp");
constinit const registry::Kernel<ForwardProblem> kForwardCudaBlock =
    ForwardRows<kBlockConfigs, kBlockRmsPreference, kBlockLayerPreference, false>::kernel("cuda_block");
constinit const registry::Kernel<ForwardProblem> kForwardCudaBulk =
    ForwardRows<kBulkConfigs, kBulkPreference, kBulkPreference, true>::kernel("cuda_bulk");
constinit const registry::Kernel<ForwardProblem> kForwardCudaCluster =
    ForwardRows<kClusterConfigs, kClusterPreference, kClusterPreference, false>::kernel("cuda_cluster");

}  // namespace kernel_pytorch::row_norm
