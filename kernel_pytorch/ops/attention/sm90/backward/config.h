// The tiles of the backward on sm_90, and which of them a problem may run with.
#pragma once

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/ops/attention/cuda/features.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/attention/sm90/backward/tile_cuda.h"

namespace kernel_pytorch::attention {

inline constexpr auto kBackwardTileFields =
    config_fields<BackwardTile>(config_field<&BackwardTile::head>(), config_field<&BackwardTile::value>(),
                                config_field<&BackwardTile::keys>(), config_field<&BackwardTile::queries>(),
                                config_field<&BackwardTile::stages>(), config_field<&BackwardTile::score_stages>(),
                                config_field<&BackwardTile::sum_columns>(), config_field<&BackwardTile::in_turns>());
constexpr ConfigFields fields_of(const BackwardTile&) {
  return kBackwardTileFields;
}

namespace sm90_backward {

// By head size: where registers are enough, and where the features or the type need more of them for each score.
inline constexpr BackwardTile kTiles[] = {
    {.head = 64, .value = 64, .keys = 128, .queries = 128, .stages = 3, .score_stages = 2, .sum_columns = 64},
    {.head = 96, .value = 96, .keys = 128, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 96},
    {.head = 128, .value = 128, .keys = 128, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 64},
    {.head = 192, .value = 128, .keys = 64, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 64},
    {.head = 256, .value = 256, .keys = 64, .queries = 64, .stages = 2, .score_stages = 2, .sum_columns = 64},
};
inline constexpr BackwardTile kHeavyTiles[] = {
    {.head = 64, .value = 64, .keys = 128, .queries = 64, .stages = 4, .score_stages = 3, .sum_columns = 64},
    {.head = 96, .value = 96, .keys = 128, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 32},
    {.head = 128, .value = 128, .keys = 128, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 32},
    {.head = 192, .value = 128, .keys = 64, .queries = 64, .stages = 3, .score_stages = 3, .sum_columns = 32},
    {.head = 256, .value = 256, .keys = 64, .queries = 64, .stages = 2, .score_stages = 2, .sum_columns = 32},
};

inline constexpr size_t kNarrowTiles = 3;  // of heads up to 128 columns

static_assert(are_legal(kTiles) && are_legal(kHeavyTiles));

inline bool needs_registers(const Features& features) {
  return changes_scores(features) || masks_every_tile(features) || features.dropout;
}

// The first tile that holds the heads, or -1.
inline int tile_index(const BackwardProblem& problem) {
  for (int i = 0; i < static_cast<int>(std::size(kTiles)); ++i) {
    if (problem.query.size(3) <= kTiles[i].head && problem.value.size(3) <= kTiles[i].value) return i;
  }
  return -1;
}

// Whether the heavy tile is the only one. Elsewhere it is the second config, for the tuner.
inline bool needs_heavy_tile(const BackwardProblem& problem) {
  const Features features = features_of(problem.scoring);
  return problem.query.dtype == DType::kFloat16 || needs_registers(features) ||
         (features.segments && kTiles[tile_index(problem)].queries > 64);
}

struct Variant {
  BackwardTile tile;
  int index;  // of all that are compiled
};
inline Variant variant_of(const BackwardProblem& problem, int config) {
  const int i = tile_index(problem), is_half = problem.query.dtype == DType::kFloat16;
  const bool is_heavy = config == 1 || needs_heavy_tile(problem);
  Variant variant{is_heavy ? kHeavyTiles[i] : kTiles[i], (i * 2 + is_heavy) * 4 + is_half * 2};
  variant.tile.in_turns = problem.scoring.deterministic;
  variant.index += problem.scoring.deterministic;
  return variant;
}

}  // namespace sm90_backward
}  // namespace kernel_pytorch::attention
