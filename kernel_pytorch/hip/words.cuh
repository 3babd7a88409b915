// The words of CUDA C++ that HIP lacks or means otherwise, for AMD GPUs with waves of 64 lanes. jit puts this file in
// front of a kernel's source, and takes hip/ptx where the source includes cuda/ptx.
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
__device__ __forceinline__ void keep_here(unsigned& value) {
  asm volatile("" : "+v"(value));
}

// Both halves of a wave are here: what one wrote to LDS, the other reads.
__device__ __forceinline__ void synchronise_wave() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

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
