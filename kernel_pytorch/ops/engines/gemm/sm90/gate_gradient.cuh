// The end of a product whose sums are the gradient of gated values without their rows' weights: with the saved gates
// and ups it makes their gradients, the gated values times the row's weight, and each row's sum of gradient times
// gated value over the tile's columns. Saved values come into L2 while the products run, and into registers while
// the box before leaves: there are not enough for two boxes at once. sm_90.
#pragma once

#include "kernel_pytorch/cuda/ptx/float_pairs.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/auxiliary.cuh"
#include "kernel_pytorch/ops/engines/gemm/sm90/schedule.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/gate.cuh"

namespace kernel_pytorch::product {

// A warp's 16 rows; a box is 64 columns. Saved values, like the output, are of a 16-bit type, and columns whole boxes.
template <Sm90Config kConfig, Sm90Epilogue kEpilogue, class Out>
class Sm90GateGradient {
  static constexpr int kBoxColumns = 64;
  static constexpr int kSums = 32, kWords = 16, kVectors = 4;  // a thread's, of a box
  static constexpr bool kIsUsed = kEpilogue.form == Sm90Form::kHalvesGradient;
  static_assert(!kIsUsed || sizeof(Out) == 2);

  struct Box {
    ptx::Word4 gates[kVectors], ups[kVectors];
  };

 public:
  explicit __device__ __forceinline__ Sm90GateGradient(const Sm90Arguments& arguments)
      : arguments_(arguments), lane_(static_cast<int32_t>(threadIdx.x % 32)) {}

  // While the products run: two lanes have a row, its gates and its ups.
  __device__ __forceinline__ void prefetch(int32_t row, const Sm90Place& at) const {
    if constexpr (kIsUsed) {
      constexpr int kLine = 64;  // 128 bytes
      if (row + lane_ / 2 >= at.end) return;
      const Out* saved = static_cast<const Out*>(arguments_.saved.data) +
                         (row + lane_ / 2) * arguments_.saved.row_stride + lane_ % 2 * arguments_.n;
#pragma unroll
      for (int i = 0; i < kConfig.tile_n; i += kLine) {
        if (at.column + i < arguments_.n) ptx::prefetch_global_l2(saved + at.column + i);
      }
    }
  }

  // The warp's sums of the tile, whose first row is `row`. put(words, column, is_gradient) sends a box, values packed
  // two by two, of the gates' and ups' gradients or of the weighted values.
  template <int kCount, class Put>
  __device__ __forceinline__ void store(const float (&sums)[kCount], int32_t row, const Sm90Place& at, const Put& put) {
    constexpr int kBoxes = kCount / kSums;
    row_ = row, end_ = at.end;
    Box saved;
    fetch(at.column, 0, saved);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights_[half] = own_row(half) < end_ ? arguments_.groups.row_weights[own_row(half)] : 0.0f;
      products_[half] = 0.0f;
    }
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int32_t first = at.column + box * kBoxColumns;
      if (first >= arguments_.n) break;
      uint32_t gates[kWords], ups[kWords], values[kWords];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        differentiate(sums + box * kSums, i, saved.gates[i], saved.ups[i], gates, ups, values);
        if (box == 0 && i == 1) fetch(first, 1, saved);  // no earlier: all sums are still there
      }
      put(gates, first, true);
      put(ups, arguments_.n + first, true);
      if (box + 1 < kBoxes) fetch(first + kBoxColumns, 0, saved);
      put(values, first, false);
      if (box + 1 < kBoxes) fetch(first + kBoxColumns, 1, saved);
    }
    store_products(at.column / kConfig.tile_n);
  }

 private:
  __device__ __forceinline__ int32_t own_row(int half) const {
    return row_ + tile::fragment_row(lane_, 2 * half);
  }

  // 32 columns of the box at `column`.
  __device__ __forceinline__ void fetch(int32_t column, int part, Box& saved) const {
    AuxiliaryPlace place = {.lane = lane_,
                            .row = row_,
                            .rows = end_,
                            .column = column + part * kBoxColumns / 2,
                            .columns = 2 * arguments_.n,
                            .batch = 0};
    fetch_auxiliary<Out, kVectors / 2, true>(arguments_.saved, place, saved.gates + part * kVectors / 2);
    place.column += arguments_.n;
    fetch_auxiliary<Out, kVectors / 2, true>(arguments_.saved, place, saved.ups + part * kVectors / 2);
  }

  // Vector `index` of a box: 32 columns of one of a thread's two rows. Words lie as sums do, rows in turns.
  __device__ __forceinline__ void differentiate(const float* sums, int index, ptx::Word4 saved_gates,
                                                ptx::Word4 saved_ups, uint32_t (&gates)[kWords],
                                                uint32_t (&ups)[kWords], uint32_t (&values)[kWords]) {
    const pointwise::GateLimits limits = {kEpilogue.clamped ? arguments_.groups.limit : 0.0f, arguments_.groups.slope};
    const ptx::Word4 g = tile::transpose_quad(saved_gates), u = tile::transpose_quad(saved_ups);
    const uint32_t of_gates[4] = {g.x, g.y, g.z, g.w}, of_ups[4] = {u.x, u.y, u.z, u.w};
    const int half = index % 2;
    const float weight = weights_[half];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const int i = index / 2 * 8 + word * 2 + half;
      float gate[2], up[2], value[2];
      tile::Word<Out>::unpack(of_gates[word], gate);
      tile::Word<Out>::unpack(of_ups[word], up);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float gradient = sums[2 * i + j];
        const float gated =
            pointwise::differentiate_gate<kEpilogue.kind, false>(limits, true, weight * gradient, gate[j], up[j]);
        products_[half] = fmaf(gradient, gated, products_[half]);
        value[j] = weight * gated;
      }
      gates[i] = tile::Word<Out>::pack(gate);
      ups[i] = tile::Word<Out>::pack(up);
      values[i] = tile::Word<Out>::pack(value);
    }
  }

  __device__ __forceinline__ void store_products(int32_t tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float product = products_[half];
      product += __shfl_xor_sync(0xffffffffu, product, 1);
      product += __shfl_xor_sync(0xffffffffu, product, 2);
      if (lane_ % 4 == 0 && own_row(half) < end_) {
        arguments_.groups.row_sums[int64_t{own_row(half)} * arguments_.order.tiles_n + tile] = product;
      }
    }
  }

  const Sm90Arguments& arguments_;
  int32_t lane_;
  int32_t row_ = 0, end_ = 0;
  float weights_[2] = {}, products_[2] = {};
};

}  // namespace kernel_pytorch::product
