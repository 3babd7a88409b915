// Errors of the math words in units of the last place, against the C library's double functions, and their edges.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/cpu/primitives_test.h"

namespace kernel_pytorch::cpu_probes {
namespace {

struct MathPrimitive {
  const char* name;
  void (*PrimitiveProbes::*probe)(const float*, float*, int64_t);
  double (*exact)(double);
  double ulp_bound;
};

double exact_sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double exact_exp(double x) {
  return std::exp(x);
}
double exact_log(double x) {
  return std::log(x);
}
double exact_tanh(double x) {
  return std::tanh(x);
}
double exact_erf(double x) {
  return std::erf(x);
}
double exact_sqrt(double x) {
  return std::sqrt(x);
}

const MathPrimitive kPrimitives[] = {
    {"exp", &PrimitiveProbes::exp, exact_exp, 1.02},
    {"log", &PrimitiveProbes::log, exact_log, 0.9},
    {"tanh", &PrimitiveProbes::tanh, exact_tanh, 1.34},
    {"erf", &PrimitiveProbes::erf, exact_erf, 1.14},
    {"sigmoid", &PrimitiveProbes::sigmoid, exact_sigmoid, 2.49},
    {"sqrt", &PrimitiveProbes::sqrt, exact_sqrt, 0.5},
};

// Distance in units of the last place that float has at the exact value (the least normal's below that).
double ulp_error(float got, double exact) {
  if (std::isnan(exact)) return std::isnan(got) ? 0 : INFINITY;
  const double largest_rounding_down = static_cast<double>(FLT_MAX) + std::ldexp(1.0, 103);
  if (std::isinf(got)) return std::abs(exact) >= largest_rounding_down && (exact > 0) == (got > 0) ? 0 : INFINITY;
  if (std::isnan(got) || std::abs(exact) >= largest_rounding_down) return INFINITY;
  const int exponent = exact == 0 ? -126 : std::max(std::ilogb(exact), -126);
  return std::abs(got - exact) / std::ldexp(1.0, exponent - 23);
}

bool zero_for_denormal(float got, double exact) {
  return got == 0 && std::abs(exact) < FLT_MIN;
}

std::vector<float> strided_floats(uint32_t stride) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < 1ull << 32; bits += stride)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  return values;
}

TEST(CpuPrimitivesMath, ErrorsStayWithinTheirBounds) {
  const std::vector<float> values = strided_floats(19997);
  std::vector<float> results(values.size());
  for (const Level& level : levels_of_this_machine()) {
    for (const MathPrimitive& primitive : kPrimitives) {
      (level.probes.*primitive.probe)(values.data(), results.data(), static_cast<int64_t>(values.size()));
      double worst = 0;
      float worst_at = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        const double exact = primitive.exact(values[i]);
        if (zero_for_denormal(results[i], exact)) continue;
        const double error = ulp_error(results[i], exact);
        if (error > worst) worst = error, worst_at = values[i];
      }
      EXPECT_LE(worst, primitive.ulp_bound)
          << primitive.name << " at level " << level.name << ", worst at " << std::hexfloat << worst_at;
      RecordProperty(std::string(primitive.name) + "_" + level.name, std::to_string(worst));
    }
  }
}

TEST(CpuPrimitivesMath, Edges) {
  const float inf = INFINITY, nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> inputs = {0.0f,  -0.0f,   inf,      -inf,   nan,     1.0f,
                                     -1.0f, FLT_MAX, -FLT_MAX, 1e-45f, -1e-45f, FLT_MIN};
  const auto count = static_cast<int64_t>(inputs.size());
  for (const Level& level : levels_of_this_machine()) {
    for (const MathPrimitive& primitive : kPrimitives) {
      std::vector<float> results(inputs.size());
      (level.probes.*primitive.probe)(inputs.data(), results.data(), count);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto wanted = static_cast<float>(primitive.exact(inputs[i]));
        if (std::isnan(wanted) || std::isinf(wanted) || wanted == 0) {
          const bool same = std::isnan(wanted) ? std::isnan(results[i]) : results[i] == wanted;
          EXPECT_TRUE(same) << level.name << " " << primitive.name << "(" << inputs[i] << ") = " << results[i];
          EXPECT_TRUE(wanted != 0 || std::signbit(results[i]) == std::signbit(wanted))
              << level.name << " " << primitive.name;
        } else if (!zero_for_denormal(results[i], wanted)) {
          EXPECT_LE(ulp_error(results[i], primitive.exact(inputs[i])), primitive.ulp_bound)
              << level.name << " " << primitive.name;
        }
      }
    }
  }
}

