// AdamW with plain states, what the shape list cannot say: statistics of stochastic rounding, independence of threads,
// addresses and splits of the list, edges and bad arguments.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/optimizer_step/parameter_list_test.h"

namespace kernel_pytorch::optimizer_step {
namespace {

// A list of parameters with its memory; gradients and parameters normal, averages zero.
struct PlainList : ParameterList {
  PlainList(DType dtype, DType state, const std::vector<int64_t>& sizes, bool amsgrad = false, bool master = false,
            int misaligned_elements = 0)
      : ParameterList(sizes.size(), misaligned_elements) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      step.parameters.push_back({.parameter = tensor(dtype, sizes[i], true),
                                 .gradient = tensor(dtype, sizes[i], true),
                                 .master = master ? tensor(DType::kFloat32, sizes[i], true) : TensorView(),
                                 .first = tensor(state, sizes[i], false),
                                 .second = tensor(state, sizes[i], false),
                                 .maximum = amsgrad ? tensor(state, sizes[i], false) : TensorView(),
                                 .step = contiguous_view(&steps[i], DType::kFloat32, {})});
    }
  }
};

TEST(PlainStates, FirstStepMovesEveryElementByTheRate) {
  OwnContext context;
  PlainList list(DType::kFloat32, DType::kFloat32, {1, 70, 0, 33000});
  list.step.lr = 0.125;
  list.step.eps = 0;
  list.step.weight_decay = 0;
  const std::vector<double> before = list.values(&Parameter::parameter);
  const std::vector<double> gradients = list.values(&Parameter::gradient);
  list.run(context);
  const std::vector<double> after = list.values(&Parameter::parameter);
  for (size_t i = 0; i < before.size(); ++i) {  // m / sqrt(v) is the gradient's sign
    ASSERT_NEAR(after[i], before[i] - std::copysign(0.125, gradients[i]), 1e-5) << i;
  }
  EXPECT_EQ(list.steps, std::vector<float>({1, 1, 1, 1}));
}

TEST(PlainStates, ThreadsAndAddressesDoNotShow) {
  for (auto [dtype, state] : {std::pair{DType::kFloat32, DType::kFloat32},
                              {DType::kBFloat16, DType::kFloat32},
                              {DType::kBFloat16, DType::kBFloat16}}) {
    const int64_t seeds[] = {12345, 77};
    std::vector<std::vector<double>> results;
    for (bool is_threaded : {true, false}) {
      for (int misaligned : {0, 1}) {
        OwnContext context;
        if (!is_threaded) context->threads = nullptr;
        PlainList list(dtype, state, {50001, 7, 20000}, true, false, misaligned);
        if (dtype == DType::kBFloat16) {
          list.step.seed = contiguous_view(const_cast<int64_t*>(seeds), DType::kInt64, {2});
        }
        for (int i = 0; i < 3; ++i) list.run(context);
        results.push_back(list.values(&Parameter::parameter));
        EXPECT_EQ(results.back(), results.front());
      }
    }
  }
}

TEST(PlainStates, FoundInfChangesNothing) {
  OwnContext context;
  PlainList list(DType::kFloat32, DType::kFloat32, {100}, true);
  float found = 1;
  list.step.found_inf = contiguous_view(&found, DType::kFloat32, {});
  const auto memory = list.memory;
  list.run(context);
  EXPECT_EQ(list.memory, memory);
  EXPECT_EQ(list.steps[0], 0);
  found = 0;
  list.run(context);
  EXPECT_NE(list.memory, memory);
  EXPECT_EQ(list.steps[0], 1);
}

TEST(PlainStates, MasterCarriesWhatTheParameterCannot) {
  OwnContext context;
  PlainList list(DType::kBFloat16, DType::kFloat32, {64}, false, true);
  list.step.lr = 1e-5;  // far below half a unit of most parameters
  list.step.weight_decay = 0;
  const std::vector<double> before = list.values(&Parameter::master);
  const std::vector<double> gradients = list.values(&Parameter::gradient);
  for (int i = 0; i < 10; ++i) list.run(context);
  const std::vector<double> after = list.values(&Parameter::master);
  const std::vector<double> rounded = list.values(&Parameter::parameter);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_NEAR(after[i] - before[i], -std::copysign(1e-4, gradients[i]), 2e-6);
    EXPECT_EQ(rounded[i], to_float(from_float<BFloat16>(static_cast<float>(after[i]))));
  }
}

// A parameter of 1 whose every step is a 64th of the distance to its neighbour below: rounding to nearest never moves
// it, stochastic rounding moves one in 64 elements, and all of them by the right amount on average.
struct StochasticSteps {
  static constexpr int64_t kElements = 1 << 18;
  static constexpr double kUnit = 0x1p-8;  // between 1 and the bf16 below it
  PlainList list{DType::kBFloat16, DType::kFloat32, {kElements}};
  int64_t seeds[2] = {2026, 0};
  OwnContext context;

  StochasticSteps() {
    Parameter& one = list.step.parameters[0];
    for (int64_t i = 0; i < kElements; ++i) {
      store_element(one.parameter.data, DType::kBFloat16, i, 1.0);
      store_element(one.gradient.data, DType::kBFloat16, i, 1.0);
    }
    list.step.lr = kUnit / 64;
    list.step.weight_decay = 0;
    list.step.eps = 0;
    list.step.seed = contiguous_view(seeds, DType::kInt64, {2});
  }
  std::vector<double> run(int64_t offset) {
    seeds[1] = offset;
    list.run(context);
    return list.values(&Parameter::parameter);
  }
};

