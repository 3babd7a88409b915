#include "kernel_pytorch/expression/expression.h"

#include <bit>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::expression {
namespace {

struct OpRow {
  std::string_view word;
  int arity;
};
constexpr OpRow kOps[kOpCount] = {
#define KP_ROW(enumerator, word, arity) {word, arity},
    KP_EXPRESSION_OPS(KP_ROW)
#undef KP_ROW
};

}  // namespace

std::string_view name_of(Type type) {
  constexpr std::string_view kNames[] = {"bool", "int", "float"};
  return kNames[static_cast<int>(type)];
}

std::string_view mnemonic_of(Op op) {
  return kOps[static_cast<int>(op)].word;
}

int arity_of(Op op) {
  return kOps[static_cast<int>(op)].arity;
}

bool operator==(const Node& a, const Node& b) {
  return a.op == b.op && a.type == b.type && a.argument_count == b.argument_count && a.capture == b.capture &&
         a.arguments == b.arguments && a.constant.boolean == b.constant.boolean &&
         a.constant.integer == b.constant.integer &&
         std::bit_cast<uint64_t>(a.constant.real) == std::bit_cast<uint64_t>(b.constant.real);
}

Type type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kBFloat16:
    case DType::kFloat16:
      return Type::kFloat;
    case DType::kInt32:
    case DType::kInt64:
      return Type::kInt;
    case DType::kBool:
      return Type::kBool;
    default:
      fail(ErrorCode::kInvalidArgument, "expression: a captured tensor is ", dtype,
           "; captured tensors are fp32, bf16, fp16, int32, int64 or bool");
  }
}

std::vector<uint8_t> variation_of(const Program& program) {
  std::vector<uint8_t> variation;
  for (const Node& node : program.nodes) {
    uint8_t flags = node.op == Op::kScore   ? kVariesByScore | kVariesByQuery | kVariesByKey
                    : node.op == Op::kQuery ? kVariesByQuery
                    : node.op == Op::kKey   ? kVariesByKey
                                            : kVariesNot;
    for (NodeId input : node.inputs()) flags |= variation[input];
    variation.push_back(flags);
  }
  return variation;
}

void check_captures(const Program& program, std::span<const TensorView> captured, std::string_view op) {
  KP_CHECK(captured.size() == program.captures.size(), op, ": the score or mask function captures ",
           program.captures.size(), " tensors and ", captured.size(), " are given; pass those that its trace lists");
  for (size_t i = 0; i < captured.size(); ++i) {
    const Capture& wanted = program.captures[i];
    KP_CHECK(captured[i].rank == wanted.rank && captured[i].dtype == wanted.dtype, op, ": captured tensor ", i, " is ",
             captured[i], "; the function was traced with ", wanted.dtype, " of ", static_cast<int>(wanted.rank),
             " dimensions: trace it anew");
    KP_CHECK(captured[i].element_count() > 0, op, ": captured tensor ", i, " is ", captured[i],
             "; a function cannot read from an empty tensor");
  }
}

}  // namespace kernel_pytorch::expression