TEST(CpuPrimitivesMath, ReciprocalWithinItsRange) {
  std::vector<float> values;
  for (float value : strided_floats(9973)) {
    if (std::abs(value) >= 0x1p-125f && std::abs(value) <= 0x1p125f) values.push_back(value);
  }
  values.insert(values.end(), {INFINITY, -INFINITY, 1.0f, 0x1p-125f, 0x1p125f});
  std::vector<float> results(values.size());
  for (const Level& level : levels_of_this_machine()) {
    level.probes.reciprocal(values.data(), results.data(), static_cast<int64_t>(values.size()));
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i) worst = std::max(worst, ulp_error(results[i], 1.0 / values[i]));
    EXPECT_LE(worst, 0.53) << level.name;
    RecordProperty("reciprocal_" + level.name, std::to_string(worst));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    level.probes.reciprocal(&nan, results.data(), 1);
    EXPECT_TRUE(std::isnan(results[0])) << level.name;
  }
}

double exact_exp2(double x) {
  return std::exp2(x);
}

TEST(CpuPrimitivesMath, RoughPrimitivesKeepTheirBits) {
  const MathPrimitive primitives[] = {
      {"exp2 for bf16", &PrimitiveProbes::exp2_for_bfloat16, exact_exp2, -13.7},
      {"exp2 for fp16", &PrimitiveProbes::exp2_for_float16, exact_exp2, -18.3},
      {"sigmoid for bf16", &PrimitiveProbes::sigmoid_for_bfloat16, exact_sigmoid, -12.8},
      {"sigmoid for fp16", &PrimitiveProbes::sigmoid_for_float16, exact_sigmoid, -17.2}};
  std::vector<float> values;
  for (float value = -87; value < 88; value += 0.00037f) values.push_back(value);
  std::vector<float> results(values.size());
  const std::vector<float> edges = {INFINITY, -INFINITY, std::numeric_limits<float>::quiet_NaN(), 0.0f, 1e30f, -1e30f};
  for (const Level& level : levels_of_this_machine()) {
    for (const MathPrimitive& primitive : primitives) {
      (level.probes.*primitive.probe)(values.data(), results.data(), static_cast<int64_t>(values.size()));
      double worst = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        const double exact = primitive.exact(values[i]);
        worst = std::max(worst, std::abs(results[i] - exact) / exact);
      }
      EXPECT_LE(std::log2(worst), primitive.ulp_bound) << primitive.name << " at level " << level.name;
      (level.probes.*primitive.probe)(edges.data(), results.data(), static_cast<int64_t>(edges.size()));
      const bool is_sigmoid = primitive.exact == exact_sigmoid;
      EXPECT_GE(results[0], is_sigmoid ? 0.9999f : 1e38f) << primitive.name << " " << level.name;
      EXPECT_LE(results[1], 2e-38f) << primitive.name << " " << level.name;
      EXPECT_TRUE(std::isnan(results[2])) << primitive.name << " " << level.name;
      EXPECT_NEAR(results[3], is_sigmoid ? 0.5 : 1.0, 1e-4) << primitive.name << " " << level.name;
      EXPECT_GE(results[4], is_sigmoid ? 0.9999f : 1e38f) << primitive.name << " " << level.name;
      EXPECT_LE(results[5], 2e-38f) << primitive.name << " " << level.name;
    }
  }
}

