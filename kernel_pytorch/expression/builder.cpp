#include "kernel_pytorch/expression/builder.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"

namespace kernel_pytorch::expression {
namespace {

constexpr bool is_commutative(Op op) {
  switch (op) {
    case Op::kAdd:
    case Op::kMultiply:
    case Op::kMinimum:
    case Op::kMaximum:
    case Op::kAnd:
    case Op::kOr:
    case Op::kXor:
    case Op::kEqual:
    case Op::kNotEqual:
      return true;
    default:
      return false;
  }
}

constexpr bool is_comparison(Op op) {
  return op >= Op::kEqual && op <= Op::kLessEqual;
}

// What an operation computes in, given the widest type of its operands.
enum class Domain { kFloats, kNumbers, kBits, kIntegers };
constexpr Domain domain_of(Op op) {
  if ((op >= Op::kFloor && op <= Op::kErf) || op == Op::kDivide || op == Op::kPower) return Domain::kFloats;
  if (op == Op::kShiftLeft || op == Op::kShiftRight) return Domain::kIntegers;
  if (op == Op::kNot || op == Op::kAnd || op == Op::kOr || op == Op::kXor) return Domain::kBits;
  return Domain::kNumbers;
}

}  // namespace

size_t Builder::NodeHash::operator()(const Node& node) const {
  HashMixer mixer;
  mixer.add(static_cast<uint64_t>(node.op) << 16 | static_cast<uint64_t>(node.type) << 8 |
            static_cast<uint8_t>(node.capture));
  for (NodeId input : node.inputs()) mixer.add(static_cast<uint64_t>(input));
  mixer.add(static_cast<uint64_t>(node.constant.integer) + node.constant.boolean);
  mixer.add(std::bit_cast<uint64_t>(node.constant.real));
  return mixer.value();
}

Builder::Builder(std::vector<Capture> captures) : captures_(std::move(captures)) {
  KP_CHECK(captures_.size() <= kMaxCaptures, "expression: ", captures_.size(), " captured tensors; ", kMaxCaptures,
           " are the most");
  for (const Capture& capture : captures_) {
    type_of(capture.dtype);
    KP_CHECK(capture.rank >= 0 && capture.rank <= kMaxRank, "expression: a captured tensor of ",
             static_cast<int>(capture.rank), " dimensions; ", kMaxRank, " are the most");
  }
}

Builder::Builder(const Program& program) : Builder(program.captures) {
  for (const Node& node : program.nodes) add(node);
}

NodeId Builder::add(const Node& node) {
  const auto [known, is_new] = known_.try_emplace(node, static_cast<NodeId>(nodes_.size()));
  if (is_new) {
    KP_CHECK(nodes_.size() < kMaxNodes, place_, ": the program has more than ", kMaxNodes, " operations");
    nodes_.push_back(node);
  }
  return known->second;
}

NodeId Builder::input(Op op) {
  KP_INTERNAL_CHECK(op <= Op::kKey, "expression: ", mnemonic_of(op), " is no input");
  return add({.op = op, .type = op == Op::kScore ? Type::kFloat : Type::kInt});
}

NodeId Builder::boolean(bool value) {
  return add({.type = Type::kBool, .constant = {.boolean = value}});
}

NodeId Builder::integer(int64_t value) {
  return add({.type = Type::kInt, .constant = {.integer = value}});
}

NodeId Builder::real(double value) {
  if (value != value) value = std::numeric_limits<double>::quiet_NaN();  // one NaN, so that it has one text
  return add({.type = Type::kFloat, .constant = {.real = value}});
}

NodeId Builder::load(int capture, std::span<const NodeId> indices) {
  KP_CHECK(capture >= 0 && capture < static_cast<int>(captures_.size()), place_, ": captured tensor ", capture,
           " is read and there are ", captures_.size());
  const Capture& from = captures_[capture];
  KP_CHECK(static_cast<int>(indices.size()) == from.rank, place_, ": captured tensor ", capture, " has ",
           static_cast<int>(from.rank), " dimensions and is read with ", indices.size(), " indices; give one for each");
  Node node{.op = Op::kLoad,
            .type = type_of(from.dtype),
            .argument_count = from.rank,
            .capture = static_cast<int8_t>(capture)};
  for (size_t i = 0; i < indices.size(); ++i) {
    KP_CHECK(type(indices[i]) == Type::kInt, place_, ": index ", i, " of captured tensor ", capture, " is a ",
             name_of(type(indices[i])), "; an index is an integer");
    node.arguments[i] = indices[i];
  }
  return add(node);
}

NodeId Builder::cast(NodeId id, Type to) {
  if (type(id) == to) return id;
  return apply(to == Type::kFloat ? Op::kToFloat : to == Type::kInt ? Op::kToInt : Op::kToBool, {id});
}

// The type that every operand is brought to. Throws where there is none.
Type Builder::check_types(Op op, std::span<const NodeId> arguments) const {
  if (op == Op::kSelect) {
    KP_CHECK(type(arguments[0]) == Type::kBool, place_, ": the condition of `where` is a ", name_of(type(arguments[0])),
             "; compare it with something, for a bool");
    return std::max(type(arguments[1]), type(arguments[2]));
  }
  Type widest = Type::kBool;
  for (NodeId argument : arguments) widest = std::max(widest, type(argument));
  switch (domain_of(op)) {
    case Domain::kFloats:
      return Type::kFloat;
    case Domain::kNumbers:
      return std::max(widest, Type::kInt);
    case Domain::kBits:
    case Domain::kIntegers:
      KP_CHECK(widest != Type::kFloat, place_, ": `", mnemonic_of(op), "` of a float; it takes bools and integers");
      return domain_of(op) == Domain::kBits ? widest : Type::kInt;
  }
  fail(ErrorCode::kInternal, "expression: operation ", static_cast<int>(op));
}

NodeId Builder::apply(Op op, std::span<const NodeId> arguments) {
  KP_CHECK(arity_of(op) == static_cast<int>(arguments.size()), place_, ": `", mnemonic_of(op), "` takes ", arity_of(op),
           " arguments, not ", arguments.size());
  if (op <= Op::kKey) return input(op);
  if (op == Op::kPower && type(arguments[0]) != Type::kFloat) {  // an integer stays one where torch's does
    const Node& exponent = nodes_[arguments[1]];
    if (exponent.op == Op::kConstant && exponent.type == Type::kInt && exponent.constant.integer >= 0) {
      const int64_t times = exponent.constant.integer;
      if (const NodeId product = power(cast(arguments[0], Type::kInt), static_cast<double>(times)); product >= 0) {
        return product;
      }
    }
  }
  Node node{.op = op, .argument_count = static_cast<int8_t>(arguments.size())};
  std::copy(arguments.begin(), arguments.end(), node.arguments.begin());
  if (op == Op::kToFloat || op == Op::kToInt || op == Op::kToBool) {
    node.type = op == Op::kToFloat ? Type::kFloat : op == Op::kToInt ? Type::kInt : Type::kBool;
    if (type(arguments[0]) == node.type) return arguments[0];
  } else {
    const Type operands = check_types(op, arguments);
    node.type = is_comparison(op) ? Type::kBool : operands;
    for (int i = op == Op::kSelect ? 1 : 0; i < node.argument_count; ++i) {
      node.arguments[i] = cast(node.arguments[i], operands);
    }
    if (is_commutative(op) && node.arguments[1] < node.arguments[0]) std::swap(node.arguments[0], node.arguments[1]);
  }
  const NodeId simpler = simplify(node);
  return simpler >= 0 ? simpler : add(node);
}

Program Builder::finish(std::vector<NodeId> results) const {
  std::vector<bool> is_needed(nodes_.size(), false);
  for (NodeId result : results) is_needed[result] = true;
  for (NodeId id = node_count() - 1; id >= 0; --id) {
    if (!is_needed[id]) continue;
    for (NodeId input : nodes_[id].inputs()) is_needed[input] = true;
  }
  Program program{.captures = captures_, .nodes = {}, .results = {}};
  std::vector<NodeId> moved(nodes_.size(), -1);
  for (NodeId id = 0; id < node_count(); ++id) {
    if (!is_needed[id]) continue;
    moved[id] = static_cast<NodeId>(program.nodes.size());
    Node& node = program.nodes.emplace_back(nodes_[id]);
    for (int i = 0; i < node.argument_count; ++i) node.arguments[i] = moved[node.arguments[i]];
  }
  for (NodeId result : results) program.results.push_back(moved[result]);
  return program;
}

}  // namespace kernel_pytorch::expression
