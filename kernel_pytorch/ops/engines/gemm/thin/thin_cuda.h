// What host and device agree on for products of few rows (decoding): one pass over the weight at the speed of memory.
#pragma once

#include "kernel_pytorch/ops/engines/gemm/tile/tile_cuda.h"

namespace kernel_pytorch::product {

inline constexpr int kThinRows = 16;        // at most
inline constexpr int kThinRowTile = 8;      // rows of a, the columns of one mma
inline constexpr int kThinBlock = 32;       // of k: 16 bytes of each of the four lanes that share a row of the weight
inline constexpr int kThinBlocks = 4;       // of k in flight: 256 bytes of each row of the weight
inline constexpr int kThinPartPadding = 4;  // floats after a row of a warp's sums: four lanes write to different banks

struct ThinConfig {
  int columns = 16;  // of the output, of one block of threads
  int warps = 8;     // they divide k among them
};
KP_SHARED_CODE constexpr bool is_legal(const ThinConfig& config) {
  return (config.columns == 16 || config.columns == 32) &&
         (config.warps == 4 || config.warps == 8 || config.warps == 16);
}

}  // namespace kernel_pytorch::product
