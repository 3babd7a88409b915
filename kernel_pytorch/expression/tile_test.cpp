// Tiles against the interpreter, for random programs on every CPU level of this machine.
#include "kernel_pytorch/expression/tile.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <memory>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/expression/compose.h"
#include "kernel_pytorch/expression/interpret.h"
#include "kernel_pytorch/expression/random_program_test.h"
#include "kernel_pytorch/expression/text.h"

namespace kernel_pytorch::expression {
namespace {

using testing::kTestCaptures;
using testing::ProgramDrawer;
using testing::RandomTensor;

template <class Real>
struct Level {
  const char* name;
  const TileKernels<Real>* kernels;
};

template <class Real>
std::vector<Level<Real>> levels() {
  constexpr bool kIsFloat = sizeof(Real) == sizeof(float);
  const auto pick = [](const auto& single, const auto& twofold) -> const TileKernels<Real>* {
    if constexpr (kIsFloat) return &single;
    if constexpr (!kIsFloat) return &twofold;
  };
  const CpuIsa isa = device_info({}).cpu.isa;
#if defined(__aarch64__)
  std::vector<Level<Real>> all = {{"neon", pick(isa_neon::kTileKernels, isa_neon::kTileKernelsDouble)}};
  if (isa >= CpuIsa::kSve256) all.push_back({"sve256", pick(isa_sve256::kTileKernels, isa_sve256::kTileKernelsDouble)});
#else
  std::vector<Level<Real>> all = {{"v2", pick(isa_v2::kTileKernels, isa_v2::kTileKernelsDouble)}};
  if (isa >= CpuIsa::kX86V3) all.push_back({"v3", pick(isa_v3::kTileKernels, isa_v3::kTileKernelsDouble)});
  if (isa >= CpuIsa::kX86V4) all.push_back({"v4", pick(isa_v4::kTileKernels, isa_v4::kTileKernelsDouble)});
#endif
  return all;
}

// Memory of exactly the size asked for, so that a sanitizer sees what goes beyond.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~Workspace() { std::free(memory_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* get() const { return memory_; }

