// The tiles of cuda_mma's backward, and which of them a problem takes on a device.
#pragma once

#include <array>

#include "kernel_pytorch/ops/attention/cuda_mma/tiles.h"

namespace kernel_pytorch::attention::backward_tiles {

// By head size: rows are keys, then queries.
inline constexpr MmaTile kKeyTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 64, .stages = 2},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 32, .stages = 2},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 128, .slice = 96, .warps = 4, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 192, .slice = 96, .warps = 4, .columns = 32, .stages = 2},
    {.size = 256, .value_size = 256, .slice = 128, .warps = 4, .columns = 32, .stages = 1},
    {.size = 512, .value_size = 512, .slice = 64, .warps = 2, .columns = 32, .stages = 1},
};
static_assert(are_legal(kKeyTiles));
inline constexpr MmaTile kQueryTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 64, .stages = 2},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 64, .stages = 2},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 128, .slice = 192, .warps = 4, .columns = 32, .stages = 2},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 32, .stages = 2},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 32, .stages = 1},
    {.size = 512, .value_size = 512, .slice = 128, .warps = 2, .columns = 32, .stages = 1},
};
static_assert(are_legal(kQueryTiles));
// Tiles for features with high register pressure.
inline constexpr auto kHeavyKeyTiles = [] {
  auto tiles = std::to_array(kKeyTiles);
  tiles[0].columns = 32;
  tiles[2].slice = 64;
  return tiles;
}();
inline constexpr auto kHeavyQueryTiles = [] {
  auto tiles = std::to_array(kQueryTiles);
  tiles[0].columns = tiles[1].columns = 32;
  return tiles;
}();

// Tiles for fp32. The number of stages is the one without spills.
inline constexpr MmaTile kFloatKeyTiles[] = {
    {.size = 64, .value_size = 64, .slice = 64, .warps = 4, .columns = 32, .stages = 2, .bytes = 4},
    {.size = 96, .value_size = 96, .slice = 96, .warps = 4, .columns = 32, .stages = 1, .bytes = 4},
    {.size = 128, .value_size = 128, .slice = 128, .warps = 4, .columns = 32, .stages = 1, .bytes = 4},
    {.size = 192, .value_size = 128, .slice = 192, .warps = 4, .columns = 16, .stages = 1, .bytes = 4},
    {.size = 192, .value_size = 192, .slice = 192, .warps = 4, .columns = 16, .stages = 1, .bytes = 4},
    {.size = 256, .value_size = 256, .slice = 256, .warps = 4, .columns = 16, .stages = 1, .bytes = 4},
    {.size = 512, .value_size = 512, .slice = 128, .warps = 1, .columns = 16, .stages = 1, .bytes = 4},
};
static_assert(are_legal(kFloatKeyTiles));
inline constexpr auto kFloatQueryTiles = [] {
  auto tiles = std::to_array(kFloatKeyTiles);
  tiles[3].stages = tiles[4].stages = 2;
  return tiles;
}();
constexpr auto heavy_of(auto tiles) {
  tiles[0].columns = tiles[2].columns = 16;
  tiles[2].stages = 2;
  return tiles;
}
inline constexpr auto kHeavyFloatKeyTiles = heavy_of(std::to_array(kFloatKeyTiles));
inline constexpr auto kHeavyFloatQueryTiles = heavy_of(kFloatQueryTiles);
static_assert(std::size(kFloatKeyTiles) == std::size(kKeyTiles));

inline int tile_index(const BackwardProblem& problem) {
  return tile_for(kKeyTiles, problem.query.size(3), problem.value.size(3));
}

inline MmaTile fit(const MmaTile& tile, const DeviceInfo& device) {
  return fitted(tile, device, backward_shared_bytes, kAmdSlice);
}

struct Tiles {
  MmaTile keys, queries;
};
inline constexpr auto kTilesFields = config_fields<Tiles>(config_part<&Tiles::keys>(), config_part<&Tiles::queries>());
constexpr ConfigFields fields_of(const Tiles&) {
  return kTilesFields;
}
inline Tiles tiles_of(const BackwardProblem& problem, const DeviceInfo& device, bool heavy) {
  const int index = tile_index(problem);
  const auto fits = [&](const MmaTile& keys, const MmaTile& queries) {
    return Tiles{fit(keys, device), fit(queries, device)};
  };
  if (problem.query.dtype == DType::kFloat32) {
    return heavy ? fits(kHeavyFloatKeyTiles[index], kHeavyFloatQueryTiles[index])
                 : fits(kFloatKeyTiles[index], kFloatQueryTiles[index]);
  }
  return heavy ? fits(kHeavyKeyTiles[index], kHeavyQueryTiles[index]) : fits(kKeyTiles[index], kQueryTiles[index]);
}

// The sums of both gradients of a tile's keys are too many for the registers.
inline bool has_own_values(const MmaTile& tile) {
  return tile.bytes == 4 && tile.slice > 64;
}

}  // namespace kernel_pytorch::attention::backward_tiles
