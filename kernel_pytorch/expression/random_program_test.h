// Random programs and captured tensors for the tests of this folder: typed, so that every draw is legal.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/expression/builder.h"

namespace kernel_pytorch::expression::testing {

// A tensor of any strides, some of them 0, in memory of its own.
class RandomTensor {
 public:
  RandomTensor(std::mt19937& random, Capture capture) : bytes_(4096, 0) {
    view_.data = bytes_.data();
    view_.dtype = capture.dtype;
    view_.rank = capture.rank;
    int64_t stride = 1 + random() % 2;
    for (int i = capture.rank - 1; i >= 0; --i) {
      view_.sizes[i] = 1 + random() % 5;
      view_.strides[i] = random() % 5 == 0 ? 0 : stride;  // sometimes expanded
      stride *= view_.sizes[i];
    }
    const bool is_float = is_floating(capture.dtype);
    std::uniform_real_distribution<double> real(-2, 2);
    for (int64_t i = 0; i < static_cast<int64_t>(bytes_.size()) / size_of(capture.dtype); ++i) {
      const double number = capture.dtype == DType::kBool ? random() % 2 : static_cast<double>(random() % 9) - 4;
      store_element(bytes_.data(), capture.dtype, i, is_float ? real(random) : number);
    }
  }
  const TensorView& view() const { return view_; }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

 private:
  std::vector<unsigned char> bytes_;
  TensorView view_;
};

inline const std::vector<Capture> kTestCaptures = {{DType::kFloat32, 2}, {DType::kBFloat16, 1}, {DType::kFloat16, 3},
                                                   {DType::kInt32, 1},   {DType::kInt64, 2},    {DType::kBool, 1},
                                                   {DType::kFloat32, 0}, {DType::kInt64, 0}};

class ProgramDrawer {
 public:
  // `smooth`: floats by functions with a derivative that finite differences can see.
  ProgramDrawer(std::mt19937& random, bool smooth) : random_(random), smooth_(smooth), builder_(kTestCaptures) {
    for (Op op : {Op::kScore, Op::kBatch, Op::kHead, Op::kQuery, Op::kKey}) keep(builder_.input(op));
    keep(builder_.boolean(true));
    keep(builder_.integer(static_cast<int64_t>(random_() % 7) - 3));
    keep(builder_.real(std::uniform_real_distribution<double>(-2, 2)(random_)));
  }

  Program draw(int operations, Type result) {
    for (int i = 0; i < operations; ++i) keep(draw_operation());
    return builder_.finish({latest(result)});
  }
  Builder& builder() { return builder_; }

 private:
  void keep(NodeId id) { nodes_[static_cast<int>(builder_.type(id))].push_back(id); }
  const std::vector<NodeId>& of(Type type) const { return nodes_[static_cast<int>(type)]; }
  NodeId pick(Type type) { return of(type)[random_() % of(type).size()]; }
  NodeId latest(Type type) const { return of(type).back(); }
  NodeId recent_float() {
    const std::vector<NodeId>& floats = of(Type::kFloat);
    return floats[floats.size() - 1 - random_() % std::min<size_t>(floats.size(), 4)];
  }

