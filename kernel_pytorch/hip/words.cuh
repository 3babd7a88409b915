// The words of CUDA C++ that HIP lacks or means otherwise, for AMD GPUs with waves of 64 lanes. jit puts this file in
// front of a kernel's source, and takes hip/ptx where the source includes cuda/ptx, and what hip/tile has of cuda/tile.
//
// A warp is 32 lanes: one half of a wave. Halves share a program counter, so that one half may not wait for the other;
// words whose PTX form does so (mbarriers, most numbered barriers) are missing here, and a kernel that calls one does
// not compile. What a warp exchanges stays in its half, where all lanes are active whenever they are on an NVIDIA GPU.
#pragma once

#define __CUDACC_RTC__ 1
#define __grid_constant__
// CUDA's second number counts blocks of a multiprocessor, HIP's waves of a SIMD: registers are the compiler's choice.
#undef __launch_bounds__
#define KP_LAUNCH_BOUNDS(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define __launch_bounds__(...) KP_LAUNCH_BOUNDS(__VA_ARGS__, 0)
// A call would put what the caller holds into memory.
#undef __noinline__
#define __noinline__

// A function that an AMD GPU has no form of: it is declared so that a source that names it can be read, and a kernel
// that calls it fails to compile with these words.
#define KP_NO_AMD_FORM(reason) __device__ __attribute__((error("no form for AMD GPUs: " reason)))

namespace std {
// What `for (x : {a, b})` is made of; the compiler knows this layout.
template <class Element>
class initializer_list {
 public:
  constexpr initializer_list() = default;
  constexpr const Element* begin() const { return first_; }
  constexpr const Element* end() const { return first_ + count_; }
  constexpr unsigned long size() const { return count_; }

 private:
  const Element* first_ = nullptr;
  unsigned long count_ = 0;
};
}  // namespace std

namespace kernel_pytorch::hip {

using SharedByte = __attribute__((address_space(3))) char;

// Arithmetic that rounds as it is written: no product and sum become one instruction.
__device__ __forceinline__ float multiply(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
__device__ __forceinline__ double multiply(double a, double b) {
#pragma clang fp contract(off)
  return a * b;
}
__device__ __forceinline__ float add(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
__device__ __forceinline__ float subtract(float a, float b) {
#pragma clang fp contract(off)
  return a - b;
}

// The compiler computes this value here, each time anew.
template <class Word>
__device__ __forceinline__ void keep_here(Word& value) {
  static_assert(sizeof(Word) == 4);
  asm volatile("" : "+v"(value));
}

// Both halves of a wave are here: what one wrote to LDS, the other reads.
__device__ __forceinline__ void synchronise_wave() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Sixteen rows by 16 of k, times 16 columns: lane l has four of k, from l / 16 * 4 on, of row (column) l % 16 of both,
// and rows l / 16 * 4 to + 3 of column l % 16 of the sums.
#if defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
#define KP_HAS_MFMA 1
using Floats4 = __attribute__((ext_vector_type(4))) float;
__device__ __forceinline__ void mfma_16x16x16_f32_bf16(float (&sum)[4], unsigned long long a, unsigned long long b) {
  using Shorts4 = __attribute__((ext_vector_type(4))) short;
  Floats4 sums = {sum[0], sum[1], sum[2], sum[3]};
  sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts4, a), __builtin_bit_cast(Shorts4, b), sums,
                                                   0, 0, 0);
  sum[0] = sums[0], sum[1] = sums[1], sum[2] = sums[2], sum[3] = sums[3];
}
__device__ __forceinline__ void mfma_16x16x16_f32_f16(float (&sum)[4], unsigned long long a, unsigned long long b) {
  using Halves4 = __attribute__((ext_vector_type(4))) _Float16;
  Floats4 sums = {sum[0], sum[1], sum[2], sum[3]};
  sums = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves4, a), __builtin_bit_cast(Halves4, b), sums, 0,
                                               0, 0);
  sum[0] = sums[0], sum[1] = sums[1], sum[2] = sums[2], sum[3] = sums[3];
}
#endif

}  // namespace kernel_pytorch::hip

#define __fmul_rn kernel_pytorch::hip::multiply
#define __dmul_rn kernel_pytorch::hip::multiply
#define __fadd_rn kernel_pytorch::hip::add
#define __fsub_rn kernel_pytorch::hip::subtract

// --- memory
// Shared memory stands in a window of 4 GB, so that the lower half of a generic pointer is its place.
__device__ __forceinline__ size_t __cvta_generic_to_shared(const void* pointer) {
  return reinterpret_cast<size_t>((const kernel_pytorch::hip::SharedByte*)pointer);
}
__device__ __forceinline__ void* __cvta_shared_to_generic(size_t address) {
  return (void*)(kernel_pytorch::hip::SharedByte*)static_cast<unsigned>(address);
}
template <class T>
__device__ __forceinline__ T __ldcg(const T* address) {
  return *address;
}
template <class T>
__device__ __forceinline__ T __ldcs(const T* address) {
  return __builtin_nontemporal_load(address);
}

// The larger of each 16-bit half.
__device__ __forceinline__ unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low = max(a & 0xffffu, b & 0xffffu), high = max(a >> 16, b >> 16);
  return high << 16 | low;
}

#include "kernel_pytorch/hip/lanes.cuh"
