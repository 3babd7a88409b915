#include "kernel_pytorch/expression/compose.h"

#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/builder.h"

namespace kernel_pytorch::expression {

Program masked(const Program& score_mod, const Program& mask_mod) {
  KP_CHECK(score_mod.captures == mask_mod.captures,
           "expression: score_mod and mask_mod were traced with different captured tensors; trace them together");
  KP_CHECK(score_mod.result_type() == Type::kFloat && mask_mod.result_type() == Type::kBool,
           "expression: score_mod gives a ", name_of(score_mod.result_type()), " and mask_mod a ",
           name_of(mask_mod.result_type()), "; they must give a float and a bool");
  Builder builder(score_mod);
  std::vector<NodeId> moved;
  for (const Node& node : mask_mod.nodes) {
    std::vector<NodeId> arguments;
    for (NodeId input : node.inputs()) arguments.push_back(moved[input]);
    moved.push_back(node.op == Op::kLoad       ? builder.load(node.capture, arguments)
                    : node.op != Op::kConstant ? builder.apply(node.op, arguments)
                    : node.type == Type::kBool ? builder.boolean(node.constant.boolean)
                    : node.type == Type::kInt  ? builder.integer(node.constant.integer)
                                               : builder.real(node.constant.real));
  }
  const NodeId hidden = builder.real(-std::numeric_limits<double>::infinity());
  return builder.finish({builder.apply(Op::kSelect, {moved[mask_mod.results[0]], score_mod.results[0], hidden})});
}

Program unchanged_score(std::vector<Capture> captures) {
  Builder builder(std::move(captures));
  return builder.finish({builder.input(Op::kScore)});
}

}  // namespace kernel_pytorch::expression
