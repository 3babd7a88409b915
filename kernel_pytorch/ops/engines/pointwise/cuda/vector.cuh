// What the vector kernels share: where a vector lies, biases, dropout. A thread holds kVectors vectors of 16 bytes, a
// block's width apart, all loaded before any is used.
#pragma once

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/cuda/tile/vector.cuh"
#include "kernel_pytorch/ops/engines/pointwise/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/math.cuh"

namespace kernel_pytorch::pointwise {

// Blocks with one vector per thread have any size; others are known to be whole, which leaves them a register.
template <int kVectors>
__device__ __forceinline__ uint32_t block_threads() {
  return kVectors == 1 ? blockDim.x : kThreads;
}

struct VectorPlace {
  int64_t row;
  uint32_t column;  // in vectors
};

__device__ __forceinline__ VectorPlace place_of(const VectorShape& shape, uint32_t vector) {
  const uint32_t row = divide(vector, shape.row_vectors);
  return {row, vector - row * shape.row_vectors.divisor};
}

__device__ __forceinline__ const char* address_of(const RowTensor& tensor, const VectorPlace& place) {
  return static_cast<const char*>(tensor.data) + place.row * tensor.row_stride_bytes +
         static_cast<int64_t>(place.column) * tile::kVectorBytes;
}

template <class T>
__device__ __forceinline__ tile::Vector<T> load(const RowTensor& tensor, const VectorPlace& place) {
  return {ptx::ld_global_nc_v4(address_of(tensor, place))};  // past L1 it is 4 % slower: engines/pointwise/NOTES.md
}
template <class T>
__device__ __forceinline__ void store(const RowTensor& tensor, const VectorPlace& place,
                                      const float (&values)[tile::Vector<T>::kCount]) {
  ptx::st_global_v4(const_cast<char*>(address_of(tensor, place)), tile::Vector<T>::pack(values).words);
}

// Adds a bias of the rows' type or float; null: nothing.
template <class T>
__device__ __forceinline__ void add_bias(const void* bias, bool is_float, uint32_t column,
                                         float (&values)[tile::Vector<T>::kCount]) {
  constexpr int kCount = tile::Vector<T>::kCount;
  if (bias == nullptr) return;
  float biases[kCount];
  if (is_float) {
    const char* start = static_cast<const char*>(bias) + static_cast<int64_t>(column) * kCount * sizeof(float);
#pragma unroll
    for (int part = 0; part < kCount / 4; ++part) {
      float four[4];
      tile::load_shared_by_all<float>(start + part * tile::kVectorBytes).unpack(four);
#pragma unroll
      for (int i = 0; i < 4; ++i) biases[part * 4 + i] = four[i];
    }
  } else {
    tile::load_shared_by_all<T>(static_cast<const char*>(bias) + static_cast<int64_t>(column) * tile::kVectorBytes)
        .unpack(biases);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] += biases[i];
}

// The dropout of a call: its seed is read by each thread.
class Dropout {
 public:
  __device__ __forceinline__ explicit Dropout(const DropoutArguments& arguments) : arguments_(arguments) {
    if (!drops()) return;
    keys_ = philox_keys(static_cast<uint64_t>(arguments.seed[0]));
    offset_ = static_cast<uint64_t>(arguments.seed[1]);
  }
  // For loops: what a warp's first lane hands to the others is known to be the same in all of them, so that the keys
  // are in registers of the warp and not of each thread. All threads of a warp call it.
  static __device__ __forceinline__ Dropout for_rows(const DropoutArguments& arguments) {
    Dropout dropout(arguments);
    if (!dropout.drops()) return dropout;
#pragma unroll
    for (auto& key : dropout.keys_.words) {
      key[0] = __shfl_sync(0xffffffffu, key[0], 0);
      key[1] = __shfl_sync(0xffffffffu, key[1], 0);
    }
    return dropout;
  }
  __device__ __forceinline__ bool drops() const {
    return arguments_.seed != nullptr;
  }

  // `vector` counts vectors of kCount elements in the contiguous output; a block of bits covers one or two of them.
  template <int kCount>
  __device__ __forceinline__ void apply(uint64_t vector, float (&values)[kCount]) const {
    if (!drops()) return;
    constexpr int kVectorsPerBlock = kPhiloxElements / kCount;
    const PhiloxBlock block = philox(keys_, offset_, vector / kVectorsPerBlock);
    const bool upper = kVectorsPerBlock == 2 && (vector & 1) != 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const uint32_t word =
          kVectorsPerBlock == 2 ? (upper ? block.words[i / 2 + 2] : block.words[i / 2]) : block.words[i / 2];
      values[i] = word << 16 > arguments_.limit ? values[i] * arguments_.scale : 0.0f;
      values[i + 1] = word > arguments_.limit ? values[i + 1] * arguments_.scale : 0.0f;
    }
  }

  // One element, for the kernels that take any strides.
  __device__ __forceinline__ float apply_one(int64_t element, float value) const {
    if (!drops()) return value;
    const PhiloxBlock block = philox(keys_, offset_, static_cast<uint64_t>(element) / kPhiloxElements);
    const int index = static_cast<int>(element % kPhiloxElements);
    uint32_t word = block.words[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) word = index / 2 == i ? block.words[i] : word;
    const uint32_t bits = index % 2 == 0 ? word << 16 : word & 0xffff0000u;
    return bits > arguments_.limit ? value * arguments_.scale : 0.0f;
  }

 private:
  const DropoutArguments& arguments_;
  PhiloxKeys keys_{};
  uint64_t offset_ = 0;
};

}  // namespace kernel_pytorch::pointwise
