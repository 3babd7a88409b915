// What the shape list cannot say of rope: that turning back undoes it, in place equals out of place, the frequencies of
// the scalings at points that their formulas fix, and bad arguments.
#include "kernel_pytorch/ops/rope/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::rope {
namespace {

struct Tensor {
  std::vector<char> memory;
  TensorView view;
  Tensor(DType dtype, std::vector<int64_t> sizes) {
    view = contiguous_view(nullptr, dtype, sizes);
    memory.resize(static_cast<size_t>(view.byte_count()));
    view.data = memory.data();
    std::mt19937 random(static_cast<unsigned>(view.element_count()));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < view.element_count(); ++i) store_element(view.data, dtype, i, normal(random));
  }
};

TEST(Rope, TurningBackUndoesItAndInPlaceIsTheSame) {
  for (bool interleaved : {false, true}) {
    Tensor query(DType::kFloat32, {2, 9, 3, 40}), key(DType::kFloat32, {2, 9, 1, 40});
    Tensor rotated(DType::kFloat32, {2, 9, 3, 40}), rotated_key(DType::kFloat32, {2, 9, 1, 40});
    Tensor back(DType::kFloat32, {2, 9, 3, 40}), back_key(DType::kFloat32, {2, 9, 1, 40});
    Tensor frequencies(DType::kFloat32, {16});
    OwnContext context;
    Arguments arguments{.query = query.view, .key = key.view, .inverse_frequencies = frequencies.view};
    arguments.interleaved = interleaved;
    arguments.query_output = rotated.view;
    arguments.key_output = rotated_key.view;
    rotate(arguments, context);
    arguments.query = rotated.view;
    arguments.key = rotated_key.view;
    arguments.query_output = back.view;
    arguments.key_output = back_key.view;
    arguments.inverse = true;
    rotate(arguments, context);
    for (int64_t i = 0; i < query.view.element_count(); ++i) {
      ASSERT_NEAR(back.view.as<float>()[i], query.view.as<float>()[i], 1e-5);
    }
    arguments.query = arguments.query_output = query.view;
    arguments.key = arguments.key_output = key.view;
    arguments.inverse = false;
    rotate(arguments, context);
    EXPECT_EQ(query.memory, rotated.memory);
    EXPECT_EQ(key.memory, rotated_key.memory);
  }
}

TEST(Rope, ScalingsAtPointsThatTheirFormulasFix) {
  const Frequencies plain{.rotary_dim = 128};
  const std::vector<double> unscaled = make_frequencies(plain).inverse_frequencies;
  ASSERT_EQ(unscaled.size(), 64u);
  EXPECT_EQ(unscaled[0], 1.0);
  EXPECT_NEAR(unscaled[32], 0.01, 1e-15);
  Frequencies ntk = plain;
  ntk.scaling = Scaling::kNtk;
  ntk.factor = 8;
  EXPECT_EQ(make_frequencies(ntk).inverse_frequencies[0], 1.0);
  EXPECT_NEAR(make_frequencies(ntk).inverse_frequencies[63], unscaled[63] / 8, 1e-15);  // what the base is chosen for
  for (Scaling scaling : {Scaling::kYarn, Scaling::kLlama3}) {
    Frequencies stretched = plain;
    stretched.scaling = scaling;
    stretched.factor = 16;
    stretched.original_positions = 4096;
    const FrequencyTable table = make_frequencies(stretched);
    EXPECT_EQ(table.inverse_frequencies[0], 1.0);  // turns often: kept
    EXPECT_NEAR(table.inverse_frequencies[63], unscaled[63] / 16, 1e-15);
    for (size_t i = 1; i < 64; ++i) EXPECT_LT(table.inverse_frequencies[i], table.inverse_frequencies[i - 1]);
    EXPECT_NEAR(table.scale, scaling == Scaling::kYarn ? 0.1 * std::log(16.0) + 1 : 1.0, 1e-15);
  }
}

TEST(Rope, ErrorsNameBothValuesAndTheCure) {
  Tensor query(DType::kFloat32, {2, 5, 3, 8}), output(DType::kFloat32, {2, 5, 3, 8}), cos(DType::kFloat32, {5, 4});
  Tensor flat(DType::kFloat32, {10, 8}), narrow(DType::kFloat32, {4, 4});
  OwnContext context;
  const auto with = [&](auto change) {
    return [&, change] {
      Arguments arguments{.query = query.view, .cos = cos.view, .sin = cos.view, .query_output = output.view};
      change(arguments);
      rotate(arguments, context);
    };
  };
  const auto expect_error = [](const std::function<void()>& call, const std::string& words) {
    try {
      call();
      ADD_FAILURE() << "no error; expected: " << words;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find(words), std::string::npos) << error.message();
    }
  };
  with([](Arguments&) {})();
  expect_error(with([&](Arguments& a) { a.query = flat.view; }), "rope: query has shape [10, 8]; it must be [batch");
  expect_error(with([&](Arguments& a) { a.sin = {}; }), "rope: cos is given, sin is absent; they go together");
  expect_error(with([&](Arguments& a) { a.cos = a.sin = {}; }), "rope: rotary_dim is 0, head_dim is 8");
  expect_error(with([&](Arguments& a) { a.inverse_frequencies = cos.view; }), "give one of them");
  expect_error(with([&](Arguments& a) { a.cos = a.sin = narrow.view; }), "rope: cos has 4 rows, the sequence is 5");
  expect_error(with([&](Arguments& a) { a.rotary_dim = 3; }), "rope: rotary_dim is 3, head_dim is 8");
  expect_error(with([&](Arguments& a) { a.query_output = {}; }), "rope: query_output is missing");
  expect_error(with([&](Arguments& a) { a.key = query.view; }), "rope: key_output is missing");
  int64_t positions[10] = {0, 1, 2, 3, 4, 0, 1, 2, -1, 4};
  expect_error(with([&](Arguments& a) {
                 a.positions = contiguous_view(positions, DType::kInt64, {2, 5});
               }),
               "rope: positions[1, 3] is -1, cos has 5 rows; it must be one of them");
}

}  // namespace
}  // namespace kernel_pytorch::rope
