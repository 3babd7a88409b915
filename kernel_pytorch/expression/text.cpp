#include "kernel_pytorch/expression/text.h"

#include <charconv>
#include <optional>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/expression/builder.h"

namespace kernel_pytorch::expression {
namespace {

constexpr std::string_view kHeader = "expression 1";
constexpr size_t kMaxTextBytes = 1 << 20;

std::optional<Op> op_of(std::string_view token) {
  for (int i = 0; i < kOpCount; ++i) {
    const Op op = static_cast<Op>(i);
    if (mnemonic_of(op) == token && op != Op::kConstant) return op;
  }
  return std::nullopt;
}

std::vector<std::string_view> tokens_of(std::string_view line) {
  std::vector<std::string_view> tokens;
  while (!line.empty()) {
    const size_t end = std::min(line.find(' '), line.size());
    if (end > 0) tokens.push_back(line.substr(0, end));
    line.remove_prefix(std::min(end + 1, line.size()));
  }
  return tokens;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {
    KP_CHECK(text.size() <= kMaxTextBytes, "expression: a text of ", text.size(), " bytes; ", kMaxTextBytes,
             " are the most");
  }

  Program run() {
    std::vector<std::string_view> tokens = next_line();
    KP_CHECK(line_ == kHeader, place(), ": begins with \"", shown(line_), "\"; this library reads \"", kHeader, "\"");
    std::vector<Capture> captures;
    for (tokens = next_line(); !tokens.empty() && tokens[0] == "capture"; tokens = next_line()) {
      captures.push_back(read_capture(tokens));
    }
    Builder builder(std::move(captures));
    for (; tokens.empty() || tokens[0] != "return"; tokens = next_line()) {
      builder.set_place(place());
      values_.push_back(read_operation(builder, tokens));
    }
    KP_CHECK(tokens.size() >= 2, place(), ": `return` of nothing");
    std::vector<NodeId> results;
    for (size_t i = 1; i < tokens.size(); ++i) results.push_back(read_value(tokens[i]));
    KP_CHECK(at_ >= text_.size(), place(), ": something follows it; `return` is the last line");
    return builder.finish(std::move(results));
  }

 private:
  std::string place() const { return concat("expression, line ", line_number_); }
  static std::string_view shown(std::string_view text) { return text.substr(0, 40); }

  std::vector<std::string_view> next_line() {
    ++line_number_;
    KP_CHECK(at_ < text_.size(), place(), ": the text ends before its `return`");
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    line_ = text_.substr(at_, end - at_);
    at_ = end + 1;
    return tokens_of(line_);
  }

  template <class Number>
  Number read_number(std::string_view token, std::string_view what) const {
    Number number{};
    const auto [end, error] = std::from_chars(token.data(), token.data() + token.size(), number);
    KP_CHECK(error == std::errc() && end == token.data() + token.size(), place(), ": \"", shown(token), "\" is no ",
             what);
    return number;
  }

  NodeId read_value(std::string_view token) const {
    KP_CHECK(token.starts_with('%'), place(), ": \"", shown(token), "\" stands where a value like %3 should");
    const auto number = read_number<uint32_t>(token.substr(1), "value number");
    KP_CHECK(number < values_.size(), place(), ": %", number, " is not defined above");
    return values_[number];
  }

  Capture read_capture(std::span<const std::string_view> tokens) const {
    KP_CHECK(tokens.size() == 3, place(), ": a capture is its element type and its dimensions, \"capture bf16 2\"");
    const std::optional<DType> dtype = parse_dtype(tokens[1]);
    KP_CHECK(dtype.has_value(), place(), ": \"", shown(tokens[1]), "\" is no element type");
    const int rank = read_number<int>(tokens[2], "number of dimensions");
    KP_CHECK(rank >= 0 && rank <= kMaxRank, place(), ": ", rank, " dimensions; ", kMaxRank, " are the most");
    return {*dtype, static_cast<int8_t>(rank)};
  }

  NodeId read_operation(Builder& builder, std::span<const std::string_view> tokens) const {
    KP_CHECK(tokens.size() >= 3 && tokens[1] == "=" && tokens[0].starts_with('%') &&
                 read_number<uint32_t>(tokens[0].substr(1), "value number") == values_.size(),
             place(), ": \"", shown(line_), "\" stands where \"%", values_.size(), " = operation ...\" should");
    const std::string_view token = tokens[2];
    const std::span<const std::string_view> rest = tokens.subspan(3);
    if (token == "float" || token == "int" || token == "bool") {
      KP_CHECK(rest.size() == 1, place(), ": `", token, "` takes one number, not ", rest.size());
      if (token == "float") return builder.real(read_number<double>(rest[0], "float"));
      if (token == "int") return builder.integer(read_number<int64_t>(rest[0], "integer of 64 bits"));
      KP_CHECK(rest[0] == "true" || rest[0] == "false", place(), ": \"", shown(rest[0]),
               "\" is neither true nor false");
      return builder.boolean(rest[0] == "true");
    }
    const std::optional<Op> op = op_of(token);
    KP_CHECK(op.has_value(), place(), ": there is no operation \"", shown(token), "\"");
    const bool is_load = op == Op::kLoad;
    KP_CHECK(!is_load || !rest.empty(), place(), ": `load` takes the number of a captured tensor, then its indices");
    std::vector<NodeId> arguments;
    for (std::string_view argument : rest.subspan(is_load)) arguments.push_back(read_value(argument));
    if (is_load) return builder.load(read_number<int>(rest[0], "number of a captured tensor"), arguments);
    return builder.apply(*op, arguments);
  }

  std::string_view text_;
  std::string_view line_;
  size_t at_ = 0;
  int line_number_ = 0;
  std::vector<NodeId> values_;  // by the number that the text gives them
};

std::string constant_text(const Node& node) {
  char buffer[64];
  switch (node.type) {
    case Type::kBool:
      return node.constant.boolean ? "bool true" : "bool false";
    case Type::kInt:
      return concat("int ", node.constant.integer);
    default:
      return concat("float ",
                    std::string_view(buffer, std::to_chars(buffer, buffer + sizeof buffer, node.constant.real).ptr));
  }
}

}  // namespace

Program parse(std::string_view text) {
  return Parser(text).run();
}

std::string print(const Program& program) {
  std::string text = concat(kHeader, "\n");
  for (const Capture& capture : program.captures) {
    text += concat("capture ", capture.dtype, " ", static_cast<int>(capture.rank), "\n");
  }
  for (size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& node = program.nodes[i];
    text += concat("%", i, " = ");
    text += node.op == Op::kConstant ? constant_text(node) : std::string(mnemonic_of(node.op));
    if (node.op == Op::kLoad) text += concat(" ", static_cast<int>(node.capture));
    for (NodeId input : node.inputs()) text += concat(" %", input);
    text += "\n";
  }
  text += "return";
  for (NodeId result : program.results) text += concat(" %", result);
  return text + "\n";
}

std::string hash_of(const Program& program) {
  return Fnv128().add(print(program)).hex();
}

}  // namespace kernel_pytorch::expression
