// What the shape list cannot say: rules against formulas in double, independence of threads and addresses, exact
// masters, the dynamic map's buckets, edges and bad arguments.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/parameter_list_test.h"

namespace kernel_pytorch::optimizer_step {
namespace {

// A list of parameters with its memory; gradients and parameters normal, states zero.
struct List : ParameterList {
  List(Rule rule, Storage storage, DType dtype, const std::vector<int64_t>& sizes, bool correction = false,
       int misaligned_elements = 0)
      : ParameterList(sizes.size(), misaligned_elements) {
    step.rule = rule;
    step.storage = storage;
    const DType state = storage == Storage::kPlain ? DType::kFloat32 : DType::kInt8;
    const bool has_scales = storage != Storage::kPlain, has_second = rule == Rule::kAdamW;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t group = group_elements(storage), groups = (sizes[i] + group - 1) / group;
      step.parameters.push_back(
          {.parameter = tensor(dtype, sizes[i], true),
           .gradient = tensor(dtype, sizes[i], true),
           .correction = correction ? tensor(DType::kInt8, sizes[i], false) : TensorView(),
           .first = tensor(state, sizes[i], false),
           .second = has_second ? tensor(state, sizes[i], false) : TensorView(),
           .first_scale = has_scales ? tensor(DType::kFloat32, groups, false) : TensorView(),
           .second_scale = has_scales && has_second ? tensor(DType::kFloat32, groups, false) : TensorView(),
           .step = contiguous_view(&steps[i], DType::kFloat32, {})});
    }
  }
};

TEST(OptimizerStep, FollowsItsRuleInDouble) {
  OwnContext context;
  for (Rule rule : {Rule::kAdamW, Rule::kLion, Rule::kSgd}) {
    List list(rule, Storage::kPlain, DType::kFloat32, {1, 70, 0, 3300});
    list.step.lr = 0.125;
    list.step.weight_decay = 0.25;
    list.step.dampening = rule == Rule::kSgd ? 0.5 : 0;
    std::vector<double> p = list.values(&Parameter::parameter), g = list.values(&Parameter::gradient);
    std::vector<double> m(p.size()), v(p.size());
    for (int step = 1; step <= 4; ++step) {
      list.run(context);
      for (size_t i = 0; i < p.size(); ++i) {
        if (rule == Rule::kAdamW) {
          m[i] = 0.9 * m[i] + 0.1 * g[i];
          v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
          const double bias1 = 1 - std::pow(0.9, step), bias2 = 1 - std::pow(0.999, step);
          p[i] = p[i] * (1 - 0.125 * 0.25) - 0.125 * (m[i] / bias1) / (std::sqrt(v[i] / bias2) + 1e-8);
        } else if (rule == Rule::kLion) {
          const double direction = 0.9 * m[i] + 0.1 * g[i];
          p[i] = p[i] * (1 - 0.125 * 0.25) - 0.125 * (direction > 0 ? 1 : -1);
          m[i] = 0.999 * m[i] + 0.001 * g[i];
        } else {
          const double decayed = g[i] + 0.25 * p[i];
          m[i] = step == 1 ? decayed : 0.9 * m[i] + 0.5 * decayed;
          p[i] -= 0.125 * m[i];
        }
      }
      const std::vector<double> after = list.values(&Parameter::parameter);
      for (size_t i = 0; i < p.size(); ++i) ASSERT_NEAR(after[i], p[i], 2e-5) << i << " step " << step;
    }
    EXPECT_EQ(list.steps, std::vector<float>({4, 4, 4, 4}));
  }
}

TEST(OptimizerStep, ThreadsAndAddressesDoNotShow) {
  for (Storage storage : {Storage::kPlain, Storage::kCompanded, Storage::kDynamic}) {
    std::vector<std::vector<double>> results;
    for (bool is_threaded : {true, false}) {
      for (int misaligned : {0, 1}) {
        OwnContext context;
        if (!is_threaded) context->threads = nullptr;
        List list(Rule::kAdamW, storage, DType::kBFloat16, {70001, 7, 20000}, true, misaligned);
        for (int i = 0; i < 3; ++i) list.run(context);
        results.push_back(list.values(&Parameter::parameter));
        const std::vector<double> more = list.values(&Parameter::first);
        results.back().insert(results.back().end(), more.begin(), more.end());
        EXPECT_EQ(results.back(), results.front());
      }
    }
  }
}

TEST(OptimizerStep, FoundInfChangesNothing) {
  OwnContext context;
  List list(Rule::kAdamW, Storage::kCompanded, DType::kBFloat16, {100}, true);
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

// sgd with a rate of 0 leaves the master as it is: through weight and correction it must come back exactly, once it
// has been rounded to 24 bits.
TEST(OptimizerStep, MastersOf24BitsAreExact) {
  OwnContext context;
  List list(Rule::kSgd, Storage::kPlain, DType::kBFloat16, {1 << 16}, true);
  list.step.lr = 0;
  list.step.weight_decay = 0;
  const Parameter& one = list.step.parameters[0];
  auto* weights = one.parameter.as<uint16_t>();
  auto* corrections = one.correction.as<int8_t>();
  std::mt19937 random(1);
  for (int i = 0; i < 1 << 16; ++i) {
    const uint32_t master = (random() & 0xffffff00u);
    const bool is_number = (master & 0x7f800000u) < 0x7f000000u;
    const uint32_t rounded = is_number ? master + 0x8000u : 0;
    weights[i] = static_cast<uint16_t>(rounded >> 16);
    corrections[i] = static_cast<int8_t>(is_number ? master >> 8 : 0);
  }
  const std::vector<char> kept_weights(reinterpret_cast<char*>(weights), reinterpret_cast<char*>(weights + (1 << 16)));
  const std::vector<int8_t> kept_corrections(corrections, corrections + (1 << 16));
  list.run(context);
  EXPECT_TRUE(std::equal(kept_weights.begin(), kept_weights.end(), reinterpret_cast<char*>(weights)));
  EXPECT_TRUE(std::equal(kept_corrections.begin(), kept_corrections.end(), corrections));
}

TEST(OptimizerStep, AWeightSetToZeroIgnoresItsCorrection) {
  for (int correction = -128; correction < 128; ++correction) {
    const float master = std::bit_cast<float>(master_bits(0u, correction));
    EXPECT_GE(master, 0.0f);
    EXPECT_LT(master, 1e-38f);
    EXPECT_EQ(std::bit_cast<float>(master_bits(0x8000u, correction)), -master);
  }
}

TEST(OptimizerStep, NotANumberIsOfItsGroupAlone) {
  OwnContext context;
  for (Storage storage : {Storage::kPlain, Storage::kCompanded, Storage::kDynamic}) {
    List list(Rule::kAdamW, storage, DType::kFloat32, {600});
    const TensorView& gradient = list.step.parameters[0].gradient;
    store_element(gradient.data, DType::kFloat32, 300, std::numeric_limits<float>::quiet_NaN());
    list.run(context);
    store_element(gradient.data, DType::kFloat32, 300, 1.0f);
    list.run(context);
    const std::vector<double> values = list.values(&Parameter::parameter);
    const int64_t group = group_elements(storage);
    for (int64_t i = 0; i < 600; ++i) EXPECT_EQ(std::isnan(values[i]), i / group == 300 / group) << i;
  }
}

TEST(OptimizerStep, SmallStatesBesideLargeOnesDoNotMakeLargeSteps) {
  // A second average below half a code must not become 0: the next small gradient would divide by it.
  OwnContext context;
  List list(Rule::kAdamW, Storage::kCompanded, DType::kFloat32, {64});
  const TensorView& gradient = list.step.parameters[0].gradient;
  for (int step = 0; step < 50; ++step) {
    for (int i = 0; i < 64; ++i) {
      const double value = i == 0 ? 1000 : step < 25 ? 1 : 1e-4;
      store_element(gradient.data, DType::kFloat32, i, value);
    }
    const std::vector<double> before = list.values(&Parameter::parameter);
    list.run(context);
    const std::vector<double> after = list.values(&Parameter::parameter);
    for (int i = 0; i < 64; ++i) ASSERT_LT(std::abs(after[i] - before[i]), 2e-3) << "step " << step << " of " << i;
  }
}

template <bool kSigned>
void expect_nearest() {
  static constexpr DynamicMap<kSigned> kMap = make_dynamic_map<kSigned>();
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-24, 0);
  for (int i = 0; i < 200000; ++i) {
    const float x = i < 256 ? kMap.magnitudes[i % DynamicMap<kSigned>::kRanks] : std::exp2(exponent(random));
    int nearest = 0;
    for (int rank = 1; rank < DynamicMap<kSigned>::kRanks; ++rank) {
      if (x > kMap.middles[rank - 1]) nearest = rank;
    }
    ASSERT_EQ(nearest_rank(kMap, x, std::bit_cast<uint32_t>(x)), nearest) << x;
  }
}
TEST(OptimizerStep, BucketsFindTheNearestValue) {
  expect_nearest<true>();
  expect_nearest<false>();
}

TEST(OptimizerStep, BadArgumentsAreNamed) {
  OwnContext context;
  const auto expect = [&](const char* text, const std::function<void(List&)>& spoil,
                          Storage storage = Storage::kCompanded) {
    List list(Rule::kAdamW, storage, DType::kFloat32, {6, 80});
    spoil(list);
    const std::string message = message_of([&] { list.run(context); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect("gradient of parameter 1 has shape [7]", [](List& list) { list.step.parameters[1].gradient.sizes[0] = 7; });
  expect("first of parameter 1 is fp32; it must be int8",
         [](List& l) { l.step.parameters[1].first.dtype = DType::kFloat32; });
  expect("it must be 2 contiguous fp32, one for 64 elements",
         [](List& l) { l.step.parameters[1].first_scale.sizes[0] = 3; });
  expect("second_scale of parameter 0 is missing", [](List& l) { l.step.parameters[0].second_scale = TensorView(); });
  expect(
      "first_scale of parameter 0 is present",
      [](List& l) { l.step.parameters[0].first_scale = l.step.parameters[0].step; }, Storage::kPlain);
  expect("second of parameter 0 is present", [](List& list) { list.step.rule = Rule::kLion; });
  expect("a correction is for bf16", [](List& l) { l.step.parameters[0].correction = l.step.parameters[0].first; });
  expect("make it contiguous", [](List& list) { list.step.parameters[0].parameter.strides[0] = 2; });
  expect("betas are 0.9 and 1", [](List& list) { list.step.beta2 = 1; });
  expect("max_norm is 0", [](List& list) { list.step.total_norm = list.step.parameters[0].step; });
  expect("nesterov is for sgd", [](List& list) { list.step.nesterov = true; });
  expect("step is on cuda:0", [](List& l) { l.step.parameters[0].step.device = {DeviceKind::kCuda, 0}; });
  List nothing(Rule::kAdamW, Storage::kPlain, DType::kFloat32, {});
  nothing.run(context);
}

}  // namespace
}  // namespace kernel_pytorch::optimizer_step
