// Vec: kLanes floats; VecD: kDoubleLanes doubles. They are GNU vector types, so + - * / and comparisons are the
// language's own, `a * b + c` contracts to one FMA where the level has it, and nothing here has a class with functions
// (see isa.h). A Vec must not be passed between translation units: its ABI depends on the level.
#pragma once

#include <cstdint>

#include "kernel_pytorch/cpu/isa.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t VecI __attribute__((vector_size(kVectorBytes)));  // also the result of comparing two Vec: 0 or -1
typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
typedef double VecD __attribute__((vector_size(kVectorBytes)));
typedef int64_t VecI64 __attribute__((vector_size(kVectorBytes)));  // also the result of comparing two VecD
typedef uint64_t VecU64 __attribute__((vector_size(kVectorBytes)));
// The storage of kLanes narrow elements.
typedef uint16_t VecU16 __attribute__((vector_size(kLanes * 2)));
typedef uint8_t VecU8 __attribute__((vector_size(kLanes)));

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
// What SVE's intrinsics take: the same registers.
typedef svfloat32_t SveFloat __attribute__((arm_sve_vector_bits(256)));
typedef svfloat64_t SveDouble __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t SveWords __attribute__((arm_sve_vector_bits(256)));
typedef svuint8_t SveBytes __attribute__((arm_sve_vector_bits(256)));
typedef uint8_t VecBytes __attribute__((vector_size(32)));
#endif

// Element type -> the vector its arithmetic runs in, and how many elements that is.
template <class T>
struct VecOfElement {
  using Type = Vec;
};
template <>
struct VecOfElement<double> {
  using Type = VecD;
};
template <class T>
using VecOf = typename VecOfElement<T>::Type;
template <class T>
using ScalarOf = decltype(VecOf<T>{}[0] + 0);  // float, or double for double
template <class T>
static constexpr int kLanesOf = sizeof(VecOf<T>) / sizeof(ScalarOf<T>);

KP_PRIMITIVE Vec broadcast(float value) {
  return value - Vec{};
}  // x - 0 is x for every x; folds to one broadcast
KP_PRIMITIVE VecD broadcast(double value) {
  return value - VecD{};
}
KP_PRIMITIVE VecU broadcast(uint32_t value) {
  return value + VecU{};
}
KP_PRIMITIVE VecI broadcast(int32_t value) {
  return value + VecI{};
}

KP_PRIMITIVE VecU bits_of(Vec v) {
  return reinterpret_cast<VecU>(v);
}
KP_PRIMITIVE VecU64 bits_of(VecD v) {
  return reinterpret_cast<VecU64>(v);
}
KP_PRIMITIVE Vec from_bits(VecU v) {
  return reinterpret_cast<Vec>(v);
}
KP_PRIMITIVE VecD from_bits(VecU64 v) {
  return reinterpret_cast<VecD>(v);
}

KP_PRIMITIVE Vec fma(Vec a, Vec b, Vec c) {
  return a * b + c;
}
KP_PRIMITIVE VecD fma(VecD a, VecD b, VecD c) {
  return a * b + c;
}

