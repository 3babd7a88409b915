// Builds programs: checks types, promotes (bool to int to float, as torch does), folds constants, applies the algebra
// that holds for every value (the sign of a zero aside), and makes equal nodes one. So a program has one form however
// it was written down, and reading back what was printed gives the same program.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernel_pytorch/expression/expression.h"

namespace kernel_pytorch::expression {

class Builder {
 public:
  explicit Builder(std::vector<Capture> captures = {});
  explicit Builder(const Program& program);  // goes on from there: its nodes keep their numbers

  // Errors begin with it: "line 7" of a text.
  void set_place(std::string place) { place_ = std::move(place); }

  NodeId input(Op op);  // kScore to kKey
  NodeId boolean(bool value);
  NodeId integer(int64_t value);
  NodeId real(double value);
  NodeId load(int capture, std::span<const NodeId> indices);
  NodeId apply(Op op, std::span<const NodeId> arguments);
  NodeId apply(Op op, std::initializer_list<NodeId> arguments) {
    return apply(op, std::span<const NodeId>(arguments.begin(), arguments.size()));
  }

  const Node& node(NodeId id) const { return nodes_[id]; }
  Type type(NodeId id) const { return nodes_[id].type; }
  int node_count() const { return static_cast<int>(nodes_.size()); }

  // What the results need, and nothing else. The builder can go on.
  Program finish(std::vector<NodeId> results) const;

 private:
  struct NodeHash {
    size_t operator()(const Node& node) const;
  };

  NodeId add(const Node& node);  // or the equal node that is there
  NodeId cast(NodeId id, Type type);
  Type check_types(Op op, std::span<const NodeId> arguments) const;
  bool is_constant(NodeId id) const { return nodes_[id].op == Op::kConstant; }
  bool is_number(NodeId id, double value) const;  // a constant of this value; of a bool, 0 and 1
  // The node that `node` is equal to and that costs less, or -1.
  NodeId simplify(const Node& node);
  NodeId simplify_unary(const Node& node);
  NodeId simplify_binary(const Node& node);
  NodeId simplify_equal_arguments(const Node& node);
  NodeId simplify_select(const Node& node);
  NodeId fold(const Node& node);
  NodeId power(NodeId base, double exponent);

  std::vector<Capture> captures_;
  std::vector<Node> nodes_;
  std::unordered_map<Node, NodeId, NodeHash> known_;
  std::string place_ = "expression";
};

}  // namespace kernel_pytorch::expression