 private:
  void* memory_;
};

struct Captured {
  std::vector<RandomTensor> tensors;
  std::vector<TensorView> views;
  explicit Captured(std::mt19937& random) {
    tensors.reserve(kTestCaptures.size());
    for (const Capture& capture : kTestCaptures) {
      tensors.emplace_back(random, capture);
      views.push_back(tensors.back().view());
    }
  }
};

template <class Real>
std::vector<Real> random_scores(std::mt19937& random, int64_t count) {
  std::normal_distribution<Real> normal;
  std::vector<Real> scores(count);
  for (Real& score : scores) score = normal(random);
  return scores;
}

bool is_close(double value, double expected, double tolerance) {
  if (std::isnan(expected) || std::isinf(expected)) return std::isnan(expected) ? std::isnan(value) : value == expected;
  return std::abs(value - expected) <= tolerance * (1 + std::abs(expected));
}

// Every value of the program is a result, so that a wrong node is named; smooth ones, since a comparison of two floats
// that differ by rounding may fall either way.
template <class Real>
void compare_with_interpreter(double tolerance) {
  std::mt19937 random(17);
  for (int round = 0; round < 60; ++round) {
    ProgramDrawer drawer(random, true);
    drawer.draw(30, Type::kFloat);
    std::vector<NodeId> all;
    for (NodeId id = 0; id < drawer.builder().node_count(); ++id) all.push_back(id);
    const Program program = drawer.builder().finish(all);
    const Captured captured(random);
    const Tile tile{round % 3,
                    round % 5,
                    static_cast<int64_t>(random() % 9),
                    static_cast<int64_t>(random() % 300),
                    static_cast<int64_t>(random() % 4),
                    static_cast<int64_t>(random() % 200)};
    const int64_t stride = tile.columns + 3;
    const std::vector<Real> scores = random_scores<Real>(random, tile.rows * stride + 1);
    const TilePlan plan(program, captured.views, "test");
    const Workspace workspace(plan.workspace_bytes<Real>());
    std::vector<std::vector<double>> storage(all.size(), std::vector<double>(tile.rows * stride + 1));
    std::vector<Rows> rows;
    for (std::vector<double>& values : storage) rows.push_back({values.data(), stride});
    for (const Level<Real>& level : levels<Real>()) {
      level.kernels->evaluate(plan, tile, scores.data(), stride, rows, workspace.get());
      for (int64_t i = 0; i < tile.rows * tile.columns; ++i) {
        const int64_t q = i / tile.columns, k = i % tile.columns, at = q * stride + k;
        const auto expected = interpret<double>(
            program, {scores[at], tile.batch, tile.head, tile.first_query + q, tile.first_key + k}, captured.views);
        for (size_t node = 0; node < all.size(); ++node) {
          const void* data = storage[node].data();
          const Type type = program.nodes[node].type;
          const bool is_same = type == Type::kFloat
                                   ? is_close(static_cast<const Real*>(data)[at], expected[node].real, tolerance)
                               : type == Type::kInt ? static_cast<const int64_t*>(data)[at] == expected[node].integer
                                                    : static_cast<const bool*>(data)[at] == expected[node].boolean;
          ASSERT_TRUE(is_same) << level.name << " %" << node << " row " << q << " column " << k << "\n"
                               << print(program);
        }
      }
    }
  }
}

TEST(ExpressionTile, AgreesWithTheInterpreter) {
  compare_with_interpreter<float>(2e-4);  // random chains of 30 floats
  compare_with_interpreter<double>(1e-11);
}

TEST(ExpressionTile, SharpFunctionsAgreeBitForBitInDouble) {
  std::mt19937 random(3);
  for (int round = 0; round < 600; ++round) {
    const Program program = ProgramDrawer(random, false).draw(20, static_cast<Type>(round % 3));
    const Captured captured(random);
    const Tile tile{1, 2, 3, 4, 2, 70};
    const std::vector<double> scores = random_scores<double>(random, tile.rows * tile.columns);
    const TilePlan plan(program, captured.views, "test");
    const Workspace workspace(plan.workspace_bytes<double>());
    std::vector<double> result(scores.size());
    const std::vector<Rows> rows = {{result.data(), tile.columns}};
    const auto all_levels = levels<double>();
    all_levels[round % all_levels.size()].kernels->evaluate(plan, tile, scores.data(), tile.columns, rows,
                                                            workspace.get());
    for (int64_t at = 0; at < tile.rows * tile.columns; ++at) {
      const auto expected = interpret<double>(program, {scores[at], 1, 2, 3 + at / tile.columns, 4 + at % tile.columns},
                                              captured.views)[0];
      const Type type = program.result_type();
      const auto* integers = reinterpret_cast<const int64_t*>(result.data());
      const auto* booleans = reinterpret_cast<const bool*>(result.data());
      const bool is_same = type == Type::kFloat ? is_close(result[at], expected.real, 1e-12)
                           : type == Type::kInt ? integers[at] == expected.integer
                                                : booleans[at] == expected.boolean;
      ASSERT_TRUE(is_same) << print(program);
    }
  }
}

TEST(ExpressionTile, LargeIntegersBecomeFloats) {
  const Program program = parse(
      "expression 1\n%0 = key\n%1 = int 62\n%2 = mod %0 %1\n%3 = int 1\n%4 = shift_left %3 %2\n%5 = to_float %4\n"
      "return %5\n");
  const TilePlan plan(program, {}, "test");
  const Workspace workspace(plan.workspace_bytes<float>());
  for (const Level<float>& level : levels<float>()) {
    float values[62];
    const std::vector<Rows> rows = {{values, 62}};
    level.kernels->evaluate(plan, {.rows = 1, .columns = 62}, nullptr, 0, rows, workspace.get());
    for (int i = 0; i < 62; ++i) ASSERT_EQ(values[i], std::ldexp(1.0f, i)) << level.name;
  }
}

// score * exp(bias[head, query - key]) + slope[head] * table[key]: gradients that vary by all, by none and by key.
TEST(ExpressionTile, BackwardAddsToCapturedTensors) {
  const Program program = parse(
      "expression 1\ncapture fp32 2\ncapture fp32 1\ncapture fp32 1\n%0 = score\n%1 = head\n%2 = query\n%3 = key\n"
      "%4 = sub %2 %3\n%5 = load 0 %1 %4\n%6 = exp %5\n%7 = mul %0 %6\n%8 = load 1 %1\n%9 = load 2 %3\n%10 = mul %8 "
      "%9\n"
      "%11 = add %7 %10\nreturn %11\n");
  const Gradient gradient = differentiate(program);
  EXPECT_EQ(gradient.loads.size(), 3u);
  std::mt19937 random(1);
  std::vector<float> bias = random_scores<float>(random, 3 * 40), slope = random_scores<float>(random, 3),
                     table = random_scores<float>(random, 150);
  const TensorView captured[] = {contiguous_view(bias.data(), DType::kFloat32, {3, 40}),
                                 contiguous_view(slope.data(), DType::kFloat32, {3}),
                                 contiguous_view(table.data(), DType::kFloat32, {150})};
  const Tile tile{0, 1, 7, 2, 5, 140};
  const std::vector<float> scores = random_scores<float>(random, tile.rows * tile.columns),
                           grad = random_scores<float>(random, tile.rows * tile.columns);
  std::vector<double> expected[3] = {std::vector<double>(120), std::vector<double>(3), std::vector<double>(150)};
  std::vector<double> expected_grad;
  for (int64_t at = 0; at < tile.rows * tile.columns; ++at) {
    const int64_t q = 7 + at / tile.columns, k = 2 + at % tile.columns;
    const int64_t place = 40 + place_of(q - k, int64_t{40});
    const double factor = std::exp(static_cast<double>(bias[place]));
    expected_grad.push_back(grad[at] * factor);
    expected[0][place] += grad[at] * scores[at] * factor;
    expected[1][1] += grad[at] * table[k];
    expected[2][k] += grad[at] * slope[1];
  }
  const TilePlan plan(gradient.program, captured, "test");
  const Workspace workspace(plan.workspace_bytes<float>());
  for (const Level<float>& level : levels<float>()) {
    for (bool is_shared : {false, true}) {
      std::vector<float> sums[3] = {std::vector<float>(120), std::vector<float>(3), std::vector<float>(150)};
      const std::vector<CaptureGradient<float>> gradients = {
          {sums[0].data(), is_shared}, {sums[1].data(), is_shared}, {sums[2].data(), is_shared}};
      std::vector<float> out = grad;
      level.kernels->backward(plan, gradient.loads, tile, scores.data(), tile.columns, out.data(), tile.columns,
                              gradients, workspace.get());
      for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected_grad[i], 1e-4) << level.name;
      for (int c = 0; c < 3; ++c) {
        for (size_t i = 0; i < sums[c].size(); ++i) ASSERT_NEAR(sums[c][i], expected[c][i], 1e-3) << level.name << c;
      }
    }
  }
}

TEST(ExpressionTile, CapturedTensorsAreChecked) {
  const Program program = parse("expression 1\ncapture fp32 1\n%0 = key\n%1 = load 0 %0\nreturn %1\n");
  float element = 0;
  const auto refused = [&](const std::vector<TensorView>& captured) {
    try {
      const TilePlan plan(program, captured, "attention");
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_EQ(refused({contiguous_view(&element, DType::kFloat32, {1})}), "");
  EXPECT_NE(refused({}).find("captures 1 tensors and 0 are given"), std::string::npos);
  EXPECT_NE(refused({contiguous_view(&element, DType::kInt32, {1})}).find("traced with fp32"), std::string::npos);
  EXPECT_NE(refused({contiguous_view(&element, DType::kFloat32, {1, 1})}).find("1 dimensions"), std::string::npos);
  EXPECT_NE(refused({contiguous_view(&element, DType::kFloat32, {0})}).find("empty"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::expression