// For kernels whose bits must not depend on the level. A product that no FMA takes in:
KP_PRIMITIVE Vec uncontracted(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}
// a * b + c rounded once, also where the level has no such instruction.
KP_PRIMITIVE Vec fma_once(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return a * b + c;  // kernels are compiled with contraction
#else
  for (int i = 0; i < kLanes; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
#endif
}

#if defined(__aarch64__)
// What is loaded through `address` from here on is loaded after `value` is there: for tiles of sums that fill the
// registers, where g++ would load all factors first and spill sums for them. No instruction.
template <class V, class T>
KP_PRIMITIVE void load_after(V& value, const T*& address) {
  asm("" : "+w"(value), "+r"(address));
}
#endif

// Lane by lane `mask ? a : b`, the mask being a comparison's result.
KP_PRIMITIVE Vec select(VecI mask, Vec a, Vec b) {
  return mask ? a : b;
}
KP_PRIMITIVE VecU select(VecI mask, VecU a, VecU b) {
  return mask ? a : b;
}
KP_PRIMITIVE VecD select(VecI64 mask, VecD a, VecD b) {
  return mask ? a : b;
}

// As the x86 instructions: the second argument where either is NaN.
KP_PRIMITIVE Vec min(Vec a, Vec b) {
  return a < b ? a : b;
}
KP_PRIMITIVE VecD min(VecD a, VecD b) {
  return a < b ? a : b;
}
KP_PRIMITIVE VecU min(VecU a, VecU b) {
  return a < b ? a : b;
}
KP_PRIMITIVE Vec max(Vec a, Vec b) {
  return a > b ? a : b;
}
KP_PRIMITIVE VecD max(VecD a, VecD b) {
  return a > b ? a : b;
}
KP_PRIMITIVE VecU max(VecU a, VecU b) {
  return a > b ? a : b;
}

KP_PRIMITIVE Vec abs(Vec v) {
  return from_bits(bits_of(v) & 0x7fffffffu);
}
KP_PRIMITIVE VecD abs(VecD v) {
  return from_bits(bits_of(v) & 0x7fffffffffffffffull);
}
KP_PRIMITIVE VecI is_nan(Vec v) {
  return v != v;
}
KP_PRIMITIVE VecI64 is_nan(VecD v) {
  return v != v;
}

KP_PRIMITIVE Vec sqrt(Vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_maskz_sqrt_ps(0xffff, reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
#elif defined(__x86_64__)
  return reinterpret_cast<Vec>(_mm_sqrt_ps(reinterpret_cast<__m128>(v)));
#elif KP_LANES == 8
  const SveFloat root = svsqrt_f32_x(svptrue_b32(), SveFloat(v));
  return Vec(root);
#else
  return vsqrtq_f32(v);
#endif
}
KP_PRIMITIVE VecD sqrt(VecD v) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecD>(_mm512_maskz_sqrt_pd(0xff, reinterpret_cast<__m512d>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecD>(_mm256_sqrt_pd(reinterpret_cast<__m256d>(v)));
#elif defined(__x86_64__)
  return reinterpret_cast<VecD>(_mm_sqrt_pd(reinterpret_cast<__m128d>(v)));
#elif KP_LANES == 8
  const SveDouble root = svsqrt_f64_x(svptrue_b64(), SveDouble(v));
  return VecD(root);
#else
  return vsqrtq_f64(v);
#endif
}

typedef float Vec4 __attribute__((vector_size(16)));
typedef double VecD2 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef double VecD4 __attribute__((vector_size(32)));

// Folds upper half onto lower half until one lane is left: a fixed order, so the same lanes give the same bits.
#if KP_LANES == 16
#define KP_FOLD_TO_4(v, OP)                                                       \
  const Vec8 low8 = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);        \
  const Vec8 high8 = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15); \
  const Vec8 folded8 = OP(low8, high8);                                           \
  const Vec4 low4 = __builtin_shufflevector(folded8, folded8, 0, 1, 2, 3);        \
  const Vec4 high4 = __builtin_shufflevector(folded8, folded8, 4, 5, 6, 7);       \
  const Vec4 folded4 = OP(low4, high4)
#define KP_FOLD_TO_2(v, OP)                                            \
  const VecD4 low4 = __builtin_shufflevector(v, v, 0, 1, 2, 3);        \
  const VecD4 high4 = __builtin_shufflevector(v, v, 4, 5, 6, 7);       \
  const VecD4 folded4 = OP(low4, high4);                               \
  const VecD2 low2 = __builtin_shufflevector(folded4, folded4, 0, 1);  \
  const VecD2 high2 = __builtin_shufflevector(folded4, folded4, 2, 3); \
  const VecD2 folded2 = OP(low2, high2)
#elif KP_LANES == 8
#define KP_FOLD_TO_4(v, OP)                                     \
  const Vec4 low4 = __builtin_shufflevector(v, v, 0, 1, 2, 3);  \
  const Vec4 high4 = __builtin_shufflevector(v, v, 4, 5, 6, 7); \
  const Vec4 folded4 = OP(low4, high4)
#define KP_FOLD_TO_2(v, OP)                                \
  const VecD2 low2 = __builtin_shufflevector(v, v, 0, 1);  \
  const VecD2 high2 = __builtin_shufflevector(v, v, 2, 3); \
  const VecD2 folded2 = OP(low2, high2)
#else
#define KP_FOLD_TO_4(v, OP) const Vec4 folded4 = v
#define KP_FOLD_TO_2(v, OP) const VecD2 folded2 = v
#endif
#define KP_ADD_OF(a, b) ((a) + (b))
#define KP_MAX_OF(a, b) ((a) > (b) ? (a) : (b))

KP_PRIMITIVE float horizontal_sum(Vec v) {
  KP_FOLD_TO_4(v, KP_ADD_OF);
  return (folded4[0] + folded4[2]) + (folded4[1] + folded4[3]);
}
KP_PRIMITIVE float horizontal_max(Vec v) {
  KP_FOLD_TO_4(v, KP_MAX_OF);
  const float even = KP_MAX_OF(folded4[0], folded4[2]);
  const float odd = KP_MAX_OF(folded4[1], folded4[3]);
  return KP_MAX_OF(even, odd);
}
KP_PRIMITIVE double horizontal_sum(VecD v) {
  KP_FOLD_TO_2(v, KP_ADD_OF);
  return folded2[0] + folded2[1];
}
KP_PRIMITIVE double horizontal_max(VecD v) {
  KP_FOLD_TO_2(v, KP_MAX_OF);
  return KP_MAX_OF(folded2[0], folded2[1]);
}

#undef KP_FOLD_TO_4
#undef KP_FOLD_TO_2
#undef KP_ADD_OF
#undef KP_MAX_OF

// Fetches the line of this address towards L1 (near) or L2 (far); any address is allowed.
KP_PRIMITIVE void prefetch_near(const void* address) {
  __builtin_prefetch(address, 0, 3);
}
KP_PRIMITIVE void prefetch_far(const void* address) {
  __builtin_prefetch(address, 0, 2);
}
KP_PRIMITIVE void prefetch_for_write(const void* address) {
  __builtin_prefetch(address, 1, 3);
}

// Orders the stream() stores (load_store.h) of this thread before what it publishes next.
KP_PRIMITIVE void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
