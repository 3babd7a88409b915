// With EMULATED_GPU_PRIMITIVES=amd: the instructions of an AMD GPU that kernel_pytorch/hip names, so that its lanes and
// its forms of the PTX functions run here instead of those of this folder. A warp is a half of a wave of 64 lanes.
#pragma once

#define KP_NO_AMD_FORM(reason) __attribute__((error("no form for AMD GPUs: " reason)))
#define __builtin_nontemporal_load(address) (*(address))
#define __builtin_amdgcn_fence(...) static_cast<void>(0)

inline unsigned __lane_id() {
  return (emulated_thread.x + emulated_block_size.x * (emulated_thread.y + emulated_block_size.y * emulated_thread.z)) %
         64;
}
inline int __builtin_amdgcn_ds_bpermute(int address, int value) {
  if ((address / 4 ^ static_cast<int>(__lane_id())) & 32) emulated_fail("a lane reads from the other half of its wave");
  return static_cast<int>(emulated_shuffle(0xffffffffu, static_cast<unsigned>(value), address / 4 % 32, 32, 0));
}
// The pattern's mode of 32 lanes: bits 0-4 and, 5-9 or, 10-14 exclusive or.
inline int __builtin_amdgcn_ds_swizzle(int value, int pattern) {
  const int own = static_cast<int>(__lane_id()) % 32;
  const int from = ((own & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
  return static_cast<int>(emulated_shuffle(0xffffffffu, static_cast<unsigned>(value), from, 32, 0));
}
inline unsigned long long __ballot64(int predicate) {
  return static_cast<unsigned long long>(emulated_ballot(0xffffffffu, predicate)) << (__lane_id() & 32);
}
inline void __builtin_amdgcn_wave_barrier() {
  emulated_sync_warp(0xffffffffu);
}
namespace kernel_pytorch::hip {
template <class Word>
inline void keep_here(Word&) {}
inline void synchronise_wave() {
  emulated_named_barrier(1 + static_cast<int>(emulated_thread.x / 64), 64, 1);
}

// MFMA, an instruction of a whole wave: both warps hand in what their lanes hold, and meet before and after they read
// it. A wave has its place by its block's shared memory; the last lane to leave frees it.
#define KP_HAS_MFMA 1
struct EmulatedWave {
  const char* block;
  unsigned wave, left;
  unsigned long long a[64], b[64];
};
inline EmulatedWave& emulated_wave() {
  static EmulatedWave waves[256];
  const unsigned wave = emulated_thread.x / 64;
  EmulatedWave* unused = nullptr;
  for (EmulatedWave& one : waves) {
    if (one.block == emulated_shared_memory && one.wave == wave) return one;
    if (one.block == nullptr && unused == nullptr) unused = &one;
  }
  if (unused == nullptr) emulated_fail("MFMA in more than 256 waves at once");
  unused->block = emulated_shared_memory;
  unused->wave = wave;
  unused->left = 64;
  return *unused;
}
template <class Value>
inline void emulated_mfma(float (&sum)[4], unsigned long long a, unsigned long long b, Value value) {
  EmulatedWave& wave = emulated_wave();
  const unsigned lane = __lane_id();
  wave.a[lane] = a;
  wave.b[lane] = b;
  synchronise_wave();
  for (unsigned r = 0; r < 4; ++r) {
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned from = k / 4 * 16, part = k % 4 * 16;
      sum[r] += value(static_cast<unsigned short>(wave.a[from + lane / 16 * 4 + r] >> part)) *
                value(static_cast<unsigned short>(wave.b[from + lane % 16] >> part));
    }
  }
  if (--wave.left == 0) wave.block = nullptr;
  synchronise_wave();
}
inline void mfma_16x16x16_f32_bf16(float (&sum)[4], unsigned long long a, unsigned long long b) {
  emulated_mfma(sum, a, b, [](unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); });
}
inline void mfma_16x16x16_f32_f16(float (&sum)[4], unsigned long long a, unsigned long long b) {
  emulated_mfma(sum, a, b, [](unsigned short bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); });
}
}  // namespace kernel_pytorch::hip

// The forms that kernels use: a lane of its group of four for all four; four products of signed bytes.
inline int __builtin_amdgcn_mov_dpp(int value, int control, int, int, bool) {
  const int own = static_cast<int>(__lane_id()) % 32, from = (own & ~3) + (control >> (own % 4 * 2) & 3);
  return static_cast<int>(emulated_shuffle(0xffffffffu, static_cast<unsigned>(value), from, 32, 0));
}
inline int __builtin_amdgcn_sdot4(int a, int b, int sum, bool) {
  for (int i = 0; i < 4; ++i) sum += static_cast<signed char>(a >> (i * 8)) * static_cast<signed char>(b >> (i * 8));
  return sum;
}

inline float emulated_amd_flushed(float x) {
  return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}
extern "C" inline float __ocml_native_exp2_f32(float x) {
  return emulated_amd_flushed(exp2f(emulated_amd_flushed(x)));
}
extern "C" inline float __ocml_native_log2_f32(float x) {
  return emulated_amd_flushed(log2f(emulated_amd_flushed(x)));
}
extern "C" inline float __ocml_native_sqrt_f32(float x) {
  return sqrtf(x);
}
extern "C" inline float __ocml_native_sin_f32(float x) {
  return sinf(x);
}
extern "C" inline float __ocml_native_cos_f32(float x) {
  return cosf(x);
}
inline float __builtin_amdgcn_rcpf(float x) {
  return 1.0f / x;
}
inline float __builtin_amdgcn_rsqf(float x) {
  return rsqrtf(x);
}
