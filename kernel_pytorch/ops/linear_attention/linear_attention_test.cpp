// What the shape list cannot say: segments of a sequence, parts of its tokens, gates that leave every range, no tokens,
// and bad arguments.
#include "kernel_pytorch/ops/linear_attention/linear_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::linear_attention {
namespace {

std::vector<float> random_floats(int64_t count, float scale = 1, float shift = 0) {
  std::vector<float> values(static_cast<size_t>(count));
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (float& value : values) value = shift + scale * normal(random);
  return values;
}
TensorView view_of(std::vector<float>& values, std::initializer_list<int64_t> sizes) {
  return contiguous_view(values.data(), DType::kFloat32, sizes);
}
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

// One head, queries being keys: [1, tokens, 1, columns] and [1, tokens, 1, values].
struct OneHead {
  int64_t tokens = 0, columns = 8, values = 4;
  std::vector<float> keys, v, gates, output, state;

  OneHead(int64_t of_tokens, float gate)
      : tokens(of_tokens),
        keys(random_floats(of_tokens * 8)),
        v(random_floats(of_tokens * 4)),
        gates(static_cast<size_t>(of_tokens) * 8, gate),
        output(static_cast<size_t>(of_tokens) * 4, -1),
        state(8 * 4, -1) {}
  Forward arguments() {
    return {.query = view_of(keys, {1, tokens, 1, columns}),
            .key = view_of(keys, {1, tokens, 1, columns}),
            .value = view_of(v, {1, tokens, 1, values}),
            .channel_gate = view_of(gates, {1, tokens, 1, columns}),
            .output = view_of(output, {1, tokens, 1, values}),
            .final_state = view_of(state, {1, 1, columns, values})};
  }
};

TEST(LinearAttention, GatesThatForgetEverythingLeaveTheLastToken) {
  OwnContext context;
  for (const float gate : {-90.0f, -1000.0f, -std::numeric_limits<float>::infinity()}) {
    OneHead head(50, gate);
    linear_attention::forward(head.arguments(), context);
    for (int64_t t = 0; t < head.tokens; ++t) {
      float dot = 0;
      for (int64_t i = 0; i < 8; ++i) dot += head.keys[t * 8 + i] * head.keys[t * 8 + i];
      for (int64_t j = 0; j < 4; ++j) EXPECT_NEAR(head.output[t * 4 + j], dot * head.v[t * 4 + j], 1e-4) << gate;
    }
    for (int64_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(head.state[i], head.keys[49 * 8 + i / 4] * head.v[49 * 4 + i % 4], 1e-5) << gate;
    }
  }
}

TEST(LinearAttention, WithoutTokensTheStateStays) {
  OwnContext context;
  OneHead head(0, 0);
  std::vector<float> initial = random_floats(32);
  Forward arguments = head.arguments();
  arguments.initial_state = view_of(initial, {1, 1, 8, 4});
  linear_attention::forward(arguments, context);
  EXPECT_EQ(head.state, initial);
  arguments.initial_state = {};
  linear_attention::forward(arguments, context);
  EXPECT_EQ(head.state, std::vector<float>(32, 0.0f));
}

TEST(LinearAttention, FewHeadsInPartsAreAsManyInOne) {
  OneHead parts(1500, -0.01f), one(1500, -0.01f);
  OwnContext all;
  linear_attention::forward(parts.arguments(), all);
  OwnContext alone;
  alone->threads = nullptr;
  linear_attention::forward(one.arguments(), alone);
  for (size_t i = 0; i < one.output.size(); ++i) EXPECT_NEAR(parts.output[i], one.output[i], 1e-3) << i;
  for (size_t i = 0; i < one.state.size(); ++i) EXPECT_NEAR(parts.state[i], one.state[i], 1e-3) << i;
}

TEST(LinearAttention, BadArguments) {
  OwnContext context;
  OneHead head(5, 0);
  Forward arguments = head.arguments();
  std::vector<float> other(5 * 3 * 8);
  arguments.key = view_of(other, {1, 5, 3, 8});
  EXPECT_NE(message_of([&] { linear_attention::forward(arguments, context); }).find("key has 3 heads, value has 1"),
            std::string::npos);
  arguments = head.arguments();
  arguments.final_state = view_of(other, {1, 1, 8, 5});
  EXPECT_NE(message_of([&] { linear_attention::forward(arguments, context); }).find("final_state has shape"),
            std::string::npos);
  arguments = head.arguments();
  arguments.output = {};
  EXPECT_NE(message_of([&] { linear_attention::forward(arguments, context); }).find("output is missing"),
            std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::linear_attention
