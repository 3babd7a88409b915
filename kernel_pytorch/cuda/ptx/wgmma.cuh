// wgmma: four warps multiply a 64 x 16 by a 16 x N tile (FP8: 32 deep, tf32: 8), asynchronously, into registers of
// theirs. sm_90a.
//
// B, and A in the form ss, are named by descriptors of shared memory (tile/matrix_descriptor.cuh); A in the form rs is
// four registers of pairs. Accumulators: element 4 j + r of a thread is row 16 * warp + lane / 4 + 8 * (r / 2),
// column 8 j + 2 * (lane % 4) + r % 2. Between the fence and the wait that ends a product nothing may touch its
// accumulators or its registers of A.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

enum class WgmmaType { kBf16, kF16, kE4M3, kE5M2, kTf32 };  // tf32: floats, whose lower 13 bits are not read

// Before the first product that reads registers written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the latest groups are still under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler may not move a use of these registers across this point (no instruction).
template <int kCount>
__device__ __forceinline__ void tie_registers(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void tie_registers(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// The high word of every descriptor here: groups of eight rows are 1024 bytes apart, 128-byte swizzle.
inline constexpr uint32_t kDescriptorHighWord = 0x40000040u;
// Of tiles whose rows are 64 bytes: groups of eight are 512 bytes apart, 64-byte swizzle.
inline constexpr uint32_t kShortDescriptorHighWord = 0x80000020u;

// ss<transpose_a, transpose_b, step_a, step_b>(d, a, b, accumulate) and rs<transpose_b, step_b>(d, a, b, accumulate):
// d = a b (+ d). Operands in shared memory are low words of descriptors, the steps are added to them: here, between
// the instructions, where they become sums of uniform registers; added outside, each would cross over by itself.
// Transposed operands lie with their rows (A) or columns (B) contiguous.
template <int kColumns, WgmmaType kType, WgmmaType kTypeB = kType>
struct Wgmma;

// A with two of each four along k, in rows of 64 bytes of shared memory: 64 x 32 (16 are kept) by 32 x N.
// ss<step_a, step_b, selector>(d, a, b, metadata, accumulate). Of each four lanes, lanes 2 selector and the next hold
// the metadata of the first and of the last 16 columns: of row lane / 4 in the lower 16 bits, of that 8 further in the
// upper ones.
template <int kColumns, WgmmaType kType>
struct SparseWgmma;

// An instruction's text needs every register by number and every register as an operand, so each N is a row of the
// table below: the columns, the accumulators' text and operands, and the numbers of what follows them.
#define KP_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KP_TEXT_16 KP_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KP_TEXT_32 KP_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KP_TEXT_40 KP_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define KP_TEXT_48 KP_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define KP_TEXT_56 KP_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define KP_TEXT_64 KP_TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define KP_TEXT_96                                                                                              \
  KP_TEXT_64                                                                                                    \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KP_TEXT_128                                                                                            \
  KP_TEXT_96                                                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KP_OPERANDS_8(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KP_OPERANDS_32(i) KP_OPERANDS_8(i), KP_OPERANDS_8(i + 8), KP_OPERANDS_8(i + 16), KP_OPERANDS_8(i + 24)
#define KP_LIST_8 KP_OPERANDS_8(0)
#define KP_LIST_16 KP_LIST_8, KP_OPERANDS_8(8)
#define KP_LIST_32 KP_OPERANDS_32(0)
#define KP_LIST_40 KP_LIST_32, KP_OPERANDS_8(32)
#define KP_LIST_48 KP_LIST_40, KP_OPERANDS_8(40)
#define KP_LIST_56 KP_LIST_48, KP_OPERANDS_8(48)
#define KP_LIST_64 KP_LIST_56, KP_OPERANDS_8(56)
#define KP_LIST_96 KP_LIST_64, KP_OPERANDS_32(64)
#define KP_LIST_128 KP_LIST_96, KP_OPERANDS_32(96)

#define KP_WGMMA_OF(N, COUNT, TYPE, NAME, I0, I1, I2, I3, I4, I5, I6, I7, I8)                                       \
  template <>                                                                                                       \
  struct Wgmma<N, WgmmaType::TYPE, WgmmaType::TYPE> {                                                               \
    static constexpr int kCount = COUNT;                                                                            \
    template <int kTransposeA, int kTransposeB, int kStepA, int kStepB>                                             \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], uint32_t a, uint32_t b, int accumulate) {          \
      asm volatile("{\n.reg .pred p;\n.reg .b32 la, lb;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" I2                    \
                   ", 0;\n"                                                                                         \
                   "add.u32 la, %" I0 ", %" I5 ";\nadd.u32 lb, %" I1 ", %" I6                                       \
                   ";\n"                                                                                            \
                   "mov.b64 da, {la, %" I7 "};\nmov.b64 db, {lb, %" I7                                              \
                   "};\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" KP_TEXT_##COUNT             \
                   "}, da, db, p, 1, 1, %" I3 ", %" I4 ";\n}\n"                                                     \
                   : KP_LIST_##COUNT                                                                                \
                   : "r"(a), "r"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB), "n"(kStepA), "n"(kStepB), \
                     "n"(kDescriptorHighWord));                                                                     \
    }                                                                                                               \
    template <int kTransposeB, int kStepB>                                                                          \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t* a, uint32_t b, int accumulate) {   \
      asm volatile("{\n.reg .pred p;\n.reg .b32 lb;\n.reg .b64 db;\nsetp.ne.b32 p, %" I5                            \
                   ", 0;\n"                                                                                         \
                   "add.u32 lb, %" I4 ", %" I7 ";\nmov.b64 db, {lb, %" I8                                           \
                   "};\n"                                                                                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" KP_TEXT_##COUNT             \
                   "}, {%" I0 ", %" I1 ", %" I2 ", %" I3 "}, db, p, 1, 1, %" I6 ";\n}\n"                            \
                   : KP_LIST_##COUNT                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kTransposeB),         \
                     "n"(kStepB), "n"(kDescriptorHighWord));                                                        \
    }                                                                                                               \
  };
