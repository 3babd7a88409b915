// The host's side of attention/cuda_mma/tile_cuda.h: which tile a problem takes, and why none takes it.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <vector>

#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/cuda_mma/tile_cuda.h"
#include "kernel_pytorch/ops/attention/operation.h"

namespace kernel_pytorch::attention {

inline constexpr auto kMmaTileFields = config_fields<MmaTile>(
    config_field<&MmaTile::size>(), config_field<&MmaTile::value_size>(), config_field<&MmaTile::slice>(),
    config_field<&MmaTile::warps>(), config_field<&MmaTile::row_blocks>(), config_field<&MmaTile::columns>(),
    config_field<&MmaTile::stages>(), config_field<&MmaTile::bytes>());
constexpr ConfigFields fields_of(const MmaTile&) {
  return kMmaTileFields;
}
constexpr bool is_legal(const MmaTile& tile) {
  return tile.size % 32 == 0 && tile.value_size % 32 == 0 && tile.slice % 32 == 0 && tile.slice >= 32 &&
         tile.slice <= std::max(tile.size, tile.value_size) && tile.size <= 512 && tile.value_size <= 512 &&
         tile.warps >= 1 && tile.warps <= 8 && tile.row_blocks >= 1 && tile.row_blocks <= 2 && tile.columns % 16 == 0 &&
         tile.columns >= 16 && tile.stages >= 1 && (tile.bytes == 2 || tile.bytes == 4);
}

// What the kernels on mma compile: these are the exact ones, so softcap is too.
Features mma_features_of(const Scoring& scoring, DType dtype, int64_t tile_queries, int64_t tile_keys);

// Features that need more than arithmetic for each score: their kernels hold fewer rows, for want of registers. Those
// of fp32 have a few registers less: packed sequences are enough.
bool is_heavy(const Features& features, DType dtype = DType::kBFloat16);

// Null, or why no kernel on mma takes these tensors on this device.
const char* mma_obstacle(const TensorView& query, const TensorView& key, const TensorView& value,
                         const DeviceInfo& device);

// Position of the first tile of a list that holds the head sizes, or -1.
template <class Tiles>
int tile_for(const Tiles& tiles, int64_t size, int64_t value_size) {
  for (size_t i = 0; i < std::size(tiles); ++i) {
    if (tiles[i].size >= size && tiles[i].value_size >= value_size) return static_cast<int>(i);
  }
  return -1;
}

inline constexpr int kAmdSlice = 128, kAmdColumns = 32;

// A tile that needs less shared memory, where the device's blocks have less than the tile was chosen for: shorter steps
// first, then one of them at a time, then fewer rows. On AMD's GPUs a block computes fewer columns at a time, in
// shorter steps, of one block of rows: of more HIPRTC 5.2 keeps sums or scores in memory.
template <class Bytes>
MmaTile fitted(MmaTile tile, const DeviceInfo& device, const Bytes& bytes, int amd_slice) {
  const auto is_too_large = [&] { return bytes(tile) > device.cuda.shared_bytes_per_block; };
  if (device.is_amd()) {
    tile.row_blocks = 1;
    tile.columns = std::min(tile.columns, kAmdColumns);
    tile.slice = std::min(tile.slice, amd_slice);
  }
  if (tile.bytes == 4) {
    if (is_too_large() && tile.warps == 8) tile.warps = 4;
    if (is_too_large()) tile.columns = 16, tile.stages = 1;
  } else {
    if (is_too_large()) tile.columns = std::min(tile.columns, 32);
    if (is_too_large()) tile.columns = 16;
    if (is_too_large()) tile.stages = 1;
  }
  while (is_too_large() && tile.warps > 1) tile.warps /= 2;
  return tile;
}

// Codes of every GPU that a bundle may be for: what `codes_of` lists for each size of a block's shared memory, with the
// sizes that take it.
std::vector<DeviceCode> codes_by_shared_memory(
    const std::function<std::vector<DeviceCode>(const DeviceInfo&)>& codes_of);
// The tiles as such a GPU takes them, without those that are too large for it even so (at the end of the list).
template <class Fit, class Bytes>
std::vector<MmaTile> tiles_on(const DeviceInfo& device, std::span<const MmaTile> tiles, const Fit& fit,
                              const Bytes& bytes) {
  std::vector<MmaTile> all;
  for (const MmaTile& tile : tiles) {
    const MmaTile taken = fit(tile, device);
    if (bytes(taken) <= device.cuda.shared_bytes_per_block) all.push_back(taken);
  }
  return all;
}

inline constexpr const char* kMmaTooLarge = "takes heads of up to 512 columns";
inline constexpr const char* kMmaSlicedParts = "adds to outputs of up to 256 columns";
inline constexpr const char* kMmaSharedMemory = "this head size needs more shared memory than the device's blocks have";

// An entry of a device source: function<features, element, tile, vectors>, or with an argument more.
struct MmaVariant {
  Features features;
  DType dtype;
  MmaTile tile;
  bool vectors;
};
DeviceCode mma_code(std::string_view source, std::string_view function, const MmaVariant& variant,
                    const std::string& generated, std::string_view last_argument = {});

// Everything of the arguments but the number of tiles; clears rows of packed tensors past the last sequence. Returns
// whether all rows are vectors.
bool fill_forward_arguments(const ForwardProblem& problem, const Features& features, Context& context,
                            MmaForwardArguments& arguments);

// What CI compiles: causal for every tile, and every compiled_features() for one tile each, in turn, so that each
// feature and each tile is there and the list stays short.
std::vector<DeviceCode> mma_codes(std::string_view source, std::string_view function, std::span<const MmaTile> tiles,
                                  std::span<const MmaTile> heavy_tiles, std::string_view last_argument = {});
// The fp32 kernels that CI compiles: causal for every tile, one product for the first tile, and the features with the
// highest register pressure for the tile of a head of `size`.
std::vector<DeviceCode> mma_float_codes(std::string_view source, std::string_view function,
                                        std::span<const MmaTile> tiles, std::span<const MmaTile> heavy_tiles, int size,
                                        std::string_view last_argument = {});

}  // namespace kernel_pytorch::attention
