// Sixteen bytes of packed elements in registers: the unit of every fast access to memory. Addresses are 16-byte
// aligned; who cannot promise that reads single elements instead (to_float, from_float).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"
#include "kernel_pytorch/cuda/ptx/memory.cuh"
#include "kernel_pytorch/cuda/tile/element.cuh"

namespace kernel_pytorch::tile {

inline constexpr int kVectorBytes = 16;

template <class T>
struct Vector {
  static constexpr int kCount = kVectorBytes / sizeof(T);
  ptx::Word4 words;

  static __device__ __forceinline__ Vector zero() { return {{0, 0, 0, 0}}; }

  __device__ __forceinline__ void unpack(float (&values)[kCount]) const {
    Word<T>::unpack(words.x, values);
    Word<T>::unpack(words.y, values + kPerWord<T>);
    Word<T>::unpack(words.z, values + 2 * kPerWord<T>);
    Word<T>::unpack(words.w, values + 3 * kPerWord<T>);
  }
  static __device__ __forceinline__ Vector pack(const float (&values)[kCount]) {
    return {{Word<T>::pack(values), Word<T>::pack(values + kPerWord<T>), Word<T>::pack(values + 2 * kPerWord<T>),
             Word<T>::pack(values + 3 * kPerWord<T>)}};
  }
};

// How long L2 should keep what passes through. Values of a kernel argument, so that one compiled kernel serves all.
enum class Keep : uint8_t { kNormal, kEvictFirst };

__device__ __forceinline__ uint64_t make_policy(Keep keep) {
  return keep == Keep::kEvictFirst ? ptx::createpolicy_fractional_l2_evict_first()
                                   : ptx::createpolicy_fractional_l2_evict_normal();
}

// Rows that are read once: past L1, where wanted with an L2 policy.
template <class T>
__device__ __forceinline__ Vector<T> load_once(const void* address, uint64_t policy) {
  return {ptx::ld_global_nc_l1_no_allocate_l2_cache_hint_v4(address, policy)};
}
template <class T>
__device__ __forceinline__ Vector<T> load_once(const void* address) {
  return {ptx::ld_global_nc_l1_no_allocate_v4(address)};
}
template <class T>
__device__ __forceinline__ Vector<T> load_once_if(bool wanted, const void* address) {
  return {ptx::ld_global_nc_l1_no_allocate_v4_if(wanted, address)};
}
// Small data that every block reads: through L1.
template <class T>
__device__ __forceinline__ Vector<T> load_shared_by_all(const void* address) {
  return {ptx::ld_global_nc_v4(address)};
}
template <class T>
__device__ __forceinline__ Vector<T> load_shared_by_all_if(bool wanted, const void* address) {
  return {ptx::ld_global_v4_if(wanted, address)};
}
template <class T>
__device__ __forceinline__ Vector<T> load_from_shared(uint32_t address) {
  return {ptx::ld_shared_v4(address)};
}
template <class T>
__device__ __forceinline__ void store(void* address, Vector<T> vector, uint64_t policy) {
  ptx::st_global_l2_cache_hint_v4(address, vector.words, policy);
}
template <class T>
__device__ __forceinline__ void store(void* address, Vector<T> vector) {
  ptx::st_global_v4(address, vector.words);
}
template <class T>
__device__ __forceinline__ void store_if(bool wanted, void* address, Vector<T> vector) {
  ptx::st_global_v4_if(wanted, address, vector.words);
}

}  // namespace kernel_pytorch::tile
