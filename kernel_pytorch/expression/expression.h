// A scalar function of (score, batch, head, query, key) and of captured tensors, as a value: what attention's custom
// score and mask functions are compiled to. A Program is a DAG in the order of computation: an argument stands before
// its user, equal nodes are one node, and nothing is dead. Programs are made by a Builder (builder.h) or read from text
// (text.h); then they are evaluated (interpret.h, tile.h), differentiated (gradient.h) and printed as CUDA
// (cuda_text.h).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::expression {

enum class Type : uint8_t { kBool, kInt, kFloat };  // in the order in which they are promoted; kInt has 64 bits
std::string_view name_of(Type type);

// X(enumerator, word in texts, number of arguments)
// Integers wrap around; floor_div and mod round towards minus infinity as in Python, and are 0 for a divisor of 0.
// min and max hand a NaN on. A shift by less than 0 or more than 63 shifts everything out.
#define KP_EXPRESSION_OPS(X)                                                                         \
  X(kScore, "score", 0)                                                                              \
  X(kBatch, "batch", 0)                                                                              \
  X(kHead, "head", 0)                                                                                \
  X(kQuery, "query", 0)                                                                              \
  X(kKey, "key", 0)                                                                                  \
  X(kConstant, "constant", 0)                                                                        \
  X(kLoad, "load", -1) /* an element of a captured tensor: an index per dimension. One below zero */ \
                       /* counts from the end; beyond the tensor the nearest element is read. */     \
  X(kToFloat, "to_float", 1)                                                                         \
  X(kToInt, "to_int", 1) /* towards zero; saturates, NaN is 0 */                                     \
  X(kToBool, "to_bool", 1)                                                                           \
  X(kNegate, "neg", 1)                                                                               \
  X(kAbs, "abs", 1)                                                                                  \
  X(kFloor, "floor", 1)                                                                              \
  X(kExp, "exp", 1)                                                                                  \
  X(kExp2, "exp2", 1)                                                                                \
  X(kLog, "log", 1)                                                                                  \
  X(kLog2, "log2", 1)                                                                                \
  X(kSqrt, "sqrt", 1)                                                                                \
  X(kRsqrt, "rsqrt", 1)                                                                              \
  X(kTanh, "tanh", 1)                                                                                \
  X(kSigmoid, "sigmoid", 1)                                                                          \
  X(kSin, "sin", 1)                                                                                  \
  X(kCos, "cos", 1)                                                                                  \
  X(kErf, "erf", 1)                                                                                  \
  X(kNot, "not", 1) /* of the bits where the argument is an integer; so and, or, xor */              \
  X(kAdd, "add", 2)                                                                                  \
  X(kSubtract, "sub", 2)                                                                             \
  X(kMultiply, "mul", 2)                                                                             \
  X(kDivide, "div", 2)                                                                               \
  X(kFloorDivide, "floor_div", 2)                                                                    \
  X(kModulo, "mod", 2)                                                                               \
  X(kPower, "pow", 2)                                                                                \
  X(kMinimum, "min", 2)                                                                              \
  X(kMaximum, "max", 2)                                                                              \
  X(kAnd, "and", 2)                                                                                  \
  X(kOr, "or", 2)                                                                                    \
  X(kXor, "xor", 2)                                                                                  \
  X(kShiftLeft, "shift_left", 2)                                                                     \
  X(kShiftRight, "shift_right", 2)                                                                   \
  X(kEqual, "eq", 2)                                                                                 \
  X(kNotEqual, "ne", 2)                                                                              \
  X(kLess, "lt", 2)                                                                                  \
  X(kLessEqual, "le", 2)                                                                             \
  X(kSelect, "where", 3)

enum class Op : uint8_t {
#define KP_ENUMERATOR(enumerator, word, arity) enumerator,
  KP_EXPRESSION_OPS(KP_ENUMERATOR)
#undef KP_ENUMERATOR
};
inline constexpr int kOpCount = static_cast<int>(Op::kSelect) + 1;
std::string_view mnemonic_of(Op op);
int arity_of(Op op);  // -1: a load has its capture's rank

using NodeId = int32_t;  // place in Program::nodes

// A number of one of the three types; the other two fields are zero.
struct Constant {
  bool boolean = false;
  int64_t integer = 0;
  double real = 0;
};

struct Node {
  Op op = Op::kConstant;
  Type type = Type::kFloat;
  int8_t argument_count = 0;
  int8_t capture = 0;                        // of a load
  std::array<NodeId, kMaxRank> arguments{};  // zero behind argument_count
  Constant constant = {};                    // of a constant
  std::span<const NodeId> inputs() const { return {arguments.data(), static_cast<size_t>(argument_count)}; }
};
bool operator==(const Node& a, const Node& b);  // by bits, so that NaN equals itself and -0 is not 0

struct Capture {
  DType dtype = DType::kFloat32;  // fp32, bf16, fp16, int32, int64, bool (fp64 for references)
  int8_t rank = 0;
  friend bool operator==(const Capture&, const Capture&) = default;
};
Type type_of(DType dtype);  // of a loaded element. Throws where elements of this type cannot be captured.

struct Program {
  std::vector<Capture> captures;
  std::vector<Node> nodes;
  std::vector<NodeId> results;

  Type result_type(int result = 0) const { return nodes[results[result]].type; }
  friend bool operator==(const Program&, const Program&) = default;
};

// A program is small; one that is not was not written by a person.
inline constexpr int kMaxNodes = 16384;
inline constexpr int kMaxCaptures = 16;

// What a node changes with: a set of flags.
enum Varies : uint8_t { kVariesNot = 0, kVariesByQuery = 1, kVariesByKey = 2, kVariesByScore = 4 };
std::vector<uint8_t> variation_of(const Program& program);

// Throws kInvalidArgument, naming `op`, unless these tensors are what the program captures (none of them empty).
void check_captures(const Program& program, std::span<const TensorView> captured, std::string_view op);

}  // namespace kernel_pytorch::expression
