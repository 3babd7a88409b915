// The tiles of cuda_mma's backward, and which of them a problem takes on a device.
#pragma once

#include <array>

#include "kernel_pytorch/ops/attention/attention_mma.h"

namespace kernel_pytorch::attention::backward_tiles {

// By head size: rows are keys, then queries.
inline constexpr MmaTile kKeyTiles[] = {
    {64, 64, 64, 4, 1, 64, 2},   {96, 96, 96, 4, 1, 32, 2},   {128, 128, 128, 4, 1, 32, 2},
    {192, 128, 96, 4, 1, 32, 2}, {192, 192, 96, 4, 1, 32, 2}, {256, 256, 128, 4, 1, 32, 1},
    {512, 512, 64, 2, 1, 32, 1},
};
inline constexpr MmaTile kQueryTiles[] = {
    {64, 64, 64, 4, 1, 64, 2},    {96, 96, 96, 4, 1, 64, 2},    {128, 128, 128, 4, 1, 32, 2},
    {192, 128, 192, 4, 1, 32, 2}, {192, 192, 192, 4, 1, 32, 2}, {256, 256, 256, 4, 1, 32, 1},
    {512, 512, 128, 2, 1, 32, 1},
};
// Of features that need the registers themselves.
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

// Of fp32. Stages are what leaves the compiler without spills.
inline constexpr MmaTile kFloatKeyTiles[] = {
    {64, 64, 64, 4, 1, 32, 2, 4},    {96, 96, 96, 4, 1, 32, 1, 4},    {128, 128, 128, 4, 1, 32, 1, 4},
    {192, 128, 192, 4, 1, 16, 1, 4}, {192, 192, 192, 4, 1, 16, 1, 4}, {256, 256, 256, 4, 1, 16, 1, 4},
    {512, 512, 128, 1, 1, 16, 1, 4},
};
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

struct Tiles {
  MmaTile keys, queries;
};
inline Tiles tiles_of(const BackwardProblem& problem, const DeviceInfo& device, bool heavy) {
  const int index = tile_index(problem);
  if (problem.query.dtype == DType::kFloat32) {
    const MmaTile keys = heavy ? kHeavyFloatKeyTiles[index] : kFloatKeyTiles[index];
    const MmaTile queries = heavy ? kHeavyFloatQueryTiles[index] : kFloatQueryTiles[index];
    return {fitted(keys, device, backward_shared_bytes), fitted(queries, device, backward_shared_bytes)};
  }
  if (heavy) return {kHeavyKeyTiles[index], kHeavyQueryTiles[index]};
  return {kKeyTiles[index], kQueryTiles[index]};
}

// The sums of both gradients of a tile's keys are too many for the registers.
inline bool has_own_values(const MmaTile& tile) {
  return tile.bytes == 4 && tile.slice > 64;
}

}  // namespace kernel_pytorch::attention::backward_tiles