// Operands of FP8 and of tf32 are never transposed; those of FP8 may differ in type.
#define KP_WGMMA_ALONG_OF(N, COUNT, DEPTH, TYPEA, NAMEA, TYPEB, NAMEB, I0, I1, I2, I3, I4, I5, I6, I7, ...)       \
  template <>                                                                                                     \
  struct Wgmma<N, WgmmaType::TYPEA, WgmmaType::TYPEB> {                                                           \
    static constexpr int kCount = COUNT;                                                                          \
    template <int kTransposeA, int kTransposeB, int kStepA, int kStepB>                                           \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], uint32_t a, uint32_t b, int accumulate) {        \
      static_assert(kTransposeA == 0 && kTransposeB == 0);                                                        \
      asm volatile("{\n.reg .pred p;\n.reg .b32 la, lb;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" I2                  \
                   ", 0;\n"                                                                                       \
                   "add.u32 la, %" I0 ", %" I3 ";\nadd.u32 lb, %" I1 ", %" I4                                     \
                   ";\n"                                                                                          \
                   "mov.b64 da, {la, %" I5 "};\nmov.b64 db, {lb, %" I5                                            \
                   "};\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" DEPTH ".f32." NAMEA "." NAMEB " {" KP_TEXT_##COUNT  \
                   "}, da, db, p, 1, 1;\n}\n"                                                                     \
                   : KP_LIST_##COUNT                                                                              \
                   : "r"(a), "r"(b), "r"(accumulate), "n"(kStepA), "n"(kStepB), "n"(kDescriptorHighWord));        \
    }                                                                                                             \
    template <int kTransposeB, int kStepB>                                                                        \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t* a, uint32_t b, int accumulate) { \
      static_assert(kTransposeB == 0);                                                                            \
      asm volatile("{\n.reg .pred p;\n.reg .b32 lb;\n.reg .b64 db;\nsetp.ne.b32 p, %" I5                          \
                   ", 0;\n"                                                                                       \
                   "add.u32 lb, %" I4 ", %" I6 ";\nmov.b64 db, {lb, %" I7                                         \
                   "};\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k" DEPTH ".f32." NAMEA "." NAMEB " {" KP_TEXT_##COUNT  \
                   "}, {%" I0 ", %" I1 ", %" I2 ", %" I3 "}, db, p, 1, 1;\n}\n"                                   \
                   : KP_LIST_##COUNT                                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(kStepB),            \
                     "n"(kDescriptorHighWord));                                                                   \
    }                                                                                                             \
  };
#define KP_WGMMA_SPARSE_OF(N, COUNT, TYPE, NAME, I0, I1, I2, I3, I4, I5, I6, I7, I8)                           \
  template <>                                                                                                  \
  struct SparseWgmma<N, WgmmaType::TYPE> {                                                                     \
    static constexpr int kCount = COUNT;                                                                       \
    template <int kStepA, int kStepB, int kSelector>                                                           \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], uint32_t a, uint32_t b, uint32_t metadata,    \
                                              int accumulate) {                                                \
      asm volatile("{\n.reg .pred p;\n.reg .b32 la, lb;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" I3               \
                   ", 0;\n"                                                                                    \
                   "add.u32 la, %" I0 ", %" I4 ";\nadd.u32 lb, %" I1 ", %" I5                                  \
                   ";\n"                                                                                       \
                   "mov.b64 da, {la, %" I7 "};\nmov.b64 db, {lb, %" I8                                         \
                   "};\n"                                                                                      \
                   "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." NAME "." NAME " {" KP_TEXT_##COUNT     \
                   "}, da, db, %" I2 ", %" I6 ", p, 1, 1, 0, 0;\n}\n"                                          \
                   : KP_LIST_##COUNT                                                                           \
                   : "r"(a), "r"(b), "r"(metadata), "r"(accumulate), "n"(kStepA), "n"(kStepB), "n"(kSelector), \
                     "n"(kShortDescriptorHighWord), "n"(kDescriptorHighWord));                                 \
    }                                                                                                          \
  };
