#include "kernel_pytorch/expression/gradient.h"

#include <numbers>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/builder.h"

namespace kernel_pytorch::expression {
namespace {

constexpr NodeId kZero = -1;  // of an adjoint: nothing has been added to it

class ReverseSweep {
 public:
  explicit ReverseSweep(const Program& program)
      : program_(program), builder_(program), adjoints_(program.nodes.size(), kZero) {}

  Gradient run() {
    adjoints_[program_.results[0]] = builder_.real(1);
    Gradient gradient;
    std::vector<NodeId> results = {builder_.real(0)};
    const std::vector<uint8_t> variation = variation_of(program_);
    for (NodeId id = static_cast<NodeId>(program_.nodes.size()) - 1; id >= 0; --id) {
      const Node& node = program_.nodes[id];
      if (adjoints_[id] == kZero || node.type != Type::kFloat) continue;
      if (node.op == Op::kScore) results[0] = adjoints_[id];
      if (node.op == Op::kLoad) {
        uint8_t varies = kVariesNot;
        for (NodeId index : node.inputs()) varies |= variation[index];
        const int place = static_cast<int>(results.size());
        gradient.loads.push_back({node.capture, place, place + 1, varies});
        results.push_back(adjoints_[id]);
        results.insert(results.end(), node.inputs().begin(), node.inputs().end());
      }
      propagate(node, id, adjoints_[id]);
    }
    gradient.program = builder_.finish(std::move(results));
    return gradient;
  }

 private:
  NodeId times(NodeId a, NodeId b) { return builder_.apply(Op::kMultiply, {a, b}); }
  NodeId times(NodeId a, double b) { return times(a, builder_.real(b)); }
  NodeId over(NodeId a, NodeId b) { return builder_.apply(Op::kDivide, {a, b}); }
  NodeId minus(NodeId a) { return builder_.apply(Op::kNegate, {a}); }
  NodeId one_minus(NodeId a) { return builder_.apply(Op::kSubtract, {builder_.real(1), a}); }
  NodeId select(NodeId condition, NodeId yes, NodeId no) { return builder_.apply(Op::kSelect, {condition, yes, no}); }
  NodeId less(NodeId a, NodeId b) { return builder_.apply(Op::kLess, {a, b}); }
  NodeId equal(NodeId a, NodeId b) { return builder_.apply(Op::kEqual, {a, b}); }

  void add_to(NodeId argument, NodeId part) {
    NodeId& adjoint = adjoints_[argument];
    adjoint = adjoint == kZero ? part : builder_.apply(Op::kAdd, {adjoint, part});
  }

  void propagate(const Node& node, NodeId y, NodeId g) {
    const NodeId a = node.arguments[0], b = node.arguments[1], c = node.arguments[2];
    switch (node.op) {
      case Op::kSelect:
        add_to(b, select(a, g, builder_.real(0)));
        return add_to(c, select(a, builder_.real(0), g));
      case Op::kAdd:
        add_to(a, g);
        return add_to(b, g);
      case Op::kSubtract:
        add_to(a, g);
        return add_to(b, minus(g));
      case Op::kMultiply:
        add_to(a, times(g, b));
        return add_to(b, times(g, a));
      case Op::kDivide:
        add_to(a, over(g, b));
        return add_to(b, minus(over(times(g, y), b)));
      case Op::kModulo:
        add_to(a, g);
        return add_to(b, minus(times(g, builder_.apply(Op::kFloorDivide, {a, b}))));
      case Op::kMinimum:
        add_to(a, share(less(b, a), equal(a, b), g));
        return add_to(b, share(less(a, b), equal(a, b), g));
      case Op::kMaximum:
        add_to(a, share(less(a, b), equal(a, b), g));
        return add_to(b, share(less(b, a), equal(a, b), g));
      case Op::kPower:
        return propagate_power(a, b, y, g);
      default:
        if (node.argument_count == 1 && program_.nodes[a].type == Type::kFloat) propagate_unary(node.op, a, y, g);
    }
  }

  NodeId share(NodeId lost, NodeId tie, NodeId g) {
    return select(lost, builder_.real(0), select(tie, times(g, 0.5), g));
  }

  void propagate_power(NodeId base, NodeId exponent, NodeId y, NodeId g) {
    const NodeId zero = builder_.real(0);
    const NodeId lower = builder_.apply(Op::kSubtract, {exponent, builder_.real(1)});
    const NodeId slope = times(exponent, builder_.apply(Op::kPower, {base, lower}));
    add_to(base, times(g, select(equal(exponent, zero), zero, slope)));
    const NodeId is_flat =
        builder_.apply(Op::kAnd, {equal(base, zero), builder_.apply(Op::kLessEqual, {zero, exponent})});
    add_to(exponent, times(g, select(is_flat, zero, times(y, builder_.apply(Op::kLog, {base})))));
  }

  void propagate_unary(Op op, NodeId a, NodeId y, NodeId g) {
    switch (op) {
      case Op::kNegate:
        return add_to(a, minus(g));
      case Op::kAbs: {
        const NodeId zero = builder_.real(0);
        return add_to(a, select(less(zero, a), g, select(less(a, zero), minus(g), zero)));
      }
      case Op::kExp:
        return add_to(a, times(g, y));
      case Op::kExp2:
        return add_to(a, times(times(g, y), std::numbers::ln2));
      case Op::kLog:
        return add_to(a, over(g, a));
      case Op::kLog2:
        return add_to(a, over(g, times(a, std::numbers::ln2)));
      case Op::kSqrt:
        return add_to(a, over(times(g, 0.5), y));
      case Op::kRsqrt:
        return add_to(a, times(times(g, -0.5), times(y, times(y, y))));
      case Op::kTanh:
        return add_to(a, times(g, one_minus(times(y, y))));
      case Op::kSigmoid:
        return add_to(a, times(g, times(y, one_minus(y))));
      case Op::kSin:
        return add_to(a, times(g, builder_.apply(Op::kCos, {a})));
      case Op::kCos:
        return add_to(a, minus(times(g, builder_.apply(Op::kSin, {a}))));
      case Op::kErf: {
        const NodeId bell = builder_.apply(Op::kExp, {minus(times(a, a))});
        return add_to(a, times(times(g, bell), 2 * std::numbers::inv_sqrtpi));
      }
      default:  // floor and casts
        return;
    }
  }

  const Program& program_;
  Builder builder_;
  std::vector<NodeId> adjoints_;
};

}  // namespace

Gradient differentiate(const Program& program) {
  KP_CHECK(program.results.size() == 1 && program.result_type() == Type::kFloat,
           "expression: only a program with one float result has a gradient");
  return ReverseSweep(program).run();
}

bool adds_to_score(const Gradient& gradient) {
  const Node& derivative = gradient.program.nodes[gradient.program.results[0]];
  return derivative.op == Op::kConstant && derivative.constant.real == 1.0;
}

}  // namespace kernel_pytorch::expression
