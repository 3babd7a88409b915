// The words of CUDA C++ that NVRTC knows without a header, for g++. Stands in front of every device source; includes no
// standard header, as NVRTC has none.
#pragma once

#include "interface.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_size
#define gridDim emulated_grid
#define warpSize 32

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline EmulatedIndex __clusterDim() {
  return emulated_cluster_size;
}

#define EMULATED_VECTORS(type, name)                              \
  struct alignas(2 * sizeof(type)) name##2 {                      \
    type x, y;                                                    \
  };                                                              \
  struct name##3 {                                                \
    type x, y, z;                                                 \
  };                                                              \
  struct alignas(16) name##4 {                                    \
    type x, y, z, w;                                              \
  };                                                              \
  inline name##2 make_##name##2(type x, type y) {                 \
    return {x, y};                                                \
  }                                                               \
  inline name##4 make_##name##4(type x, type y, type z, type w) { \
    return {x, y, z, w};                                          \
  }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
struct alignas(16) double2 {
  double x, y;
};

// What `for (x : {a, b})` is made of; g++ knows this layout.
namespace std {
template <class Element>
class initializer_list {
 public:
  constexpr initializer_list() = default;
  constexpr const Element* begin() const { return array_; }
  constexpr const Element* end() const { return array_ + count_; }
  constexpr unsigned long size() const { return count_; }

 private:
  constexpr initializer_list(const Element* array, unsigned long count) : array_(array), count_(count) {}
  const Element* array_ = nullptr;
  unsigned long count_ = 0;
};
}  // namespace std

#include "arithmetic.h"

// --- memory
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, T value) {
  *address = value;
}
inline void __threadfence() {
  emulated_point();
}
inline void __threadfence_block() {
  emulated_point();
}
inline void __threadfence_system() {
  emulated_point();
}
inline void __nanosleep(unsigned) {
  emulated_spin();
}
inline long long clock64() {
  return emulated_clock();
}
inline int clock() {
  return static_cast<int>(emulated_clock());
}
[[noreturn]] inline void __trap() {
  emulated_fail("__trap()");
}
inline unsigned long __cvta_generic_to_shared(const void* pointer) {
  return emulated_shared_address(pointer);
}
inline void* __cvta_shared_to_generic(unsigned long address) {
  return emulated_shared_pointer(static_cast<unsigned>(address), 1);
}

// One fiber runs at a time, so an atomic is a read and a write; others may run after it.
template <class T, class U>
inline T emulated_exchange(T* address, U value) {
  const T old = *address;
  *address = static_cast<T>(value);
  emulated_point();
  return old;
}
#define EMULATED_ATOMICS(type)                                                  \
  inline type atomicAdd(type* address, type value) {                            \
    return emulated_exchange(address, *address + value);                        \
  }                                                                             \
  inline type atomicSub(type* address, type value) {                            \
    return emulated_exchange(address, *address - value);                        \
  }                                                                             \
  inline type atomicMax(type* address, type value) {                            \
    return emulated_exchange(address, max(*address, value));                    \
  }                                                                             \
  inline type atomicMin(type* address, type value) {                            \
    return emulated_exchange(address, min(*address, value));                    \
  }                                                                             \
  inline type atomicExch(type* address, type value) {                           \
    return emulated_exchange(address, value);                                   \
  }                                                                             \
  inline type atomicCAS(type* address, type expected, type value) {             \
    return emulated_exchange(address, *address == expected ? value : *address); \
  }                                                                             \
  inline type atomicAnd(type* address, type value) {                            \
    return emulated_exchange(address, *address & value);                        \
  }                                                                             \
  inline type atomicOr(type* address, type value) {                             \
    return emulated_exchange(address, *address | value);                        \
  }                                                                             \
  inline type atomicXor(type* address, type value) {                            \
    return emulated_exchange(address, *address ^ value);                        \
  }
EMULATED_ATOMICS(int)
EMULATED_ATOMICS(unsigned)
EMULATED_ATOMICS(long long)
EMULATED_ATOMICS(unsigned long long)
inline float atomicAdd(float* address, float value) {
  return emulated_exchange(address, *address + value);
}
inline double atomicAdd(double* address, double value) {
  return emulated_exchange(address, *address + value);
}
inline float atomicExch(float* address, float value) {
  return emulated_exchange(address, value);
}

// --- warps and blocks
#ifdef EMULATED_AMD
#include "amd.h"
#include "kernel_pytorch/hip/lanes.cuh"
#else
template <class T>
inline T emulated_shuffle_of(unsigned mask, T value, int argument, int width, int mode) {
  if constexpr (sizeof(T) < 4) {
    return static_cast<T>(emulated_shuffle(mask, static_cast<unsigned long long>(value), argument, width, mode));
  } else if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(
        T, static_cast<unsigned>(emulated_shuffle(mask, __builtin_bit_cast(unsigned, value), argument, width, mode)));
  } else {
    return __builtin_bit_cast(
        T, emulated_shuffle(mask, __builtin_bit_cast(unsigned long long, value), argument, width, mode));
  }
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return emulated_shuffle_of(mask, value, lane, width, 0);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulated_shuffle_of(mask, value, static_cast<int>(delta), width, 1);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return emulated_shuffle_of(mask, value, static_cast<int>(delta), width, 2);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return emulated_shuffle_of(mask, value, bits, width, 3);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return emulated_ballot(mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate) {
  return emulated_ballot(mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return emulated_ballot(mask, predicate == 0) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  return emulated_match_any(mask, static_cast<unsigned long long>(value));
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 0);
}
inline int __reduce_add_sync(unsigned mask, int x) {
  return static_cast<int>(emulated_reduce(mask, static_cast<unsigned>(x), 0));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 1);
}
inline int __reduce_max_sync(unsigned mask, int x) {
  return static_cast<int>(emulated_reduce(mask, static_cast<unsigned>(x), 3));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 2);
}
inline int __reduce_min_sync(unsigned mask, int x) {
  return static_cast<int>(emulated_reduce(mask, static_cast<unsigned>(x), 4));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 5);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 6);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned x) {
  return emulated_reduce(mask, x, 7);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulated_sync_warp(mask);
}
inline unsigned __activemask() {
  return emulated_active_mask();
}
#endif
inline void __syncthreads() {
  emulated_sync_threads(0, 0);
}
inline int __syncthreads_or(int predicate) {
  return emulated_sync_threads(predicate, 1);
}
inline int __syncthreads_and(int predicate) {
  return emulated_sync_threads(predicate, 2);
}
inline int __syncthreads_count(int predicate) {
  return emulated_sync_threads(predicate, 3);
}

#include "kernel_table.h"
