// What each operation does to single values: the one definition that constant folding, the interpreter and the tiles
// share. Real is float or double. Words have internal linkage, since expression/tile_isa.cpp is compiled once per CPU
// level.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernel_pytorch/cpu/isa.h"
#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

KP_PRIMITIVE int64_t wrapping(uint64_t bits) {
  return static_cast<int64_t>(bits);
}
KP_PRIMITIVE uint64_t bits_of(int64_t value) {
  return static_cast<uint64_t>(value);
}

KP_PRIMITIVE int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrapping(-bits_of(a));  // the one quotient that may not fit
  const int64_t quotient = a / b;
  return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
KP_PRIMITIVE int64_t modulo(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
KP_PRIMITIVE int64_t shift_left(int64_t a, int64_t by) {
  return by < 0 || by > 63 ? 0 : wrapping(bits_of(a) << by);
}
KP_PRIMITIVE int64_t shift_right(int64_t a, int64_t by) {
  return a >> (by < 0 || by > 63 ? 63 : by);
}

template <class Real>
KP_PRIMITIVE Real floor_divide_real(Real a, Real b) {
  return std::floor(a / b);
}
template <class Real>
KP_PRIMITIVE Real modulo_real(Real a, Real b) {
  const Real rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T>
KP_PRIMITIVE T minimum(T a, T b) {
  return a < b || a != a ? a : b;
}
template <class T>
KP_PRIMITIVE T maximum(T a, T b) {
  return a > b || a != a ? a : b;
}
template <class Real>
KP_PRIMITIVE int64_t to_int(Real value) {
  constexpr Real kBeyond = static_cast<Real>(9223372036854775808.0);  // 2^63, exact in both types
  if (value != value) return 0;
  if (value >= kBeyond) return std::numeric_limits<int64_t>::max();
  return value < -kBeyond ? std::numeric_limits<int64_t>::min() : static_cast<int64_t>(value);
}

// The place of an index in a dimension: from the end where it is below zero, then the nearest there is.
template <class Integer>
KP_PRIMITIVE Integer place_of(Integer index, Integer size) {
  const Integer counted = index < 0 ? index + size : index;
  return counted < 0 ? 0 : counted < size ? counted : size - 1;
}

template <class Real>
struct Value {
  bool boolean = false;
  int64_t integer = 0;
  Real real = 0;
};

template <class Real>
static inline Real apply_real(Op op, Real a, Real b) {
  switch (op) {
    case Op::kNegate:
      return -a;
    case Op::kAbs:
      return std::abs(a);
    case Op::kFloor:
      return std::floor(a);
    case Op::kExp:
      return std::exp(a);
    case Op::kExp2:
      return std::exp2(a);
    case Op::kLog:
      return std::log(a);
    case Op::kLog2:
      return std::log2(a);
    case Op::kSqrt:
      return std::sqrt(a);
    case Op::kRsqrt:
      return 1 / std::sqrt(a);
    case Op::kTanh:
      return std::tanh(a);
    case Op::kSigmoid:
      return 1 / (1 + std::exp(-a));
    case Op::kSin:
      return std::sin(a);
    case Op::kCos:
      return std::cos(a);
    case Op::kErf:
      return std::erf(a);
    case Op::kAdd:
      return a + b;
    case Op::kSubtract:
      return a - b;
    case Op::kMultiply:
      return a * b;
    case Op::kDivide:
      return a / b;
    case Op::kFloorDivide:
      return floor_divide_real(a, b);
    case Op::kModulo:
      return modulo_real(a, b);
    case Op::kPower:
      return std::pow(a, b);
    case Op::kMinimum:
      return minimum(a, b);
    case Op::kMaximum:
      return maximum(a, b);
    default:
      return std::numeric_limits<Real>::quiet_NaN();
  }
}

[[maybe_unused]] static inline int64_t apply_integer(Op op, int64_t a, int64_t b) {
  switch (op) {
    case Op::kNegate:
      return wrapping(-bits_of(a));
    case Op::kAbs:
      return a < 0 ? wrapping(-bits_of(a)) : a;
    case Op::kNot:
      return ~a;
    case Op::kAdd:
      return wrapping(bits_of(a) + bits_of(b));
    case Op::kSubtract:
      return wrapping(bits_of(a) - bits_of(b));
    case Op::kMultiply:
      return wrapping(bits_of(a) * bits_of(b));
    case Op::kFloorDivide:
      return floor_divide(a, b);
    case Op::kModulo:
      return modulo(a, b);
    case Op::kMinimum:
      return minimum(a, b);
    case Op::kMaximum:
      return maximum(a, b);
    case Op::kAnd:
      return a & b;
    case Op::kOr:
      return a | b;
    case Op::kXor:
      return a ^ b;
    case Op::kShiftLeft:
      return shift_left(a, b);
    case Op::kShiftRight:
      return shift_right(a, b);
    default:
      return 0;
  }
}

template <class T>
KP_PRIMITIVE bool apply_comparison(Op op, T a, T b) {
  return op == Op::kEqual ? a == b : op == Op::kNotEqual ? a != b : op == Op::kLess ? a < b : a <= b;
}

// `type` is that of the operands (of the choices, for where); the operation is neither a leaf nor ill typed.
template <class Real>
static inline Value<Real> apply(Op op, Type type, const Value<Real>& a, const Value<Real>& b = {},
                                const Value<Real>& c = {}) {
  Value<Real> value;
  switch (op) {
    case Op::kSelect:
      return a.boolean ? b : c;
    case Op::kToFloat:
      value.real = type == Type::kInt ? static_cast<Real>(a.integer) : static_cast<Real>(a.boolean);
      return value;
    case Op::kToInt:
      value.integer = type == Type::kFloat ? to_int(a.real) : static_cast<int64_t>(a.boolean);
      return value;
    case Op::kToBool:
      value.boolean = type == Type::kFloat ? a.real != 0 : a.integer != 0;
      return value;
    case Op::kEqual:
    case Op::kNotEqual:
    case Op::kLess:
    case Op::kLessEqual:
      value.boolean =
          type == Type::kFloat ? apply_comparison(op, a.real, b.real) : apply_comparison(op, a.integer, b.integer);
      return value;
    default:
      break;
  }
  if (type == Type::kFloat) value.real = apply_real(op, a.real, b.real);
  if (type == Type::kInt) value.integer = apply_integer(op, a.integer, b.integer);
  if (type == Type::kBool) {
    value.boolean = op == Op::kNot   ? !a.boolean
                    : op == Op::kAnd ? a.boolean && b.boolean
                    : op == Op::kOr  ? a.boolean || b.boolean
                                     : a.boolean != b.boolean;
  }
  return value;
}

}  // namespace kernel_pytorch::expression
