// One statement a node; constants and inputs stand where they are used. Integers have 32 bits where their range allows.
#include "kernel_pytorch/expression/cuda_text.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/range.h"

namespace kernel_pytorch::expression {
namespace {

constexpr std::string_view kParameters =
    "float score, int32_t batch, int32_t head, int32_t query, int32_t key, const tile::CapturedTensor* captures";

std::string float_literal(double number) {
  const auto value = static_cast<float>(number);
  if (std::isnan(value)) return "__uint_as_float(0x7fc00000u)";
  if (std::isinf(value)) return value > 0 ? "__uint_as_float(0x7f800000u)" : "__uint_as_float(0xff800000u)";
  char buffer[64];
  const std::string digits(buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr);
  const bool is_whole = digits.find_first_of(".e") == std::string::npos;
  return concat(value < 0 ? "(" : "", digits, is_whole ? ".0f" : "f", value < 0 ? ")" : "");
}

std::string integer_literal(int64_t value) {
  if (value == std::numeric_limits<int64_t>::min()) return "(-9223372036854775807ll - 1)";
  if (value == std::numeric_limits<int32_t>::min()) return "(-2147483647 - 1)";
  const bool is_long = value != static_cast<int32_t>(value);
  return concat(value < 0 ? "(" : "", value, is_long ? "ll" : "", value < 0 ? ")" : "");
}

// How an operation is written: an operator between its operands, or a word of tile/scalar.cuh.
std::string_view operator_of(Op op, Type operands) {
  const bool is_bool = operands == Type::kBool;
  switch (op) {
    case Op::kAdd:
      return "+";
    case Op::kSubtract:
      return "-";
    case Op::kMultiply:
      return "*";
    case Op::kAnd:
      return is_bool ? "&&" : "&";
    case Op::kOr:
      return is_bool ? "||" : "|";
    case Op::kXor:
      return is_bool ? "!=" : "^";
    case Op::kEqual:
      return "==";
    case Op::kNotEqual:
      return "!=";
    case Op::kLess:
      return "<";
    case Op::kLessEqual:
      return "<=";
    default:
      return "";
  }
}

std::string_view scalar_function_of(Op op) {
  switch (op) {
    case Op::kAbs:
      return "absolute";
    case Op::kDivide:
      return "divide";
    case Op::kFloorDivide:
      return "floor_divide";
    case Op::kModulo:
      return "modulo";
    case Op::kMinimum:
      return "minimum";
    case Op::kMaximum:
      return "maximum";
    default:
      return mnemonic_of(op);
  }
}

std::string element_text(DType dtype, int capture, const std::string& offset) {
  const std::string from = concat("(captures[", capture, "], ", offset, ")");
  switch (dtype) {
    case DType::kFloat32:
      return "scalar::element_at<float>" + from;
    case DType::kBFloat16:
      return "scalar::float_at<tile::BFloat16>" + from;
    case DType::kFloat16:
      return "scalar::float_at<tile::Float16>" + from;
    case DType::kInt32:
      return "scalar::element_at<int32_t>" + from;
    case DType::kInt64:
      return "scalar::element_at<int64_t>" + from;
    case DType::kBool:
      return "scalar::element_at<bool>" + from;
    default:
      fail(ErrorCode::kInvalidArgument, "expression: captured tensor ", capture, " is ", dtype,
           "; on a GPU captured tensors are fp32, bf16, fp16, int32, int64 or bool");
  }
}

class BodyPrinter {
 public:
  explicit BodyPrinter(const Program& program) : program_(program), ranges_(ranges_of(program)) {
    for (NodeId id = 0; id < static_cast<NodeId>(program.nodes.size()); ++id) add(id);
  }
  const std::string& statements() const { return statements_; }
  const std::string& name(NodeId id) const { return names_[id]; }
  const std::string& result(int place) const { return names_[program_.results[place]]; }

 private:
  std::string_view type_name(NodeId id) const {
    switch (program_.nodes[id].type) {
      case Type::kBool:
        return "bool";
      case Type::kInt:
        return ranges_[id].fits_32_bits() ? "int32_t" : "int64_t";
      default:
        return "float";
    }
  }

  void add(NodeId id) {
    const Node& node = program_.nodes[id];
    if (node.op <= Op::kKey) {
      names_.emplace_back(mnemonic_of(node.op));
    } else if (node.op == Op::kConstant) {
      names_.push_back(node.type == Type::kFloat ? float_literal(node.constant.real)
                       : node.type == Type::kInt ? integer_literal(node.constant.integer)
                                                 : std::string(node.constant.boolean ? "true" : "false"));
    } else {
      statements_ += concat("  const ", type_name(id), " v", id, " = ", value_text(node, id), ";\n");
      names_.push_back(concat("v", id));
    }
  }

  std::string value_text(const Node& node, NodeId id) const {
    switch (node.op) {
      case Op::kLoad:
        return load_text(node);
      case Op::kSelect:
        return concat(names_[node.arguments[0]], " ? ", names_[node.arguments[1]], " : ", names_[node.arguments[2]]);
      case Op::kToFloat:
        return concat("static_cast<float>(", names_[node.arguments[0]], ")");
      case Op::kToBool:
        return concat(names_[node.arguments[0]], " != 0");
      case Op::kToInt:
        if (program_.nodes[node.arguments[0]].type == Type::kBool) return names_[node.arguments[0]];
        return concat("scalar::to_int(", names_[node.arguments[0]], ")");
      default:
        return arithmetic_text(node, id);
    }
  }