  NodeId draw_operation() {
    switch (random_() % 8) {
      case 0:
        return draw_boolean();
      case 1:
        return draw_integer();
      case 2:
        return draw_load();
      case 3:
        return builder_.apply(Op::kToFloat, {pick(random_() % 4 == 0 ? Type::kBool : Type::kInt)});
      case 4:
        return builder_.apply(Op::kSelect, {pick(Type::kBool), recent_float(), pick(Type::kFloat)});
      default:
        return draw_float();
    }
  }
  NodeId draw_load() {
    const int capture = static_cast<int>(random_() % kTestCaptures.size());
    std::vector<NodeId> indices;
    for (int i = 0; i < kTestCaptures[capture].rank; ++i) indices.push_back(pick(Type::kInt));
    return builder_.load(capture, indices);
  }
  NodeId draw_boolean() {
    constexpr Op kBoolean[] = {Op::kAnd, Op::kOr, Op::kXor};
    constexpr Op kComparison[] = {Op::kEqual, Op::kNotEqual, Op::kLess, Op::kLessEqual};
    if (random_() % 3 == 0) return builder_.apply(kBoolean[random_() % 3], {pick(Type::kBool), pick(Type::kBool)});
    if (random_() % 5 == 0) return builder_.apply(Op::kNot, {pick(Type::kBool)});
    if (random_() % 5 == 0) return builder_.apply(Op::kToBool, {pick(Type::kInt)});
    const Type type = smooth_ || random_() % 2 ? Type::kInt : Type::kFloat;
    return builder_.apply(kComparison[random_() % 4], {pick(type), pick(type)});
  }
  NodeId draw_integer() {
    constexpr Op kOps[] = {Op::kAdd,    Op::kSubtract, Op::kMultiply,  Op::kFloorDivide,
                           Op::kModulo, Op::kMinimum,  Op::kMaximum,   Op::kAnd,
                           Op::kOr,     Op::kXor,      Op::kShiftLeft, Op::kShiftRight};
    switch (random_() % 6) {
      case 0:
        return builder_.apply(random_() % 2 ? Op::kNot : Op::kAbs, {pick(Type::kInt)});
      case 1:
        return builder_.apply(Op::kSelect, {pick(Type::kBool), pick(Type::kInt), pick(Type::kInt)});
      case 2:
        return builder_.apply(Op::kToInt, {pick(smooth_ ? Type::kBool : Type::kFloat)});
      default:
        return builder_.apply(kOps[random_() % std::size(kOps)], {pick(Type::kInt), pick(Type::kInt)});
    }
  }
  // Bounded arguments where the function has a pole or grows fast.
  NodeId positive(NodeId x) {
    return builder_.apply(Op::kAdd, {builder_.apply(Op::kMultiply, {x, x}), builder_.real(0.5)});
  }
  NodeId draw_float() {
    const NodeId a = recent_float(), b = pick(Type::kFloat);
    const NodeId bounded = builder_.apply(Op::kTanh, {a});
    switch (random_() % 12) {
      case 0:
        return builder_.apply(Op::kAdd, {a, b});
      case 1:
        return builder_.apply(Op::kSubtract, {b, a});
      case 2:
        return builder_.apply(Op::kMultiply, {bounded, b});
      case 3:
        return builder_.apply(Op::kDivide, {b, positive(bounded)});
      case 4: {
        constexpr Op kOfBounded[] = {Op::kExp, Op::kExp2, Op::kSin, Op::kCos, Op::kErf, Op::kSigmoid, Op::kNegate};
        return builder_.apply(kOfBounded[random_() % std::size(kOfBounded)], {bounded});
      }
      case 5: {
        constexpr Op kOfPositive[] = {Op::kLog, Op::kLog2, Op::kSqrt, Op::kRsqrt};
        return builder_.apply(kOfPositive[random_() % std::size(kOfPositive)], {positive(bounded)});
      }
      case 6:
        return builder_.apply(Op::kPower, {positive(bounded), bounded});
      case 7:
        return builder_.apply(Op::kPower, {bounded, builder_.integer(static_cast<int64_t>(random_() % 6))});
      case 8:
        return smooth_ ? bounded : builder_.apply(random_() % 2 ? Op::kMinimum : Op::kMaximum, {a, b});
      case 9:
        return smooth_ ? builder_.apply(Op::kSigmoid, {a}) : builder_.apply(Op::kAbs, {a});
      case 10:
        return smooth_ ? builder_.apply(Op::kNegate, {a})
                       : builder_.apply(random_() % 2 ? Op::kModulo : Op::kFloorDivide, {b, positive(bounded)});
      default:
        return smooth_ ? bounded : builder_.apply(Op::kFloor, {a});
    }
  }

  std::mt19937& random_;
  bool smooth_;
  Builder builder_;
  std::vector<NodeId> nodes_[3];
};

}  // namespace kernel_pytorch::expression::testing