#define KP_WGMMA_SPARSE(N, COUNT, ...)                     \
  KP_WGMMA_SPARSE_OF(N, COUNT, kBf16, "bf16", __VA_ARGS__) \
  KP_WGMMA_SPARSE_OF(N, COUNT, kF16, "f16", __VA_ARGS__)
#define KP_WGMMA_FP8(N, COUNT, ...)                                            \
  KP_WGMMA_ALONG_OF(N, COUNT, "32", kE4M3, "e4m3", kE4M3, "e4m3", __VA_ARGS__) \
  KP_WGMMA_ALONG_OF(N, COUNT, "32", kE4M3, "e4m3", kE5M2, "e5m2", __VA_ARGS__) \
  KP_WGMMA_ALONG_OF(N, COUNT, "32", kE5M2, "e5m2", kE4M3, "e4m3", __VA_ARGS__) \
  KP_WGMMA_ALONG_OF(N, COUNT, "32", kE5M2, "e5m2", kE5M2, "e5m2", __VA_ARGS__)
#define KP_WGMMA_TF32(N, COUNT, ...) KP_WGMMA_ALONG_OF(N, COUNT, "8", kTf32, "tf32", kTf32, "tf32", __VA_ARGS__)
#define KP_WGMMA(N, COUNT, ...)                     \
  KP_WGMMA_OF(N, COUNT, kBf16, "bf16", __VA_ARGS__) \
  KP_WGMMA_OF(N, COUNT, kF16, "f16", __VA_ARGS__)

KP_WGMMA(16, 8, "8", "9", "10", "11", "12", "13", "14", "15", "16")
KP_WGMMA(32, 16, "16", "17", "18", "19", "20", "21", "22", "23", "24")
KP_WGMMA(64, 32, "32", "33", "34", "35", "36", "37", "38", "39", "40")
KP_WGMMA(80, 40, "40", "41", "42", "43", "44", "45", "46", "47", "48")
KP_WGMMA(96, 48, "48", "49", "50", "51", "52", "53", "54", "55", "56")
KP_WGMMA(112, 56, "56", "57", "58", "59", "60", "61", "62", "63", "64")
KP_WGMMA(128, 64, "64", "65", "66", "67", "68", "69", "70", "71", "72")
KP_WGMMA(192, 96, "96", "97", "98", "99", "100", "101", "102", "103", "104")
KP_WGMMA(256, 128, "128", "129", "130", "131", "132", "133", "134", "135", "136")
KP_WGMMA_SPARSE(64, 32, "32", "33", "34", "35", "36", "37", "38", "39", "40")
KP_WGMMA_SPARSE(128, 64, "64", "65", "66", "67", "68", "69", "70", "71", "72")
KP_WGMMA_SPARSE(256, 128, "128", "129", "130", "131", "132", "133", "134", "135", "136")
KP_WGMMA_FP8(64, 32, "32", "33", "34", "35", "36", "37", "38", "39", "40")
KP_WGMMA_FP8(128, 64, "64", "65", "66", "67", "68", "69", "70", "71", "72")
KP_WGMMA_FP8(192, 96, "96", "97", "98", "99", "100", "101", "102", "103", "104")
KP_WGMMA_FP8(256, 128, "128", "129", "130", "131", "132", "133", "134", "135", "136")
KP_WGMMA_TF32(128, 64, "64", "65", "66", "67", "68", "69", "70", "71", "72")
KP_WGMMA_TF32(192, 96, "96", "97", "98", "99", "100", "101", "102", "103", "104")
KP_WGMMA_TF32(256, 128, "128", "129", "130", "131", "132", "133", "134", "135", "136")

#undef KP_WGMMA
#undef KP_WGMMA_OF
#undef KP_WGMMA_SPARSE
#undef KP_WGMMA_SPARSE_OF
#undef KP_WGMMA_FP8
#undef KP_WGMMA_TF32
#undef KP_WGMMA_ALONG_OF
#undef KP_LIST_16
#undef KP_LIST_32
#undef KP_LIST_40
#undef KP_LIST_48
#undef KP_LIST_56
#undef KP_LIST_64
#undef KP_LIST_96
#undef KP_LIST_128
#undef KP_OPERANDS_8
#undef KP_OPERANDS_32
#undef KP_TEXT_16
#undef KP_TEXT_32
#undef KP_TEXT_40
#undef KP_TEXT_48
#undef KP_TEXT_56
#undef KP_TEXT_64
#undef KP_TEXT_96
#undef KP_TEXT_128

}  // namespace kernel_pytorch::ptx
