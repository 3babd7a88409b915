#include "kernel_pytorch/expression/interpret.h"

#include "kernel_pytorch/base/element.h"

namespace kernel_pytorch::expression {
namespace {

template <class Real>
Value<Real> load(const TensorView& from, Type type, std::span<const Value<Real>> values,
                 std::span<const NodeId> indices) {
  int64_t offset = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    offset += place_of(values[indices[i]].integer, from.sizes[i]) * from.strides[i];
  }
  if (from.dtype == DType::kInt64) return {.integer = from.as<int64_t>()[offset]};  // more bits than a double
  const double element = load_element(from.data, from.dtype, offset);
  if (type == Type::kFloat) return {.real = static_cast<Real>(element)};
  if (type == Type::kInt) return {.integer = static_cast<int64_t>(element)};
  return {.boolean = element != 0};
}

}  // namespace

template <class Real>
std::vector<Value<Real>> interpret(const Program& program, const Inputs<Real>& inputs,
                                   std::span<const TensorView> captured) {
  std::vector<Value<Real>> values;
  values.reserve(program.nodes.size());
  const auto value_of = [&](const Node& node) -> Value<Real> {
    switch (node.op) {
      case Op::kScore:
        return {.real = inputs.score};
      case Op::kBatch:
        return {.integer = inputs.batch};
      case Op::kHead:
        return {.integer = inputs.head};
      case Op::kQuery:
        return {.integer = inputs.query};
      case Op::kKey:
        return {.integer = inputs.key};
      case Op::kConstant:
        return {node.constant.boolean, node.constant.integer, static_cast<Real>(node.constant.real)};
      case Op::kLoad:
        return load<Real>(captured[node.capture], node.type, values, node.inputs());
      default: {
        const Type operands = program.nodes[node.arguments[node.op == Op::kSelect ? 1 : 0]].type;
        const auto argument = [&](int i) {
          return i < node.argument_count ? values[node.arguments[i]] : Value<Real>{};
        };
        return apply(node.op, operands, argument(0), argument(1), argument(2));
      }
    }
  };
  for (const Node& node : program.nodes) values.push_back(value_of(node));
  std::vector<Value<Real>> results;
  for (NodeId result : program.results) results.push_back(values[result]);
  return results;
}

template std::vector<Value<float>> interpret(const Program&, const Inputs<float>&, std::span<const TensorView>);
template std::vector<Value<double>> interpret(const Program&, const Inputs<double>&, std::span<const TensorView>);

}  // namespace kernel_pytorch::expression
