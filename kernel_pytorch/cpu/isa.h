// The instruction level this file is compiled for, as a namespace and a lane count. A *_isa.cpp is built once per level
// (cmake/isa_variants.cmake), and what it exports stands in KP_ISA_NAMESPACE:
//   namespace kernel_pytorch::rms_norm::KP_ISA_NAMESPACE { void forward(...) { ... } }   // isa_v2, isa_v3, isa_v4, ...
// Words are KP_PRIMITIVE: internal linkage, always inlined. An inline function with external linkage would be merged by
// the linker across levels, and a machine without AVX-512 could be handed the AVX-512 copy; tests/isa_symbols looks for
// it.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__ARM_FEATURE_SVE)
#include <arm_sve.h>
#endif
#endif

#ifndef KP_ISA
#define KP_ISA baseline  // a plain compile, as of a header alone
#endif
#define KP_ISA_JOIN_(a, b) a##b
#define KP_ISA_JOIN(a, b) KP_ISA_JOIN_(a, b)
#define KP_ISA_NAMESPACE KP_ISA_JOIN(isa_, KP_ISA)

#define KP_PRIMITIVE [[gnu::always_inline, maybe_unused]] static inline

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// Lanes of float. The count must be the machine's own: wider GNU vectors are split by the compiler, ten times slower.
// With a fixed length of SVE's vectors g++ makes SVE instructions of GNU vectors of that length.
#if defined(__AVX512F__)
#define KP_LANES 16
#elif defined(__AVX2__) || (defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256)
#define KP_LANES 8
#else
#define KP_LANES 4
#endif
constexpr int kLanes = KP_LANES;
constexpr int kVectorBytes = kLanes * 4;
constexpr int kDoubleLanes = kLanes / 2;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
