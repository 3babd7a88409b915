#include "kernel_pytorch/expression/range.h"

#include <algorithm>
#include <bit>

namespace kernel_pytorch::expression {
namespace {

using Wide = __int128;

// The whole range where the bounds may not fit: the operation then wraps around.
Range bounded(Wide low, Wide high) {
  const Range all;
  return low < all.low || high > all.high ? all : Range{static_cast<int64_t>(low), static_cast<int64_t>(high)};
}

Range hull(Range a, Range b) {
  return {std::min(a.low, b.low), std::max(a.high, b.high)};
}

Wide magnitude(Range a) {
  return std::max(-static_cast<Wide>(a.low), static_cast<Wide>(a.high));
}

Range product(Range a, Range b) {
  const Wide corners[] = {Wide{a.low} * b.low, Wide{a.low} * b.high, Wide{a.high} * b.low, Wide{a.high} * b.high};
  return bounded(*std::min_element(corners, corners + 4), *std::max_element(corners, corners + 4));
}

// Signed numbers of n bits give n bits under and, or, xor.
Range of_bits(Range a, Range b) {
  const Range both = hull(a, b);
  const uint64_t ones = static_cast<uint64_t>(both.low < 0 ? ~both.low : both.low) |
                        static_cast<uint64_t>(both.high < 0 ? ~both.high : both.high);
  const auto most = static_cast<int64_t>(std::bit_ceil(ones + 1) - 1);
  return {both.low < 0 ? -most - 1 : 0, most};
}

Range of_load(DType dtype) {
  if (dtype == DType::kInt32) return {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  return {};
}

Range of_operation(const Node& node, Range a, Range b, Range c, bool is_from_bool) {
  switch (node.op) {
    case Op::kToInt:
      return is_from_bool ? Range{0, 1} : Range{};
    case Op::kNegate:
      return bounded(-Wide{a.high}, -Wide{a.low});
    case Op::kAbs:
      return bounded(0, magnitude(a));
    case Op::kNot:
      return {~a.high, ~a.low};
    case Op::kAdd:
      return bounded(Wide{a.low} + b.low, Wide{a.high} + b.high);
    case Op::kSubtract:
      return bounded(Wide{a.low} - b.high, Wide{a.high} - b.low);
    case Op::kMultiply:
      return product(a, b);
    case Op::kFloorDivide:
      if (a.low >= 0 && b.low > 0) return {a.low / b.high, a.high / b.low};
      return bounded(-magnitude(a), magnitude(a));
    case Op::kModulo:
      if (b.low > 0) return {0, b.high - 1};
      return bounded(-magnitude(b), magnitude(b));
    case Op::kMinimum:
      return {std::min(a.low, b.low), std::min(a.high, b.high)};
    case Op::kMaximum:
      return {std::max(a.low, b.low), std::max(a.high, b.high)};
    case Op::kAnd:
      if (a.low >= 0 || b.low >= 0) return {0, a.low < 0 ? b.high : b.low < 0 ? a.high : std::min(a.high, b.high)};
      return of_bits(a, b);
    case Op::kOr:
    case Op::kXor:
      return of_bits(a, b);
    case Op::kShiftLeft:
      if (b.low < 0 || b.high > 62) return {};
      return product(a, {int64_t{1} << b.low, int64_t{1} << b.high});
    case Op::kShiftRight:
      return {std::min(a.low, int64_t{0}), std::max(a.high, int64_t{0})};
    case Op::kSelect:
      return hull(b, c);
    default:
      return {};
  }
}

}  // namespace

std::vector<Range> ranges_of(const Program& program) {
  std::vector<Range> ranges;
  for (const Node& node : program.nodes) {
    Range range;
    if (node.type == Type::kInt) {
      const auto of = [&](int i) { return i < node.argument_count ? ranges[node.arguments[i]] : Range{}; };
      if (node.op == Op::kConstant) {
        range = {node.constant.integer, node.constant.integer};
      } else if (node.op == Op::kLoad) {
        range = of_load(program.captures[node.capture].dtype);
      } else if (node.op == Op::kQuery || node.op == Op::kKey) {
        range = {0, kMaxPosition};
      } else if (node.op == Op::kBatch || node.op == Op::kHead) {
        range = {0, kMaxBatchOrHead};
      } else {
        range = of_operation(node, of(0), of(1), of(2), program.nodes[node.arguments[0]].type == Type::kBool);
      }
    }
    ranges.push_back(range);
  }
  return ranges;
}

}  // namespace kernel_pytorch::expression
