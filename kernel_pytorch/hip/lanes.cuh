// What the lanes of a warp exchange, as CUDA C++ names it, by the instructions of a wave of 64 lanes: a warp is one
// half. Masks name the lanes that take part; the lanes that execute are those.
#pragma once

namespace kernel_pytorch::hip {

// Where lane i of the half reads from another lane's value; the distance is a constant after unrolling.
__device__ __forceinline__ int exchange(int value, int distance) {
  switch (distance) {
    case 1:
      return __builtin_amdgcn_ds_swizzle(value, 1 << 10 | 0x1f);
    case 2:
      return __builtin_amdgcn_ds_swizzle(value, 2 << 10 | 0x1f);
    case 4:
      return __builtin_amdgcn_ds_swizzle(value, 4 << 10 | 0x1f);
    case 8:
      return __builtin_amdgcn_ds_swizzle(value, 8 << 10 | 0x1f);
    case 16:
      return __builtin_amdgcn_ds_swizzle(value, 16 << 10 | 0x1f);
    default:
      return __builtin_amdgcn_ds_bpermute((static_cast<int>(__lane_id()) ^ distance) << 2, value);
  }
}
__device__ __forceinline__ int take(int value, int wave_lane) {
  return __builtin_amdgcn_ds_bpermute(wave_lane << 2, value);
}

// Moves a value of 1, 2, 4 or 8 bytes by `move`, which moves a word.
template <class T, class Move>
__device__ __forceinline__ T moved(T value, Move move) {
  if constexpr (sizeof(T) == 8) {
    const auto bits = __builtin_bit_cast(unsigned long long, value);
    const auto low = static_cast<unsigned>(move(static_cast<int>(bits)));
    const auto high = static_cast<unsigned>(move(static_cast<int>(bits >> 32)));
    return __builtin_bit_cast(T, static_cast<unsigned long long>(high) << 32 | low);
  } else if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, move(__builtin_bit_cast(int, value)));
  } else {
    return static_cast<T>(move(static_cast<int>(value)));
  }
}
// The place in the wave of a lane of this lane's group of `width`.
__device__ __forceinline__ int lane_in_group(int wanted, int width) {
  const int own = static_cast<int>(__lane_id());
  return (own & -width) + (wanted & (width - 1));
}

template <class T, class Combine>
__device__ __forceinline__ T reduced(T value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = combine(value, moved(value, [&](int word) { return exchange(word, distance); }));
  return value;
}

}  // namespace kernel_pytorch::hip

template <class T>
__device__ __forceinline__ T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  const int from = kernel_pytorch::hip::lane_in_group(lane, width);
  return kernel_pytorch::hip::moved(value, [&](int word) { return kernel_pytorch::hip::take(word, from); });
}
template <class T>
__device__ __forceinline__ T __shfl_xor_sync(unsigned, T value, int distance, int width = 32) {
  (void)width;
  return kernel_pytorch::hip::moved(value, [&](int word) { return kernel_pytorch::hip::exchange(word, distance); });
}
template <class T>
__device__ __forceinline__ T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  const int own = static_cast<int>(__lane_id()), wanted = own - static_cast<int>(delta);
  const int from = wanted < (own & -width) ? own : wanted;
  return kernel_pytorch::hip::moved(value, [&](int word) { return kernel_pytorch::hip::take(word, from); });
}
template <class T>
__device__ __forceinline__ T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  const int own = static_cast<int>(__lane_id()), wanted = own + static_cast<int>(delta);
  const int from = wanted >= (own & -width) + width ? own : wanted;
  return kernel_pytorch::hip::moved(value, [&](int word) { return kernel_pytorch::hip::take(word, from); });
}
__device__ __forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(__ballot64(predicate) >> (__lane_id() & 32u)) & mask;
}
__device__ __forceinline__ int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
__device__ __forceinline__ int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate == 0) == 0;
}
__device__ __forceinline__ unsigned __activemask() {
  return __ballot_sync(0xffffffffu, 1);
}
template <class T>
__device__ __forceinline__ unsigned __match_any_sync(unsigned mask, T value) {
  unsigned equal = 0;
#pragma unroll
  for (int lane = 0; lane < 32; ++lane) equal |= static_cast<unsigned>(__shfl_sync(mask, value, lane) == value) << lane;
  return equal & mask;
}
// Every lane of the warp takes part.
template <class T>
__device__ __forceinline__ T __reduce_add_sync(unsigned, T value) {
  return kernel_pytorch::hip::reduced(value, [](T a, T b) { return a + b; });
}
template <class T>
__device__ __forceinline__ T __reduce_max_sync(unsigned, T value) {
  return kernel_pytorch::hip::reduced(value, [](T a, T b) { return a < b ? b : a; });
}
template <class T>
__device__ __forceinline__ T __reduce_min_sync(unsigned, T value) {
  return kernel_pytorch::hip::reduced(value, [](T a, T b) { return b < a ? b : a; });
}
// A wave is in step with itself: what is left is the compiler, which keeps accesses of memory on their side.
__device__ __forceinline__ void __syncwarp(unsigned = 0xffffffffu) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
