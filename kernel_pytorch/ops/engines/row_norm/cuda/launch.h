// The host side that the CUDA row norms share: launch configs and their legality, and grids.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/engines/row_norm/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::row_norm {

// A compiled kernel and how it is launched; only `rows` makes a new compilation.
struct LaunchConfig {
  RowConfig rows;
  int stages = 0;          // of the ring at most; fewer where shared memory ends
  int cluster = 1;         // blocks that share a row
  int rows_per_block = 0;  // that a block takes (times the rows it holds at once); 0: as many as keep every block busy
  // Limits.
  int max_tensors = 3;        // that the registers can hold at once
  int max_accumulators = 64;  // column sums of a thread that the registers can hold
  bool takes_mean = true;     // the registers can hold what layer norm needs besides
  bool float_only = false;    // 16-bit rows unpack to more than the registers can hold
};

constexpr bool is_legal(const LaunchConfig& config) {
  const bool is_ring = config.rows.source == Source::kRing;
  const bool stages_are_legal = is_ring ? config.stages >= 2 && config.stages <= kMaxStages
                                        : config.stages == (config.rows.source == Source::kAsync ? kAsyncStages : 0);
  return is_legal(config.rows) && stages_are_legal && (config.cluster > 1) == config.rows.clustered &&
         config.cluster <= 16 && config.rows_per_block >= 0;
}

inline constexpr auto kRowConfigFields = config_fields<RowConfig>(
    config_field<&RowConfig::threads>(), config_field<&RowConfig::row_threads>(), config_field<&RowConfig::vectors>(),
    config_field<&RowConfig::source>("direct prefetch ring async"), config_field<&RowConfig::clustered>(),
    config_field<&RowConfig::weight>("reread registers shared shared_float"), config_field<&RowConfig::blocks>());
constexpr ConfigFields fields_of(const RowConfig&) {
  return kRowConfigFields;
}
inline constexpr auto kLaunchConfigFields = config_fields<LaunchConfig>(
    config_field<&LaunchConfig::rows>(), config_field<&LaunchConfig::stages>(), config_field<&LaunchConfig::cluster>(),
    config_field<&LaunchConfig::rows_per_block>(), config_limit<&LaunchConfig::max_tensors>(),
    config_limit<&LaunchConfig::max_accumulators>(), config_limit<&LaunchConfig::takes_mean>(),
    config_limit<&LaunchConfig::float_only>());
constexpr ConfigFields fields_of(const LaunchConfig&) {
  return kLaunchConfigFields;
}

// What a launch depends on, the same for forward and backward.
struct RowWork {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 0;
  int tensors = 0;      // read per row
  int column_sums = 0;  // kept over all rows: the weight's and the bias' gradient
  bool centered = false;
  int parameter_bytes = 0;  // of a value of weight or bias
  bool narrow = false;      // one of the input tensors is 16-bit, the others fp32
  int64_t inner = 1;        // rows of the innermost dimension of rows, and of the one around it
  int64_t middle = 1;
  int64_t row_vectors() const { return columns * element_bytes / 16; }
};

// Whether the row fits the config on this device, and wastes at most three quarters of its threads unless `is_least`.
bool fits(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device, bool is_least);
RowShape make_shape(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device);
// Blocks, or clusters, that share the rows out among them.
int64_t unit_count(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device);
cuda_device::LaunchShape launch_shape(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device);

// Views of one problem have the same leading dimensions, merged where the strides of all of them allow it.
inline bool is_strided(const TensorView& view) {
  return view.rank > 2;
}
// Sets `inner` and `middle`.
RowWork with_dimensions(RowWork work, const TensorView& view);
// Why a tensor's rows cannot be read as vectors, along one dimension or, with `takes_strides`, along three.
const char* row_obstacle(const TensorView& view, bool takes_strides);

// `rows` is the type of x or value.
MixedType mixed_type(DType rows, const TensorView& view);
RowTensor row_tensor(DType rows, const TensorView& view);

// A list of configs and the index arithmetic between it and the part of it that is legal for a problem.
struct ConfigList {
  std::span<const LaunchConfig> configs;

  std::vector<std::string> texts(const RowWork& work, const DeviceInfo& device) const;
  bool any_fits(const RowWork& work, const DeviceInfo& device) const;
  int position(int legal_index, const RowWork& work, const DeviceInfo& device) const;  // in `configs`
  int legal_index(int position, const RowWork& work, const DeviceInfo& device) const;  // -1: not legal
  bool is_legal(int position, const RowWork& work, const DeviceInfo& device) const {
    return fits(configs[position], work, device, position == 0);
  }
};

// Rows up to so many vectors prefer the config at this position of a list.
struct Preference {
  int64_t max_row_vectors;
  int position;
  int tensors = 0;  // only where so many are read; 0: always
};
int preferred_index(const ConfigList& list, std::span<const Preference> preferences, const RowWork& work,
                    const DeviceInfo& device);

inline constexpr const char* kTooWide = "the row does not fit this kernel's registers";
inline constexpr const char* kRmsBias = "a bias without a mean to subtract: cuda_any has it";
inline constexpr const char* kStridedRows = "rows of several strides: cuda_warp, cuda_block and cuda_any have them";
inline constexpr const char* kFewRows = "fewer rows than four per multiprocessor: no ring to fill";

// Rings and clusters, which are at the memory's speed at their best, are compiled for plain problems alone.
constexpr bool has_variants(const LaunchConfig& config) {
  return !config.rows.clustered && config.rows.source != Source::kRing;
}

// What the rows of forward's and backward's kernel lists have in common. `Rows` has kList, kWantsManyRows, work,
// obstacle, preference, run, source_hash and device_code.
template <class Rows, class Problem>
struct RowKernel {
  static registry::Support supports(const Problem& problem, const DeviceInfo& device) {
    if (const char* obstacle = Rows::obstacle(problem, device)) return registry::Support::no(obstacle);
    const RowConfig& first = Rows::kList.configs[0].rows;
    const bool needs_hopper = first.clustered || first.source == Source::kRing;
    const char* missing = feature_obstacle(device, CudaFeature::kCluster);
    if (needs_hopper && missing != nullptr) return registry::Support::no(missing);
    const RowWork work = Rows::work(problem);
    if (Rows::kWantsManyRows && work.rows < 4 * device.cuda.multiprocessors) return registry::Support::no(kFewRows);
    return Rows::kList.any_fits(work, device) ? registry::Support::yes() : registry::Support::no(kTooWide);
  }
  static std::vector<std::string> configs(const Problem& problem, const DeviceInfo& device) {
    return Rows::kList.texts(Rows::work(problem), device);
  }
  static int heuristic(const Problem& problem, const DeviceInfo& device) {
    return preferred_index(Rows::kList, Rows::preference(problem), Rows::work(problem), device);
  }
  static constexpr registry::Kernel<Problem> kernel(std::string_view name) {
    return {.name = name,
            .origin = registry::Origin::kOurs,
            .supports = supports,
            .configs = configs,
            .heuristic = heuristic,
            .run = Rows::run,
            .source_hash = Rows::source_hash,
            .device_code = Rows::device_code};
  }
};

}  // namespace kernel_pytorch::row_norm
