// What the shape list cannot say: segments of a sequence, parts of its tokens, gates that leave every range, no tokens,
// bad arguments, and pools of states, which only the form that writes in place has.
#include "kernel_pytorch/ops/linear_attention/linear_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/cuda/primitives_fixture_test.h"

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

// Four packed sequences, one of them empty; token 9 and 10 are in none. Their states lie in a pool.
struct Pool {
  static constexpr int64_t kTokens = 11, kHeads = 2, kColumns = 36, kSlots = 6;
  int64_t values;
  std::vector<float> keys, v, gates, output, pool;
  std::vector<int32_t> offsets{0, 3, 3, 4, 9};

  explicit Pool(int64_t of_values)
      : values(of_values),
        keys(random_floats(kTokens * kHeads * kColumns, 0.3f)),
        v(random_floats(kTokens * kHeads * of_values)),
        gates(static_cast<size_t>(kTokens * kHeads), -0.1f),
        output(static_cast<size_t>(kTokens * kHeads * of_values), -1),
        pool(random_floats(kSlots * kHeads * kColumns * of_values)) {}
  // Of memory that lies on `device`.
  template <class Index>
  Forward arguments(Device device, float* key, float* value, float* gate, int32_t* ends, Index* index, float* states,
                    float* result) const {
    const TensorView queries = contiguous_view(key, DType::kFloat32, {1, kTokens, kHeads, kColumns}, device);
    const TensorView initial = contiguous_view(states, DType::kFloat32, {kSlots, kHeads, kColumns, values}, device);
    const DType type = sizeof(Index) == 8 ? DType::kInt64 : DType::kInt32;
    return {.query = queries,
            .key = queries,
            .value = contiguous_view(value, DType::kFloat32, {1, kTokens, kHeads, values}, device),
            .gate = contiguous_view(gate, DType::kFloat32, {1, kTokens, kHeads}, device),
            .cu_seqlens = contiguous_view(ends, DType::kInt32, {5}, device),
            .state_index = contiguous_view(index, type, {4}, device),
            .initial_state = initial,
            .output = contiguous_view(result, DType::kFloat32, {1, kTokens, kHeads, values}, device),
            .final_state = initial};
  }
  template <class Index>
  void run_on_cpu(std::vector<Index> index, Mode mode) {
    OwnContext context;
    Forward all =
        arguments({}, keys.data(), v.data(), gates.data(), offsets.data(), index.data(), pool.data(), output.data());
    all.mode = mode;
    linear_attention::forward(all, context);
  }
  template <class Index>
  void run_on_gpu(const std::vector<Index>& index) {
    const OnDevice<float> key(keys), value(v), gate(gates), states(pool), result(output);
    const OnDevice<int32_t> ends(offsets);
    const OnDevice<Index> slots(index);
    OwnContext context({DeviceKind::kCuda, 0});
    linear_attention::forward(arguments({DeviceKind::kCuda, 0}, key.data(), value.data(), gate.data(), ends.data(),
                                        slots.data(), states.data(), result.data()),
                              context);
    output = result.read();
    pool = states.read();
  }
};

void expect_near(const std::vector<float>& ours, const std::vector<float>& theirs) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) ASSERT_NEAR(ours[i], theirs[i], 1e-4) << i;
}

TEST(LinearAttention, StepsAndChunksInAPoolAgree) {
  Pool steps(20), chunks(20);
  const std::vector<float> before = steps.pool;
  steps.run_on_cpu<int32_t>({4, 1, -1, 0}, Mode::kRecurrent);
  chunks.run_on_cpu<int64_t>({4, 1, -1, 0}, Mode::kChunk);
  expect_near(chunks.output, steps.output);
  expect_near(chunks.pool, steps.pool);
  const int64_t of_slot = Pool::kHeads * Pool::kColumns * 20;
  for (const int64_t slot : {0, 1, 2, 3, 4, 5}) {
    const bool is_same = std::equal(before.begin() + slot * of_slot, before.begin() + (slot + 1) * of_slot,
                                    steps.pool.begin() + slot * of_slot);
    EXPECT_EQ(is_same, slot != 4 && slot != 0) << slot;  // slot 1 is that of the empty sequence
  }
}

TEST(LinearAttention, APoolOnAGpuIsThatOnTheCpu) {
  if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
  if (!jit::nvrtc_info().found) GTEST_SKIP() << jit::nvrtc_info().absence;
  for (const int64_t values : {20, 64}) {
    Pool expected(values), narrow(values), wide(values);
    expected.run_on_cpu<int32_t>({4, 1, -1, 0}, Mode::kRecurrent);
    narrow.run_on_gpu<int32_t>({4, 1, -1, 0});
    wide.run_on_gpu<int64_t>({4, 1, Pool::kSlots, 0});  // a slot outside the pool is none
    for (const Pool* pool : {&narrow, &wide}) {
      expect_near(pool->output, expected.output);
      expect_near(pool->pool, expected.pool);
    }
  }
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
  arguments = head.arguments();
  std::vector<float> initial = random_floats(32);
  std::vector<int32_t> index{0};
  arguments.initial_state = view_of(initial, {1, 1, 8, 4});
  arguments.state_index = contiguous_view(index.data(), DType::kInt32, {1});
  EXPECT_NE(message_of([&] { linear_attention::forward(arguments, context); }).find("is not written in place"),
            std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch::linear_attention