TEST(CpuPrimitivesMath, FastExponential) {
  std::vector<float> values = strided_floats(9973);
  values.insert(values.end(),
                {0.0f, -0.0f, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, -87.3365402f, -87.4f, 88.7f, 89.0f});
  std::vector<float> results(values.size());
  for (const Level& level : levels_of_this_machine()) {
    level.probes.exp_fast(values.data(), results.data(), static_cast<int64_t>(values.size()));
    double worst = 0, worst_near = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(std::isnan(values[i]), std::isnan(results[i])) << values[i];
      const double exact = std::exp(static_cast<double>(values[i]));
      EXPECT_TRUE(!(exact < FLT_MIN) || results[i] <= 1.0001f * FLT_MIN) << values[i];
      EXPECT_TRUE(!(exact > 1.0001 * FLT_MAX) || std::isinf(results[i])) << values[i];
      EXPECT_TRUE(values[i] != 0 || results[i] == 1) << values[i];
      if (!(exact > 1.0001 * FLT_MIN && exact < 0.9999 * FLT_MAX)) continue;
      const double error = std::abs(results[i] / exact - 1);
      worst = std::max(worst, error);
      if (std::abs(values[i]) <= 1) worst_near = std::max(worst_near, error);
    }
    EXPECT_LE(worst_near, 3e-7) << level.name;
    EXPECT_LE(worst, 5e-6) << level.name;
  }
}

TEST(CpuPrimitivesMath, FastPowerOfTwo) {
  std::vector<float> values = strided_floats(9973);
  values.insert(values.end(), {0.0f, -0.0f, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, -126.0f, -126.1f, 127.5f, 128.0f});
  for (int i = -4000; i < 4000; ++i) values.push_back(static_cast<float>(i) * 0.0317f);
  std::vector<float> results(values.size());
  for (const Level& level : levels_of_this_machine()) {
    level.probes.exp2_fast(values.data(), results.data(), static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(std::isnan(values[i]), std::isnan(results[i])) << values[i];
      const double exact = std::exp2(static_cast<double>(values[i]));
      if (exact < FLT_MIN) {
        ASSERT_EQ(results[i], 0) << values[i];
      } else if (exact > FLT_MAX) {
        ASSERT_TRUE(std::isinf(results[i])) << values[i];
      } else if (!std::isnan(exact)) {
        ASSERT_LE(std::abs(results[i] / exact - 1), 1.5e-7) << values[i];
      }
    }
  }
}

// Every float in the ranges where the methods change over: [a, b] walked without gaps.
TEST(CpuPrimitivesMath, NoGapsAtTheSeams) {
  struct Seam {
    const char* primitive;
    float at;
  };
  const Seam seams[] = {{"exp", -87.3365402f}, {"exp", 88.7228394f}, {"exp", 0.34657359f},   {"log", 1.0f},
                        {"log", 0.70710678f},  {"log", FLT_MIN},     {"tanh", 0.625f},       {"tanh", 9.01f},
                        {"erf", 0.9375f},      {"erf", 4.0f},        {"sigmoid", -87.33654f}};
  for (const Level& level : levels_of_this_machine()) {
    for (const Seam& seam : seams) {
      for (const MathPrimitive& primitive : kPrimitives) {
        if (std::string(primitive.name) != seam.primitive) continue;
        std::vector<float> values;
        for (int step = -20000; step <= 20000; ++step) {
          values.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(seam.at) + static_cast<uint32_t>(step)));
        }
        std::vector<float> results(values.size());
        (level.probes.*primitive.probe)(values.data(), results.data(), static_cast<int64_t>(values.size()));
        double worst = 0;
        for (size_t i = 0; i < values.size(); ++i) {
          const double exact = primitive.exact(values[i]);
          if (!zero_for_denormal(results[i], exact)) worst = std::max(worst, ulp_error(results[i], exact));
        }
        EXPECT_LE(worst, primitive.ulp_bound) << level.name << " " << primitive.name << " around " << seam.at;
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::cpu_probes
