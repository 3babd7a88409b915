#include "kernel_pytorch/ops/engines/row_norm/cuda/launch.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"

namespace kernel_pytorch::row_norm {
namespace {

constexpr int64_t kMaxGrid = 0x7fffffff;
// Shared memory that the driver keeps for itself per block, and what the kernels declare statically, rounded up.
constexpr int64_t kReservedBytes = 1024;
constexpr int64_t kStaticBytes = 1024;
constexpr int64_t kClusterStaticBytes = 9 * 1024;
// Clusters live inside a graphics processing cluster, which has 16 to 18 multiprocessors on an H100 or H200.
constexpr int64_t kMultiprocessorsPerGroup = 16;
constexpr int kMaxStridedRank = 4;                     // three dimensions of rows, and the columns
constexpr int64_t kMaxStridedRows = int64_t{1} << 30;  // dividers know numbers below 2^31, and blocks look ahead
constexpr const char* kMisalignedRows = "a row does not start at a multiple of 16 bytes";

// Where a tensor has half the bytes, slices are even, so that its own begin at sixteen of them.
int64_t slice_vectors(const LaunchConfig& config, const RowWork& work) {
  const int64_t even = work.narrow ? 2 : 1;
  return divide_up(work.row_vectors(), config.cluster * even) * even;
}

int64_t shared_parameter_bytes(const LaunchConfig& config, const RowWork& work) {
  if (config.rows.weight < Weight::kShared) return 0;
  const int64_t columns = int64_t{config.rows.row_threads} * config.rows.vectors * kVectorBytes / work.element_bytes;
  const int64_t bytes = config.rows.weight == Weight::kSharedFloat ? sizeof(float) : work.parameter_bytes;
  return columns * bytes * (work.centered ? 2 : 1);
}

// Dynamic shared memory left for rows if every block that should be resident fits.
int64_t free_ring_bytes(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device) {
  const int64_t own = kReservedBytes + (config.rows.clustered ? kClusterStaticBytes : kStaticBytes);
  const int64_t share = device.cuda.shared_bytes_per_multiprocessor / config.rows.blocks;
  return std::min(share, device.cuda.shared_bytes_per_block + kReservedBytes) - own -
         shared_parameter_bytes(config, work);
}

int64_t stage_count(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device) {
  if (config.rows.source <= Source::kPrefetch) return 0;
  if (work.columns == 0) return config.stages;
  const int64_t stage_bytes = slice_vectors(config, work) * work.tensors * kVectorBytes;
  return std::min<int64_t>(config.stages, free_ring_bytes(config, work, device) / stage_bytes);
}

int64_t resident_units(const LaunchConfig& config, const DeviceInfo& device) {
  const int64_t multiprocessors = std::max(device.cuda.multiprocessors, 1);
  if (config.cluster == 1) return multiprocessors * config.rows.blocks;
  const int64_t groups = std::max<int64_t>(multiprocessors / kMultiprocessorsPerGroup, 1);
  const int64_t per_group = kMultiprocessorsPerGroup * config.rows.blocks / config.cluster;
  return std::max<int64_t>(groups * per_group, 1);
}

}  // namespace

bool fits(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device, bool is_least) {
  const bool needs_hopper = config.rows.clustered || config.rows.source == Source::kRing;
  if (!has_feature(device, needs_hopper ? CudaFeature::kCluster : CudaFeature::kMma)) return false;
  if (config.cluster > most_cluster_blocks(device)) return false;
  const int64_t accumulators = config.rows.vectors * kVectorBytes / work.element_bytes * work.column_sums;
  if (work.tensors > config.max_tensors || accumulators > config.max_accumulators) return false;
  if ((work.centered && !config.takes_mean) || (work.element_bytes < 4 && config.float_only)) return false;
  const int64_t slice = slice_vectors(config, work);
  const int64_t capacity = static_cast<int64_t>(config.rows.row_threads) * config.rows.vectors;
  if (slice > capacity || (slice * 4 < capacity && !is_least)) return false;
  if (config.rows.weight >= Weight::kShared && free_ring_bytes(config, work, device) < 0) return false;
  if (config.rows.source == Source::kAsync && work.narrow) return false;  // it copies sixteen bytes at a time
  if (config.rows.source == Source::kAsync) return stage_count(config, work, device) == kAsyncStages;
  return config.rows.source != Source::kRing || stage_count(config, work, device) >= 2;
}

RowShape make_shape(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device) {
  return {.rows = work.rows,
          .columns = static_cast<int32_t>(work.columns),
          .slice_vectors = static_cast<int32_t>(slice_vectors(config, work)),
          .stages = static_cast<int32_t>(stage_count(config, work, device)),
          .inner = make_divider(static_cast<uint32_t>(work.inner)),
          .middle = make_divider(static_cast<uint32_t>(work.middle))};
}

int64_t unit_count(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device) {
  const int64_t needed = divide_up(work.rows, config.rows.threads / config.rows.row_threads);
  // Every unit gets the same number of rounds, so that none is left alone with a last row; and no more than keep every
  // multiprocessor busy.
  const int64_t even = std::max<int64_t>(divide_up(needed, resident_units(config, device)), 1);
  const int64_t rounds = config.rows_per_block != 0 ? std::min<int64_t>(config.rows_per_block, even) : even;
  return std::min(divide_up(needed, rounds), kMaxGrid / config.cluster);
}

cuda_device::LaunchShape launch_shape(const LaunchConfig& config, const RowWork& work, const DeviceInfo& device) {
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(unit_count(config, work, device) * config.cluster);
  shape.block_x = static_cast<unsigned>(config.rows.threads);
  shape.cluster_x = static_cast<unsigned>(config.cluster);
  shape.shared_bytes = static_cast<unsigned>(stage_count(config, work, device) * work.tensors *
                                                 slice_vectors(config, work) * kVectorBytes +
                                             shared_parameter_bytes(config, work));
  return shape;
}

MixedType mixed_type(DType rows, const TensorView& view) {
  if (!view.is_present() || view.dtype == rows) return MixedType::kSame;
  return view.dtype == DType::kBFloat16 ? MixedType::kBFloat16 : MixedType::kFloat16;
}

RowTensor row_tensor(DType rows, const TensorView& view) {
  if (!view.is_present()) return {nullptr, 0, MixedType::kSame, 0, 0};
  const auto stride_bytes = [&](int dimension) {
    return dimension < 0 ? 0 : view.strides[dimension] * size_of(view.dtype);
  };
  return {view.data, stride_bytes(view.rank - 2), mixed_type(rows, view), stride_bytes(view.rank - 3),
          stride_bytes(view.rank - 4)};
}

RowWork with_dimensions(RowWork work, const TensorView& view) {
  if (!is_strided(view)) return work;
  work.inner = std::max<int64_t>(view.size(-2), 1);
  work.middle = std::max<int64_t>(view.size(-3), 1);
  return work;
}

const char* row_obstacle(const TensorView& view, bool takes_strides) {
  if (!view.is_present() || !is_strided(view)) return vector_access_obstacle(view);
  if (!takes_strides) return kStridedRows;
  if (view.rank > kMaxStridedRank) return "rows along more than three dimensions of unlike strides";
  if (rows_of(view) > kMaxStridedRows) return "more than 2^30 rows of several strides";
  TensorView row = view;  // every row is like the first: one dimension of them shows what can be read
  row.rank = 2;
  row.sizes = {1, view.size(-1)};
  row.strides = {0, view.stride(-1)};
  if (const char* obstacle = vector_access_obstacle(row)) return obstacle;
  return has_aligned_rows(view) ? nullptr : kMisalignedRows;
}

std::vector<std::string> ConfigList::texts(const RowWork& work, const DeviceInfo& device) const {
  std::vector<std::string> texts;
  for (int i = 0; i < static_cast<int>(configs.size()); ++i) {
    if (is_legal(i, work, device)) texts.push_back(config_text(configs[i]));
  }
  return texts;
}

bool ConfigList::any_fits(const RowWork& work, const DeviceInfo& device) const {
  for (int i = 0; i < static_cast<int>(configs.size()); ++i) {
    if (is_legal(i, work, device)) return true;
  }
  return false;
}

int ConfigList::position(int legal_index, const RowWork& work, const DeviceInfo& device) const {
  for (int i = 0; i < static_cast<int>(configs.size()); ++i) {
    if (is_legal(i, work, device) && legal_index-- == 0) return i;
  }
  fail(ErrorCode::kInternal, "row_norm: a config index beyond the legal ones for [", work.rows, ", ", work.columns,
       "]");
}

int ConfigList::legal_index(int position, const RowWork& work, const DeviceInfo& device) const {
  if (!is_legal(position, work, device)) return -1;
  int index = 0;
  for (int i = 0; i < position; ++i) index += is_legal(i, work, device);
  return index;
}

int preferred_index(const ConfigList& list, std::span<const Preference> preferences, const RowWork& work,
                    const DeviceInfo& device) {
  for (const Preference& preference : preferences) {
    if (work.row_vectors() > preference.max_row_vectors) continue;
    if (preference.tensors != 0 && preference.tensors != work.tensors) continue;
    const int index = list.legal_index(preference.position, work, device);
    if (index >= 0) return index;
  }
  return 0;
}

}  // namespace kernel_pytorch::row_norm
