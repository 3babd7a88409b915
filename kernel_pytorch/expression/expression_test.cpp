// The one form of a program, its text, and its gradient.
#include <gtest/gtest.h>

#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/compose.h"
#include "kernel_pytorch/expression/gradient.h"
#include "kernel_pytorch/expression/interpret.h"
#include "kernel_pytorch/expression/mods.h"
#include "kernel_pytorch/expression/random_program_test.h"
#include "kernel_pytorch/expression/range.h"
#include "kernel_pytorch/expression/text.h"

namespace kernel_pytorch::expression {
namespace {

using testing::kTestCaptures;
using testing::ProgramDrawer;
using testing::RandomTensor;

std::string refusal(std::string_view text) {
  try {
    parse(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "no error";
}

std::string reprinted(const std::string& lines) {
  return print(parse("expression 1\n" + lines));
}

TEST(ExpressionText, OneFormHoweverItWasWritten) {
  const std::string causal = "expression 1\n%0 = query\n%1 = key\n%2 = le %1 %0\nreturn %2\n";
  EXPECT_EQ(print(parse(causal)), causal);
  EXPECT_EQ(reprinted("%0 = query\n%1 = key\n%2 = lt %0 %1\n%3 = not %2\n%4 = not %3\n%5 = le %1 %0\nreturn %5"),
            causal);
  EXPECT_EQ(reprinted("%0 = score\n%1 = int 1\n%2 = mul %1 %0\n%3 = float 0\n%4 = add %3 %2\nreturn %4\n"),
            "expression 1\n%0 = score\nreturn %0\n");
  EXPECT_EQ(reprinted("%0 = int 7\n%1 = int -2\n%2 = floor_div %0 %1\n%3 = mod %0 %1\n%4 = add %2 %3\nreturn %4\n"),
            "expression 1\n%0 = int -5\nreturn %0\n");
  EXPECT_EQ(reprinted("%0 = score\n%1 = int 2\n%2 = pow %0 %1\nreturn %2\n"),
            "expression 1\n%0 = score\n%1 = mul %0 %0\nreturn %1\n");
  EXPECT_EQ(reprinted("%0 = key\n%1 = score\n%2 = add %1 %0\nreturn %2\n"),
            "expression 1\n%0 = key\n%1 = score\n%2 = to_float %0\n%3 = add %1 %2\nreturn %3\n");
}

TEST(ExpressionText, ConstantsKeepTheirBits) {
  for (const char* number : {"0.1", "-0", "1e-300", "inf", "-inf", "nan", "3.4028234663852886e+38"}) {
    const std::string text = std::string("expression 1\n%0 = float ") + number + "\nreturn %0\n";
    EXPECT_EQ(print(parse(text)), text);
    EXPECT_EQ(parse(text), parse(text)) << "also NaN equals itself";
  }
}

TEST(ExpressionText, ErrorsNameTheLineAndTheCure) {
  EXPECT_NE(refusal("").find("line 1"), std::string::npos);
  EXPECT_NE(refusal("expression 2\nreturn %0\n").find("reads \"expression 1\""), std::string::npos);
  const std::pair<const char*, const char*> cases[] = {
      {"%0 = score\n", "line 3: the text ends"},
      {"%0 = score\nreturn %1\n", "line 3: %1 is not defined"},
      {"%1 = score\nreturn %1\n", "line 2: \"%1 = score\" stands where \"%0 ="},
      {"%0 = scores\nreturn %0\n", "line 2: there is no operation \"scores\""},
      {"%0 = constant\nreturn %0\n", "no operation \"constant\""},
      {"%0 = score\n%1 = add %0\nreturn %1\n", "line 3: `add` takes 2 arguments, not 1"},
      {"%0 = score\n%1 = where %0 %0 %0\nreturn %1\n", "line 3: the condition of `where` is a float"},
      {"%0 = score\n%1 = and %0 %0\nreturn %1\n", "line 3: `and` of a float"},
      {"%0 = int 99999999999999999999\nreturn %0\n", "line 2: \"99999999999999999999\" is no integer"},
      {"%0 = bool yes\nreturn %0\n", "neither true nor false"},
      {"capture fp32 1\n%0 = score\n%1 = load 0 %0\nreturn %1\n", "line 4: index 0 of captured tensor 0 is a float"},
      {"capture fp32 1\n%0 = key\n%1 = load 0 %0 %0\nreturn %1\n", "has 1 dimensions and is read with 2 indices"},
      {"%0 = load 0\nreturn %0\n", "captured tensor 0 is read and there are 0"},
      {"capture e4m3 1\n%0 = score\nreturn %0\n", "captured tensors are fp32"},
      {"capture fp32 9\n%0 = score\nreturn %0\n", "9 dimensions"},
      {"%0 = score\nreturn %0\n%1 = score\n", "`return` is the last line"},
      {"%0 = score\nreturn\n", "`return` of nothing"},
  };
  for (const auto& [lines, mentions] : cases) {
    const std::string message = refusal(std::string("expression 1\n") + lines);
    EXPECT_NE(message.find(mentions), std::string::npos) << lines << message;
  }
  std::string large = "expression 1\n%0 = key\n";
  for (int i = 1; i < kMaxNodes + 9; ++i) large += concat("%", i, " = int ", i, "\n");
  EXPECT_NE(refusal(large + "return %0\n").find("more than"), std::string::npos);
}

TEST(ExpressionText, RandomProgramsAreReadBackAsTheyWere) {
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) {
    const Program program = ProgramDrawer(random, false).draw(1 + i % 40, static_cast<Type>(i % 3));
    const Program again = parse(print(program));
    ASSERT_EQ(again, program) << print(program) << "\n" << print(again);
    ASSERT_EQ(hash_of(again), hash_of(program));
    if (program.result_type() != Type::kFloat) continue;
    const Program gradient = differentiate(program).program;
    ASSERT_EQ(parse(print(gradient)), gradient) << print(gradient);
  }
  EXPECT_NE(hash_of(parse("expression 1\n%0 = score\nreturn %0\n")),
            hash_of(parse("expression 1\n%0 = key\nreturn %0\n")));
}

TEST(ExpressionScalar, IntegersAreThoseOfPython) {
  const int64_t least = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(floor_divide(7, -2), -4);
  EXPECT_EQ(floor_divide(-7, 2), -4);
  EXPECT_EQ(floor_divide(-8, 2), -4);
  EXPECT_EQ(floor_divide(least, -1), least);
  EXPECT_EQ(floor_divide(5, 0), 0);
  EXPECT_EQ(modulo(7, -2), -1);
  EXPECT_EQ(modulo(-7, 2), 1);
  EXPECT_EQ(modulo(least, -1), 0);
  EXPECT_EQ(shift_left(1, 64), 0);
  EXPECT_EQ(shift_right(-5, 200), -1);
  EXPECT_EQ(to_int(1e30), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(to_int(std::nanf("")), 0);
  EXPECT_EQ(to_int(-2.9f), -2);
  EXPECT_EQ(place_of(-1, 4), 3);
  EXPECT_EQ(place_of(-9, 4), 0);
  EXPECT_EQ(place_of(4, 4), 3);
  EXPECT_TRUE(std::isnan(maximum(1.0f, std::nanf(""))));
  EXPECT_TRUE(std::isnan(minimum(std::nanf(""), 1.0f)));
}

TEST(ExpressionRange, HoldsWhateverTheValuesAre) {
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const Program drawn = ProgramDrawer(random, false).draw(30, Type::kInt);
    Program program = drawn;  // every integer is a result
    program.results.clear();
    for (NodeId id = 0; id < static_cast<NodeId>(program.nodes.size()); ++id) program.results.push_back(id);
    const std::vector<Range> ranges = ranges_of(program);
    std::vector<RandomTensor> tensors;
    for (const Capture& capture : kTestCaptures) tensors.emplace_back(random, capture);
    std::vector<TensorView> captured;
    for (const RandomTensor& tensor : tensors) captured.push_back(tensor.view());
    for (int64_t position : {int64_t{0}, int64_t{1}, int64_t{77}, kMaxPosition}) {
      const auto values =
          interpret<double>(program, {0.5, 3, kMaxBatchOrHead, position, kMaxPosition - position}, captured);
      for (size_t id = 0; id < values.size(); ++id) {
        if (program.nodes[id].type != Type::kInt) continue;
        ASSERT_GE(values[id].integer, ranges[id].low) << print(drawn) << id;
        ASSERT_LE(values[id].integer, ranges[id].high) << print(drawn) << id;
      }
    }
  }
}

double value_at(const Program& program, const Inputs<double>& inputs, std::span<const TensorView> captured) {
  return interpret<double>(program, inputs, captured)[0].real;
}

TEST(ExpressionGradient, AgreesWithFiniteDifferences) {
  std::mt19937 random(23);
  int compared = 0;
  for (int i = 0; i < 900; ++i) {
    const Program program = ProgramDrawer(random, true).draw(25, Type::kFloat);
    const Gradient gradient = differentiate(program);
    // A copy of the fp32 captures in double, so that a small step can be seen.
    std::vector<std::vector<double>> memory(kTestCaptures.size(), std::vector<double>(600));
    std::vector<RandomTensor> tensors;
    for (const Capture& capture : kTestCaptures) tensors.emplace_back(random, capture);
    Program in_double = program, gradient_in_double = gradient.program;
    std::vector<TensorView> captured;
    for (size_t c = 0; c < kTestCaptures.size(); ++c) {
      captured.push_back(tensors[c].view());
      if (!is_floating(kTestCaptures[c].dtype)) continue;
      for (size_t e = 0; e < memory[c].size(); ++e) memory[c][e] = std::sin(static_cast<double>(e + c));
      captured[c].data = memory[c].data();
      captured[c].dtype = in_double.captures[c].dtype = gradient_in_double.captures[c].dtype = DType::kFloat64;
    }
    const Inputs<double> at{0.3, 1, 2, static_cast<int64_t>(random() % 6), static_cast<int64_t>(random() % 6)};
    const auto values = interpret<double>(gradient_in_double, at, captured);
    const double step = 1e-6;
    const auto shifted = [&](double by) {
      return value_at(in_double, {at.score + by, 1, 2, at.query, at.key}, captured);
    };
    const double expected = (shifted(step) - shifted(-step)) / (2 * step);
    EXPECT_NEAR(values[0].real, expected, 1e-6 * (1 + std::abs(expected))) << print(program);
    compared += expected != 0;
    // Sum of the derivatives by each element: loads of one element at two places both count.
    std::vector<std::vector<double>> sums(kTestCaptures.size(), std::vector<double>(600, 0));
    for (const LoadGradient& load : gradient.loads) {
      int64_t offset = 0;
      for (int d = 0; d < captured[load.capture].rank; ++d) {
        offset += place_of(values[load.indices + d].integer, captured[load.capture].sizes[d]) *
                  captured[load.capture].strides[d];
      }
      sums[load.capture][offset] += values[load.derivative].real;
    }
    for (const LoadGradient& load : gradient.loads) {
      for (size_t e = 0; e < 600; ++e) {
        if (sums[load.capture][e] == 0) continue;
        double& element = memory[load.capture][e];
        const double saved = element;
        element = saved + step;
        const double above = value_at(in_double, at, captured);
        element = saved - step;
        const double below = value_at(in_double, at, captured);
        element = saved;
        EXPECT_NEAR(sums[load.capture][e], (above - below) / (2 * step), 1e-6 * (1 + std::abs(sums[load.capture][e])))
            << print(program);
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 300);
}

double slope(const std::string& lines, double score) {
  const Gradient gradient = differentiate(parse("expression 1\n%0 = score\n" + lines));
  return interpret<double>(gradient.program, {.score = score})[0].real;
}

TEST(ExpressionGradient, KnowsWhatOnlyAddsToTheScore) {
  const auto adds = [](const std::string& lines) {
    return adds_to_score(differentiate(parse("expression 1\n%0 = score\n%1 = query\n%2 = to_float %1\n" + lines)));
  };
  EXPECT_TRUE(adds("return %0\n"));
  EXPECT_TRUE(adds("%3 = cos %2\n%4 = add %0 %3\nreturn %4\n"));
  EXPECT_TRUE(adds("%3 = sub %0 %2\nreturn %3\n"));
  EXPECT_FALSE(adds("%3 = mul %0 %2\nreturn %3\n"));
  EXPECT_FALSE(adds("%3 = tanh %0\nreturn %3\n"));
  EXPECT_FALSE(adds("return %2\n"));
}

TEST(ExpressionGradient, CornersAreThoseOfTorch) {
  EXPECT_EQ(slope("%1 = abs %0\nreturn %1\n", 0), 0);
  EXPECT_EQ(slope("%1 = abs %0\nreturn %1\n", -2), -1);
  EXPECT_EQ(slope("%1 = float 1\n%2 = max %0 %1\nreturn %2\n", 1), 0.5);
  EXPECT_EQ(slope("%1 = float 1\n%2 = max %0 %1\nreturn %2\n", 2), 1);
  EXPECT_EQ(slope("%1 = float 1\n%2 = min %0 %1\nreturn %2\n", 2), 0);
  EXPECT_EQ(slope("%1 = float -inf\n%2 = bool false\n%3 = where %2 %0 %1\nreturn %3\n", 2), 0);
  EXPECT_EQ(slope("%1 = float 3\n%2 = mod %0 %1\nreturn %2\n", -1), 1);
  EXPECT_EQ(slope("%1 = floor %0\nreturn %1\n", 2.5), 0);
  EXPECT_EQ(slope("%1 = key\n%2 = to_float %1\nreturn %2\n", 2), 0);
}

TEST(ExpressionCompose, AMaskHidesWhatTheScoreFunctionGives) {
  const Program doubled = parse("expression 1\n%0 = score\n%1 = add %0 %0\nreturn %1\n");
  const Program causal = parse("expression 1\n%0 = query\n%1 = key\n%2 = le %1 %0\nreturn %2\n");
  const Program both = masked(doubled, causal);
  EXPECT_EQ(value_at(both, {.score = 3, .query = 5, .key = 5}, {}), 6);
  EXPECT_EQ(value_at(both, {.score = 3, .query = 5, .key = 6}, {}), -INFINITY);
  EXPECT_EQ(masked(unchanged_score(), parse("expression 1\n%0 = bool true\nreturn %0\n")), unchanged_score());
  EXPECT_THROW(masked(causal, causal), Error);
  EXPECT_THROW(masked(unchanged_score({{DType::kFloat32, 1}}), causal), Error);
}

TEST(ExpressionMods, AreMadeOnceForTheirTexts) {
  const std::string doubled = "expression 1\n%0 = score\n%1 = add %0 %0\nreturn %1\n";
  const std::string causal = "expression 1\n%0 = query\n%1 = key\n%2 = le %1 %0\nreturn %2\n";
  const Mods& both = mods_of(doubled, causal, "attention");
  EXPECT_EQ(&both, &mods_of(doubled, causal, "attention"));
  EXPECT_NE(&both, &mods_of(doubled, "", "attention"));
  EXPECT_EQ(both.masked_score, masked(parse(doubled), parse(causal)));
  EXPECT_NE(both.cuda_backward.find("score_mod_gradient"), std::string::npos);
  EXPECT_EQ(both.cuda_forward.find("score_mod_gradient"), std::string::npos);
  EXPECT_EQ(value_at(*mods_of("", causal, "attention").masked_score, {.score = 3, .query = 0, .key = 1}, {}),
            -INFINITY);
  EXPECT_FALSE(mods_of("", "", "attention").masked_score.has_value());
  EXPECT_EQ(mods_of("expression 1\ncapture fp64 0\n%0 = load 0\nreturn %0\n", "", "attention").cuda_forward, "");
  const auto refused = [](const std::string& score_mod, const std::string& mask_mod) {
    try {
      mods_of(score_mod, mask_mod, "attention");
    } catch (const Error& error) {
      return error.message();
    }
    return std::string("no error");
  };
  EXPECT_EQ(refused(causal, ""), "attention: score_mod gives a bool; it must give one float");
  EXPECT_EQ(refused("", doubled), "attention: mask_mod gives a float; it must give one bool");
}

}  // namespace
}  // namespace kernel_pytorch::expression
