// The numbers' part of the prelude: the C library's functions, minima, bits, and arithmetic that rounds as it is
// written.
#pragma once

// --- the standard library's functions
extern "C" {
float fabsf(float), fmaxf(float, float), fminf(float, float), fmaf(float, float, float), floorf(float), ceilf(float),
    rintf(float), roundf(float), truncf(float), sqrtf(float), expf(float), exp2f(float), expm1f(float), logf(float),
    log2f(float), log1pf(float), sinf(float), cosf(float), tanhf(float), erff(float), powf(float, float),
    fmodf(float, float), ldexpf(float, int), copysignf(float, float);
double fabs(double), fmax(double, double), fmin(double, double), fma(double, double, double), floor(double),
    rint(double), sqrt(double), exp(double), log(double), pow(double, double), ldexp(double, int), erf(double),
    erfc(double), log1p(double), sin(double), cos(double), tanh(double);
int ilogbf(float);
void* memcpy(void*, const void*, unsigned long);
void* memset(void*, int, unsigned long);
}
inline float rsqrtf(float x) {
  return static_cast<float>(1.0 / sqrt(static_cast<double>(x)));
}
inline double rsqrt(double x) {
  return 1.0 / sqrt(x);
}
inline void sincospif(float x, float* sine, float* cosine) {
  const double angle = static_cast<double>(x) * 3.14159265358979323846;
  *sine = static_cast<float>(sin(angle));
  *cosine = static_cast<float>(cos(angle));
}
inline void sincosf(float x, float* sine, float* cosine) {
  *sine = sinf(x);
  *cosine = cosf(x);
}
inline int abs(int x) {
  return x < 0 ? -x : x;
}
inline float abs(float x) {
  return fabsf(x);
}
inline float floor(float x) {
  return floorf(x);
}
inline float exp(float x) {
  return expf(x);
}
inline float log(float x) {
  return logf(x);
}
inline float sqrt(float x) {
  return sqrtf(x);
}
inline float pow(float x, float y) {
  return powf(x, y);
}
inline float fma(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float rsqrt(float x) {
  return rsqrtf(x);
}
inline bool isnan(float x) {
  return x != x;
}
inline bool isinf(float x) {
  return __builtin_isinf(x);
}
inline bool isfinite(float x) {
  return __builtin_isfinite(x);
}

#define EMULATED_MIN_MAX(type)         \
  constexpr type min(type a, type b) { \
    return b < a ? b : a;              \
  }                                    \
  constexpr type max(type a, type b) { \
    return a < b ? b : a;              \
  }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
// CUDA's rules for operands of two types.
constexpr unsigned min(int a, unsigned b) {
  return min(static_cast<unsigned>(a), b);
}
constexpr unsigned min(unsigned a, int b) {
  return min(a, static_cast<unsigned>(b));
}
constexpr unsigned max(int a, unsigned b) {
  return max(static_cast<unsigned>(a), b);
}
constexpr unsigned max(unsigned a, int b) {
  return max(a, static_cast<unsigned>(b));
}
constexpr unsigned long long min(long long a, unsigned long long b) {
  return min(static_cast<unsigned long long>(a), b);
}
constexpr unsigned long long min(unsigned long long a, long long b) {
  return min(a, static_cast<unsigned long long>(b));
}
constexpr unsigned long long max(long long a, unsigned long long b) {
  return max(static_cast<unsigned long long>(a), b);
}
constexpr unsigned long long max(unsigned long long a, long long b) {
  return max(a, static_cast<unsigned long long>(b));
}
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}

// --- bits
inline unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
inline int __float_as_int(float x) {
  return __builtin_bit_cast(int, x);
}
inline float __uint_as_float(unsigned x) {
  return __builtin_bit_cast(float, x);
}
inline float __int_as_float(int x) {
  return __builtin_bit_cast(float, x);
}
inline long long __double_as_longlong(double x) {
  return __builtin_bit_cast(long long, x);
}
inline double __longlong_as_double(long long x) {
  return __builtin_bit_cast(double, x);
}
constexpr int __popc(unsigned x) {
  return __builtin_popcount(x);
}
constexpr int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
constexpr int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
constexpr int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
constexpr int __ffs(int x) {
  return __builtin_ffs(x);
}
constexpr int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
constexpr unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
constexpr unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
constexpr int __mulhi(int a, int b) {
  return static_cast<int>(static_cast<long long>(a) * b >> 32);
}
constexpr unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}

// --- arithmetic that must not be contracted: the results pass through a register that the compiler cannot look into
inline float emulated_rounded(float x) {
  asm("" : "+x"(x));
  return x;
}
inline double emulated_rounded(double x) {
  asm("" : "+x"(x));
  return x;
}
inline float __fmul_rn(float a, float b) {
  return emulated_rounded(a * b);
}
inline float __fadd_rn(float a, float b) {
  return emulated_rounded(emulated_rounded(a) + emulated_rounded(b));
}
inline float __fsub_rn(float a, float b) {
  return emulated_rounded(emulated_rounded(a) - emulated_rounded(b));
}
inline float __fdiv_rn(float a, float b) {
  return emulated_rounded(a / b);
}
inline float __fsqrt_rn(float x) {
  return sqrtf(x);
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fmaf_rn(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __saturatef(float x) {
  return x != x ? 0.0f : x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x;
}
inline double __dmul_rn(double a, double b) {
  return emulated_rounded(a * b);
}
inline double __dadd_rn(double a, double b) {
  return emulated_rounded(emulated_rounded(a) + emulated_rounded(b));
}
inline double __dsqrt_rn(double x) {
  return sqrt(x);
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
// Conversions saturate, NaN becomes 0 (of 64 bits: the lowest).
inline long long __double2ll_rn(double x) {
  const double rounded = rint(x);
  if (rounded != rounded || rounded < -0x1p63) return -0x7fffffffffffffffll - 1;
  return rounded >= 0x1p63 ? 0x7fffffffffffffffll : static_cast<long long>(rounded);
}
inline int __float2int_rn(float x) {
  const float rounded = rintf(x);
  if (rounded != rounded) return 0;
  return rounded >= 0x1p31f ? 0x7fffffff : rounded < -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(rounded);
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
