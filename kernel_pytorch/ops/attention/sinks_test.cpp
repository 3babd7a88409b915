// A sink of NaN reaches output, lse and every gradient of its head, and of no other: the reference and the kernels of
// every instruction level that this machine has.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/cpu/plan.h"

namespace kernel_pytorch::attention {
#if defined(__x86_64__)
namespace isa_v4 {
extern const TileKernels kAmxKernels;  // attention/cpu/amx_forward_probes_isa.cpp
}
#endif
namespace {

struct Level {
  std::string name;
  std::vector<DType> dtypes;
  std::function<void(const ForwardProblem&, Context&)> forward;
  std::function<void(const BackwardProblem&, Context&)> backward;
};

std::vector<Level> levels() {
  std::vector<Level> all = {
      {"reference",
       {DType::kFloat64, DType::kFloat32, DType::kBFloat16},
       [](const ForwardProblem& problem, Context& context) { kForwardReference.run(problem, 0, context); },
       [](const BackwardProblem& problem, Context& context) { kBackwardReference.run(problem, 0, context); }}};
  const auto add = [&](const char* name, std::vector<DType> dtypes, const TileKernels& table) {
    all.push_back(
        {name, std::move(dtypes),
         [&table](const ForwardProblem& problem, Context& context) { run_forward(problem, table, context); },
         [&table](const BackwardProblem& problem, Context& context) { run_backward(problem, table, context); }});
  };
  const CpuIsa isa = device_info({}).cpu.machine_isa;
#if defined(__x86_64__)
  add("v2", {DType::kFloat32, DType::kBFloat16}, isa_v2::kTileKernels);
  if (isa >= CpuIsa::kX86V3) add("v3", {DType::kFloat32, DType::kBFloat16}, isa_v3::kTileKernels);
  if (isa >= CpuIsa::kX86V4) add("v4", {DType::kFloat32, DType::kFloat16}, isa_v4::kTileKernels);
  if (isa >= CpuIsa::kX86V4) add("amx emulated", {DType::kBFloat16}, isa_v4::kAmxKernels);
  if (isa >= CpuIsa::kX86V4Amx) add("amx", {DType::kBFloat16}, isa_v4amx::kAmxKernels);
#else
  add("neon", {DType::kFloat32, DType::kBFloat16}, isa_neon::kTileKernels);
  if (isa >= CpuIsa::kSve256) add("sve256", {DType::kFloat32, DType::kFloat16}, isa_sve256::kTileKernels);
#endif
  return all;
}

void set_sink_of_nan(const TensorView& sinks) {
  store_element(sinks.data, sinks.dtype, 0, std::numeric_limits<double>::quiet_NaN());
}

// For a tensor [1, 2, ...]: head 0 is all NaN, head 1 has none.
void expect_first_head(const TensorView& view, const std::string& what) {
  const std::vector<double> values = values_of(view);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(std::isnan(values[i]), i < values.size() / 2) << what << ", element " << i;
  }
}

TEST(AttentionSinks, NanReachesOutputAndLse) {
  OwnContext context;
  // Every row sees keys; rows that see none; what other parts gave.
  const std::vector<std::vector<std::pair<std::string, std::string>>> cases = {
      {}, {{"causal", "1"}, {"causal_offset", "-5"}}, {{"accumulate", "1"}}, {{"alibi", "1"}, {"softcap", "2"}}};
  for (const Level& level : levels()) {
    for (DType dtype : level.dtypes) {
      for (auto options : cases) {
        options.push_back({"sinks", "1"});
        Bound<ForwardProblem> bound = make({1, 2, 100, 130, 24}, dtype, options);
        set_sink_of_nan(bound.problem.scoring.sinks);
        level.forward(bound.problem, context);
        const std::string what = level.name + ", " + options.front().first;
        expect_first_head(bound.problem.output, what + ": output");
        expect_first_head(bound.problem.lse, what + ": lse");
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(AttentionSinks, NanReachesEveryGradient) {
  OwnContext context;
  for (const Level& level : levels()) {
    for (DType dtype : level.dtypes) {
      const std::vector<std::pair<std::string, std::string>> options = {{"sinks", "1"}, {"grad_lse", "1"}};
      const registry::ProblemRequest request{
          .shape = {1, 2, 100, 130, 24}, .dtype = dtype, .device = {}, .options = options};
      Bound<BackwardProblem> bound = bind(kBackward, make_backward(request));
      Bound<ForwardProblem> forward = make(request.shape, dtype, {{"sinks", "1"}});
      BackwardProblem& problem = bound.problem;
      set_sink_of_nan(problem.scoring.sinks);
      forward.problem.scoring.sinks = problem.scoring.sinks;
      forward.problem.query = problem.query, forward.problem.key = problem.key, forward.problem.value = problem.value;
      level.forward(forward.problem, context);
      problem.output = forward.problem.output, problem.lse = forward.problem.lse;
      level.backward(problem, context);
      for (const auto& [name, view] : {std::pair{"grad_query", &problem.grad_query},
                                       {"grad_key", &problem.grad_key},
                                       {"grad_value", &problem.grad_value},
                                       {"grad_sinks", &problem.grad_sinks}}) {
        expect_first_head(*view, level.name + ": " + name);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// No sink at all, and one that is none.
TEST(AttentionSinks, MinusInfinityIsNoSink) {
  OwnContext context;
  for (const Level& level : levels()) {
    Bound<ForwardProblem> bound =
        make({1, 2, 60, 50, 24}, level.dtypes.front(), {{"sinks", "1"}, {"causal", "1"}, {"causal_offset", "-5"}});
    for (int head = 0; head < 2; ++head) {
      const TensorView& sinks = bound.problem.scoring.sinks;
      store_element(sinks.data, sinks.dtype, head, -HUGE_VAL);
    }
    level.forward(bound.problem, context);
    const std::vector<double> output = values_of(bound.problem.output), lse = values_of(bound.problem.lse);
    bound.problem.scoring.sinks = {};
    level.forward(bound.problem, context);
    EXPECT_EQ(values_of(bound.problem.output), output) << level.name;
    EXPECT_EQ(values_of(bound.problem.lse), lse) << level.name;
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
