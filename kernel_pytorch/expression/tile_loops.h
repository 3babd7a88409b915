// The loops of expression/tile_isa.cpp, one a node: over blocks of a constant length, so that no tail has to be
// handled. What lies behind the last column is computed too and never looked at. For files that are compiled once per
// CPU level.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/expression/scalar.h"
#include "kernel_pytorch/expression/tile.h"

namespace kernel_pytorch::expression::KP_ISA_NAMESPACE {

constexpr int kStep = 64;

template <class To, class From, class Function>
KP_PRIMITIVE void map(To* __restrict to, const From* __restrict a, int columns, const Function& function) {
  for (int begin = 0; begin < columns; begin += kStep, to += kStep, a += kStep) {
    for (int i = 0; i < kStep; ++i) to[i] = function(a[i]);
  }
}
template <class To, class From, class Function>
KP_PRIMITIVE void map(To* __restrict to, const From* __restrict a, const From* __restrict b, int columns,
                      const Function& function) {
  for (int begin = 0; begin < columns; begin += kStep, to += kStep, a += kStep, b += kStep) {
    for (int i = 0; i < kStep; ++i) to[i] = function(a[i], b[i]);
  }
}
template <class T>
KP_PRIMITIVE void choose(T* __restrict to, const uint8_t* __restrict condition, const T* __restrict yes,
                         const T* __restrict no, int columns) {
  for (int begin = 0; begin < columns; begin += kStep, to += kStep, condition += kStep, yes += kStep, no += kStep) {
    for (int i = 0; i < kStep; ++i) to[i] = condition[i] != 0 ? yes[i] : no[i];
  }
}

// A CPU primitive for floats; the standard library's function for doubles.
template <class VecFunction>
KP_PRIMITIVE void map_lanes(float* __restrict to, const float* __restrict a, int columns, const VecFunction& function) {
  for (int i = 0; i < columns; i += cpu::kLanes) cpu::store(to + i, function(cpu::load(a + i)));
}

template <class Real>
static void run_real(Op op, Real* to, const Real* a, const Real* b, int columns) {
#define KP_UNARY(OP, VALUE) \
  case Op::OP:              \
    return map(to, a, columns, [](Real x) { return VALUE; })
#define KP_BINARY(OP, VALUE) \
  case Op::OP:               \
    return map(to, a, b, columns, [](Real x, Real y) { return VALUE; })
#define KP_LANE_FUNCTION(OP, LANES, VALUE)                                                                           \
  case Op::OP:                                                                                                       \
    if constexpr (sizeof(Real) == sizeof(float)) return map_lanes(to, a, columns, [](cpu::Vec x) { return LANES; }); \
    return map(to, a, columns, [](Real x) { return VALUE; })
  switch (op) {
    KP_UNARY(kNegate, -x);
    KP_UNARY(kAbs, std::abs(x));
    KP_UNARY(kFloor, std::floor(x));
    KP_LANE_FUNCTION(kExp, cpu::exp(x), std::exp(x));
    KP_LANE_FUNCTION(kExp2, cpu::exp(x * 0.693147181f), std::exp2(x));
    KP_LANE_FUNCTION(kLog, cpu::log(x), std::log(x));
    KP_LANE_FUNCTION(kLog2, cpu::log(x) * 1.44269504f, std::log2(x));
    KP_LANE_FUNCTION(kSqrt, cpu::sqrt(x), std::sqrt(x));
    KP_LANE_FUNCTION(kRsqrt, 1.0f / cpu::sqrt(x), 1 / std::sqrt(x));
    KP_LANE_FUNCTION(kTanh, cpu::tanh(x), std::tanh(x));
    KP_LANE_FUNCTION(kSigmoid, cpu::sigmoid(x), 1 / (1 + std::exp(-x)));
    KP_UNARY(kSin, std::sin(x));
    KP_UNARY(kCos, std::cos(x));
    KP_LANE_FUNCTION(kErf, cpu::erf(x), std::erf(x));
    KP_BINARY(kAdd, x + y);
    KP_BINARY(kSubtract, x - y);
    KP_BINARY(kMultiply, x * y);
    KP_BINARY(kDivide, x / y);
    KP_BINARY(kFloorDivide, floor_divide_real(x, y));
    KP_BINARY(kModulo, modulo_real(x, y));
    KP_BINARY(kPower, std::pow(x, y));
    KP_BINARY(kMinimum, minimum(x, y));
    KP_BINARY(kMaximum, maximum(x, y));
    default:
      return;
  }
#undef KP_LANE_FUNCTION
#undef KP_BINARY
#undef KP_UNARY
}

// In 64 bits or, where neither operands nor values need more, in 32.
template <class Integer>
static void run_integer(Op op, Integer* to, const Integer* a, const Integer* b, int columns) {
  switch (op) {
#define KP_UNARY(OP) \
  case Op::OP:       \
    return map(to, a, columns, [](Integer x) { return static_cast<Integer>(apply_integer(Op::OP, x, 0)); })
#define KP_BINARY(OP)             \
  case Op::OP:                    \
    return map(to, a, b, columns, \
               [](Integer x, Integer y) { return static_cast<Integer>(apply_integer(Op::OP, x, y)); })
    KP_UNARY(kNegate);
    KP_UNARY(kAbs);
    KP_UNARY(kNot);
    KP_BINARY(kAdd);
    KP_BINARY(kSubtract);
    KP_BINARY(kMultiply);
    KP_BINARY(kFloorDivide);
    KP_BINARY(kModulo);
    KP_BINARY(kMinimum);
    KP_BINARY(kMaximum);
    KP_BINARY(kAnd);
    KP_BINARY(kOr);
    KP_BINARY(kXor);
    KP_BINARY(kShiftLeft);
    KP_BINARY(kShiftRight);
#undef KP_BINARY
#undef KP_UNARY
    default:
      return;
  }
}

[[maybe_unused]] static void run_boolean(Op op, uint8_t* to, const uint8_t* a, const uint8_t* b, int columns) {
  switch (op) {
    case Op::kNot:
      return map(to, a, columns, [](uint8_t x) -> uint8_t { return x ^ 1; });
    case Op::kAnd:
      return map(to, a, b, columns, [](uint8_t x, uint8_t y) -> uint8_t { return x & y; });
    case Op::kOr:
      return map(to, a, b, columns, [](uint8_t x, uint8_t y) -> uint8_t { return x | y; });
    default:
      return map(to, a, b, columns, [](uint8_t x, uint8_t y) -> uint8_t { return x ^ y; });
  }
}

template <class T>
KP_PRIMITIVE void run_comparison(Op op, uint8_t* to, const T* a, const T* b, int columns) {
  switch (op) {
    case Op::kEqual:
      return map(to, a, b, columns, [](T x, T y) -> uint8_t { return x == y; });
    case Op::kNotEqual:
      return map(to, a, b, columns, [](T x, T y) -> uint8_t { return x != y; });
    case Op::kLess:
      return map(to, a, b, columns, [](T x, T y) -> uint8_t { return x < y; });
    default:
      return map(to, a, b, columns, [](T x, T y) -> uint8_t { return x <= y; });
  }
}

// Levels below AVX-512 convert 64-bit integers one at a time; those below 2^51 have their bits in a double's mantissa.
template <class Real>
KP_PRIMITIVE void convert_integers(Real* __restrict to, const int32_t* __restrict from, int columns) {
  map(to, from, columns, [](int32_t x) { return static_cast<Real>(x); });
}
template <class Real>
KP_PRIMITIVE void convert_integers(Real* __restrict to, const int64_t* __restrict from, int columns) {
#if !defined(__AVX512DQ__)
  constexpr uint64_t kSmall = uint64_t{1} << 51;
  uint64_t excess = 0;
  for (int i = 0; i < columns; ++i) excess |= (bits_of(from[i]) + kSmall) >> 52;
  if (excess == 0) {
    constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
    constexpr int64_t kMagicBits = 0x4338000000000000;
    return map(to, from, columns, [](int64_t x) {
      return static_cast<Real>(__builtin_bit_cast(double, wrapping(bits_of(x) + kMagicBits)) - kMagic);
    });
  }
#endif
  map(to, from, columns, [](int64_t x) { return static_cast<Real>(x); });
}

// Elements at offsets. 16-bit floats are gathered first; the primitives then widen them.
template <class To, class Element>
KP_PRIMITIVE void gather(To* __restrict to, const void* from, const int64_t* __restrict offsets, int columns) {
  const auto* elements = static_cast<const Element*>(from);
  for (int i = 0; i < columns; ++i) to[i] = static_cast<To>(elements[offsets[i]]);
}
template <class Narrow, class Real>
KP_PRIMITIVE void gather_narrow(Real* __restrict to, const void* from, const int64_t* __restrict offsets, int columns) {
  alignas(64) uint16_t bits[kTileBlock];
  const auto* elements = static_cast<const uint16_t*>(from);
  for (int i = 0; i < columns; ++i) bits[i] = elements[offsets[i]];
  for (int i = 0; i < columns; i += cpu::kLanes) {
    const cpu::Vec values = cpu::load(reinterpret_cast<const Narrow*>(bits) + i);
    for (int lane = 0; lane < cpu::kLanes; ++lane) to[i + lane] = values[lane];
  }
}

}  // namespace kernel_pytorch::expression::KP_ISA_NAMESPACE
