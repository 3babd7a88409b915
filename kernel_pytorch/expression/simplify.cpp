// Builder's algebra: local rules, tried once for each new node, whose operands are as simple as they get. A rule may
// change the sign of a zero and nothing else; so x * 0 stays where x is a float, which may be infinite.
#include <cmath>

#include "kernel_pytorch/expression/builder.h"
#include "kernel_pytorch/expression/scalar.h"

namespace kernel_pytorch::expression {

bool Builder::is_number(NodeId id, double value) const {
  if (!is_constant(id)) return false;
  const Constant& constant = nodes_[id].constant;
  switch (type(id)) {
    case Type::kBool:
      return static_cast<double>(constant.boolean) == value;
    case Type::kInt:
      return constant.integer == static_cast<int64_t>(value);
    default:
      return constant.real == value;
  }
}

NodeId Builder::simplify(const Node& node) {
  if (const NodeId folded = fold(node); folded >= 0) return folded;
  switch (node.argument_count) {
    case 1:
      return simplify_unary(node);
    case 2: {
      const NodeId simpler = simplify_binary(node);
      return simpler >= 0 || node.arguments[0] != node.arguments[1] ? simpler : simplify_equal_arguments(node);
    }
    default:
      return simplify_select(node);
  }
}

NodeId Builder::fold(const Node& node) {
  Value<double> values[3];
  for (int i = 0; i < node.argument_count; ++i) {
    if (!is_constant(node.arguments[i])) return -1;
    const Constant& constant = nodes_[node.arguments[i]].constant;
    values[i] = {constant.boolean, constant.integer, constant.real};
  }
  const Type operands = type(node.arguments[node.op == Op::kSelect ? 1 : 0]);
  const Value<double> value = expression::apply(node.op, operands, values[0], values[1], values[2]);
  switch (node.type) {
    case Type::kBool:
      return boolean(value.boolean);
    case Type::kInt:
      return integer(value.integer);
    default:
      return real(value.real);
  }
}

NodeId Builder::simplify_unary(const Node& node) {
  const Node& inner = nodes_[node.arguments[0]];
  const bool is_involution = node.op == Op::kNegate || node.op == Op::kNot;
  if (is_involution && inner.op == node.op) return inner.arguments[0];
  if (node.op == Op::kAbs && inner.op == Op::kAbs) return node.arguments[0];
  if (node.op == Op::kToBool && inner.op == Op::kToInt && type(inner.arguments[0]) == Type::kBool) {
    return inner.arguments[0];
  }
  return -1;
}

NodeId Builder::simplify_binary(const Node& node) {
  const NodeId a = node.arguments[0], b = node.arguments[1];
  const bool is_float = node.type == Type::kFloat;
  switch (node.op) {
    case Op::kAdd:
      return is_number(a, 0) ? b : is_number(b, 0) ? a : -1;
    case Op::kSubtract:
      return is_number(b, 0) ? a : is_number(a, 0) ? apply(Op::kNegate, {b}) : -1;
    case Op::kMultiply:
      if (is_number(a, 1)) return b;
      if (is_number(b, 1)) return a;
      if (is_number(a, -1)) return apply(Op::kNegate, {b});
      if (is_number(b, -1)) return apply(Op::kNegate, {a});
      return !is_float && (is_number(a, 0) || is_number(b, 0)) ? integer(0) : -1;
    case Op::kDivide:
      return is_number(b, 1) ? a : -1;
    case Op::kFloorDivide:
      return !is_float && is_number(b, 1) ? a : -1;
    case Op::kModulo:
      return !is_float && is_number(b, 1) ? integer(0) : -1;
    case Op::kPower:
      return is_constant(b) ? power(a, nodes_[b].constant.real) : -1;
    case Op::kShiftLeft:
    case Op::kShiftRight:
      return is_number(b, 0) ? a : -1;
    case Op::kAnd: {
      const int all = node.type == Type::kBool ? 1 : -1;
      if (is_number(a, 0) || is_number(b, all)) return a;
      return is_number(b, 0) || is_number(a, all) ? b : -1;
    }
    case Op::kOr: {
      const int all = node.type == Type::kBool ? 1 : -1;
      if (is_number(a, 0) || is_number(b, all)) return b;
      return is_number(b, 0) || is_number(a, all) ? a : -1;
    }
    default:
      return -1;
  }
}

NodeId Builder::simplify_equal_arguments(const Node& node) {
  const bool is_float = type(node.arguments[0]) == Type::kFloat;  // and so may be NaN
  switch (node.op) {
    case Op::kMinimum:
    case Op::kMaximum:
    case Op::kAnd:
    case Op::kOr:
      return node.arguments[0];
    case Op::kSubtract:
      return is_float ? -1 : integer(0);
    case Op::kXor:
      return node.type == Type::kBool ? boolean(false) : integer(0);
    case Op::kEqual:
    case Op::kLessEqual:
      return is_float ? -1 : boolean(true);
    case Op::kNotEqual:
    case Op::kLess:
      return is_float ? -1 : boolean(false);
    default:
      return -1;
  }
}

NodeId Builder::simplify_select(const Node& node) {
  const auto [condition, yes, no] = std::array{node.arguments[0], node.arguments[1], node.arguments[2]};
  if (is_constant(condition)) return nodes_[condition].constant.boolean ? yes : no;
  if (yes == no) return yes;
  if (nodes_[condition].op == Op::kNot) return apply(Op::kSelect, {nodes_[condition].arguments[0], no, yes});
  if (node.type != Type::kBool) return -1;
  if (is_number(yes, 1)) return apply(Op::kOr, {condition, no});
  if (is_number(no, 0)) return apply(Op::kAnd, {condition, yes});
  return -1;
}

// Small exponents as torch takes them: by multiplication, square root and division. -1 where pow must do it.
NodeId Builder::power(NodeId base, double exponent) {
  constexpr double kMostProducts = 8;
  if (exponent == 0.5) return apply(Op::kSqrt, {base});
  if (exponent == -0.5) return apply(Op::kRsqrt, {base});
  if (std::floor(exponent) != exponent || std::abs(exponent) > kMostProducts) return -1;
  if (exponent < 0) return apply(Op::kDivide, {real(1), power(base, -exponent)});
  NodeId product = type(base) == Type::kInt ? integer(1) : real(1);
  NodeId square = base;
  for (int rest = static_cast<int>(exponent); rest > 0; rest >>= 1) {
    if (rest & 1) product = apply(Op::kMultiply, {product, square});
    if (rest > 1) square = apply(Op::kMultiply, {square, square});
  }
  return product;
}

}  // namespace kernel_pytorch::expression