  std::string load_text(const Node& node) const {
    std::string offset = concat("scalar::offset_of(captures[", static_cast<int>(node.capture), "]");
    for (NodeId index : node.inputs()) offset += ", " + names_[index];
    return element_text(program_.captures[node.capture].dtype, node.capture, offset + ")");
  }

  // Integers are computed in the widest type that the result or an operand needs.
  std::string arithmetic_text(const Node& node, NodeId id) const {
    const Type operands = program_.nodes[node.arguments[0]].type;
    bool is_long = false;
    if (operands == Type::kInt) {
      is_long = (node.type == Type::kInt && !ranges_[id].fits_32_bits()) || node.op == Op::kShiftLeft ||
                node.op == Op::kShiftRight;
      for (NodeId input : node.inputs()) is_long |= !ranges_[input].fits_32_bits();
    }
    const auto operand = [&](int i) {
      return is_long ? concat("static_cast<int64_t>(", names_[node.arguments[i]], ")") : names_[node.arguments[i]];
    };
    const std::string text = operation_text(node, operands, operand(0), node.argument_count > 1 ? operand(1) : "");
    const bool narrows = is_long && node.type == Type::kInt && ranges_[id].fits_32_bits();
    return narrows ? concat("static_cast<int32_t>(", text, ")") : text;
  }

  std::string operation_text(const Node& node, Type operands, const std::string& a, const std::string& b) const {
    if (node.op == Op::kNegate) return "-" + a;
    if (node.op == Op::kNot) return (operands == Type::kBool ? "!" : "~") + a;
    if (const std::string_view word = operator_of(node.op, operands); !word.empty())
      return concat(a, " ", word, " ", b);
    const bool divides = node.op == Op::kFloorDivide || node.op == Op::kModulo;
    if (divides && operands == Type::kInt && ranges_[node.arguments[0]].low >= 0 &&
        ranges_[node.arguments[1]].low > 0) {
      return concat(a, node.op == Op::kModulo ? " % " : " / ", b);
    }
    return concat("scalar::", scalar_function_of(node.op), "(", a, b.empty() ? "" : ", ", b, ")");
  }

  const Program& program_;
  std::vector<Range> ranges_;
  std::vector<std::string> names_;
  std::string statements_;
};

std::string function_text(std::string_view name, const Program& program, Type type) {
  KP_CHECK(program.results.size() == 1 && program.result_type() == type, "expression: ", name, " gives ",
           program.results.size(), " results, a ", name_of(program.result_type()), " first; it must give one ",
           name_of(type));
  const BodyPrinter body(program);
  return concat("__device__ __forceinline__ ", name_of(type), " ", name, "(", kParameters, ") {\n", body.statements(),
                "  return ", body.result(0), ";\n}\n");
}

std::string gradient_text(const Gradient& gradient) {
  const BodyPrinter body(gradient.program);
  std::string sites, calls;
  for (size_t i = 0; i < gradient.loads.size(); ++i) {
    const LoadGradient& load = gradient.loads[i];
    const auto flag = [&](Varies varies) { return (load.index_varies & varies) != 0 ? "true" : "false"; };
    sites += concat("struct Load", i, " {\n  static constexpr int kNumber = ", i, ", kCapture = ", load.capture,
                    ";\n  static constexpr bool kVariesByQuery = ", flag(kVariesByQuery),
                    ", kVariesByKey = ", flag(kVariesByKey), ";\n};\n");
    calls += concat("  add(Load", i, "{}, scalar::gradient_offset_of(captures[", load.capture, "]");
    const int rank = gradient.program.captures[load.capture].rank;
    for (int dimension = 0; dimension < rank; ++dimension) calls += ", " + body.result(load.indices + dimension);
    calls += concat("), grad * ", body.result(load.derivative), ");\n");
  }
  return concat(sites, "inline constexpr int kLoadCount = ", gradient.loads.size(),
                ";\ntemplate <class Add>\n__device__ __forceinline__ float score_mod_gradient(", kParameters,
                ", float grad, Add&& add) {\n", body.statements(), calls, "  return grad * ", body.result(0), ";\n}\n");
}

}  // namespace

std::string cuda_text(const CudaFunctions& functions) {
  const Program* gradient = functions.score_mod_gradient ? &functions.score_mod_gradient->program : nullptr;
  const Program* first = nullptr;
  for (const Program* program : {functions.score_mod, functions.mask_mod, gradient}) {
    if (program == nullptr) continue;
    if (first == nullptr) first = program;
    KP_CHECK(program->captures == first->captures,
             "expression: score_mod and mask_mod were traced with different captured tensors; trace them together");
  }
  std::string text =
      "#pragma once\n#include \"kernel_pytorch/cuda/tile/scalar.cuh\"\n"
      "namespace kernel_pytorch::generated {\nnamespace scalar = tile::scalar;\n";
  if (functions.score_mod) text += function_text("score_mod", *functions.score_mod, Type::kFloat);
  if (functions.mask_mod) text += function_text("mask_mod", *functions.mask_mod, Type::kBool);
  if (gradient) text += gradient_text(*functions.score_mod_gradient);
  return text + "}  // namespace kernel_pytorch::generated\n";
}

}  // namespace kernel_pytorch::expression