TEST(PlainStates, StochasticRoundingHasTheRightMeanAndVariance) {
  StochasticSteps steps;
  const std::vector<double> after = steps.run(0);
  int64_t moved = 0;
  for (double value : after) {
    ASSERT_TRUE(value == 1.0 || value == 1.0 - StochasticSteps::kUnit) << value;
    moved += value != 1.0;
  }
  const double count = StochasticSteps::kElements, p = 1.0 / 64, deviation = std::sqrt(count * p * (1 - p));
  EXPECT_NEAR(static_cast<double>(moved), count * p, 4 * deviation);  // the mean; two values, so the variance as well
}

TEST(PlainStates, StochasticRoundingIsIndependentOfNeighboursAndSteps) {
  StochasticSteps first, second, again, other_seed;
  other_seed.seeds[0] = 2027;
  const std::vector<double> a = first.run(0), b = second.run(1), same = again.run(0), c = other_seed.run(0);
  EXPECT_EQ(a, same);
  const double count = StochasticSteps::kElements, p = 1.0 / 64;
  const auto together = [&](const std::vector<double>& x, const std::vector<double>& y, size_t shift) {
    int64_t both = 0;
    for (size_t i = 0; i + shift < x.size(); ++i) both += x[i] != 1.0 && y[i + shift] != 1.0;
    return static_cast<double>(both);
  };
  const double expected = count * p * p, deviation = std::sqrt(expected);
  EXPECT_NEAR(together(a, b, 0), expected, 4 * deviation);
  EXPECT_NEAR(together(a, c, 0), expected, 4 * deviation);
  for (size_t shift : {1, 2, 7, 8, 16, 512}) EXPECT_NEAR(together(a, a, shift), expected, 4 * deviation) << shift;
}

TEST(PlainStates, StochasticRoundingOfAveragesLetsThemDecay) {
  // 0.999 of a bf16 rounds back to it: to nearest, the second average would never forget.
  OwnContext context;
  for (bool is_stochastic : {false, true}) {
    PlainList list(DType::kBFloat16, DType::kBFloat16, {4096});
    Parameter& one = list.step.parameters[0];
    for (int64_t i = 0; i < 4096; ++i) {
      store_element(one.gradient.data, DType::kBFloat16, i, 0.0);
      store_element(one.second.data, DType::kBFloat16, i, 1.0);
    }
    int64_t seeds[2] = {5, 0};
    if (is_stochastic) list.step.seed = contiguous_view(seeds, DType::kInt64, {2});
    for (int i = 0; i < 100; ++i, ++seeds[1]) list.run(context);
    double mean = 0;
    for (double value : list.values(&Parameter::second)) mean += value / 4096;
    EXPECT_NEAR(mean, is_stochastic ? std::pow(0.999, 100) : 1.0, 2e-3);
  }
}

TEST(PlainStates, NotANumberStaysOne) {
  OwnContext context;
  for (DType state : {DType::kFloat32, DType::kBFloat16}) {
    PlainList list(DType::kBFloat16, state, {40}, true);
    int64_t seeds[2] = {5, 0};
    list.step.seed = contiguous_view(seeds, DType::kInt64, {2});
    const TensorView& gradient = list.step.parameters[0].gradient;
    store_element(gradient.data, DType::kBFloat16, 37, std::numeric_limits<float>::quiet_NaN());
    store_element(gradient.data, DType::kBFloat16, 3, std::numeric_limits<float>::infinity());
    list.run(context);
    for (auto which : {&Parameter::parameter, &Parameter::second, &Parameter::maximum}) {
      const std::vector<double> values = list.values(which);
      EXPECT_TRUE(std::isnan(values[37]));
      EXPECT_TRUE(std::isfinite(values[36]));
    }
    EXPECT_TRUE(std::isinf(list.values(&Parameter::second)[3]));
  }
}

TEST(PlainStates, BadArgumentsAreNamed) {
  OwnContext context;
  const auto expect = [&](const char* text, const std::function<void(PlainList&)>& spoil) {
    PlainList list(DType::kFloat32, DType::kFloat32, {6, 8});
    spoil(list);
    const std::string message = message_of([&] { list.run(context); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect("first of parameter 1 is fp16", [](PlainList& l) { l.step.parameters[1].first.dtype = DType::kFloat16; });
  expect("states are fp16, parameters fp32", [](PlainList& list) {
    for (Parameter& one : list.step.parameters) one.first.dtype = one.second.dtype = DType::kFloat16;
  });
  expect("parameter of parameter 1 is bf16",
         [](PlainList& l) { l.step.parameters[1].parameter.dtype = DType::kBFloat16; });
  expect("gradient of parameter 0 is missing", [](PlainList& l) { l.step.parameters[0].gradient = TensorView(); });
  expect("maximum of parameter 1 is present",
         [](PlainList& l) { l.step.parameters[1].maximum = l.step.parameters[1].first; });
  expect("a master is for bf16", [](PlainList& l) { l.step.parameters[0].master = l.step.parameters[0].first; });
  expect("for adamw with plain states", [](PlainList& list) {
    list.step.rule = Rule::kLion;
    list.step.parameters[0].maximum = list.step.parameters[0].first;
  });
  expect("stochastic rounding is for bf16",
         [](PlainList& list) { list.step.seed = contiguous_view(list.steps.data(), DType::kInt64, {2}); });
}

}  // namespace
}  // namespace kernel_pytorch::optimizer_step
