// That the gradients of attention are those of its forward: differences in fp64, every option.
#include "kernel_pytorch/ops/attention/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "kernel_pytorch/ops/attention/bound_test.h"

namespace kernel_pytorch::attention {
namespace {

// sum of output * weights + sum of lse * lse_weights: a number whose gradient backward computes.
struct Loss {
  std::vector<double> output_weights, lse_weights;
  double operator()(const ForwardProblem& problem) const {
    OwnContext context;
    check_and_run(problem, context);
    double sum = 0;
    const std::vector<double> outputs = values_of(problem.output), lses = values_of(problem.lse);
    for (size_t i = 0; i < outputs.size(); ++i) sum += outputs[i] * output_weights[i];
    for (size_t i = 0; i < lses.size(); ++i) sum += std::isinf(lses[i]) ? 0 : lses[i] * lse_weights[i];
    return sum;
  }
};

// Central differences of the loss by every element of `input`, which has memory without overlap or by broadcasting one
// element for many; offsets are those of memory.
void expect_gradient(const ForwardProblem& problem, const Loss& loss, const TensorView& input,
                     const TensorView& gradient, const std::string& name) {
  const std::vector<double> expected = values_of(gradient);
  const int64_t elements = span_elements(input);
  ASSERT_EQ(static_cast<int64_t>(expected.size()), elements) << name;
  for (int64_t i = 0; i<elements; i += elements> 60 ? 7 : 1) {
    constexpr double kStep = 1e-5;
    auto* at = input.as<double>() + i;
    const double kept = *at;
    *at = kept + kStep;
    const double above = loss(problem);
    *at = kept - kStep;
    const double below = loss(problem);
    *at = kept;
    EXPECT_NEAR((above - below) / (2 * kStep), expected[i], 2e-7) << name << "[" << i << "]";
  }
}

// tanh(score * captured[head, min(query, 2)] + key): the captured element stands inside, and is read many times.
constexpr const char* kRelative =
    "expression 1\ncapture fp64 2\n%0 = score\n%1 = head\n%2 = query\n%3 = int 2\n%4 = min %2 %3\n"
    "%5 = load 0 %1 %4\n%6 = mul %0 %5\n%7 = key\n%8 = to_float %7\n%9 = add %6 %8\n%10 = tanh %9\nreturn %10\n";
constexpr const char* kPrefix =
    "expression 1\ncapture fp64 2\n%0 = query\n%1 = key\n%2 = int 2\n%3 = lt %1 %2\n%4 = le %1 %0\n%5 = or %3 %4\n"
    "return %5\n";

TEST(Attention, GradientsAreThoseOfTheForward) {
  using RequestOptions = std::vector<std::pair<std::string, std::string>>;
  const std::pair<std::vector<int64_t>, RequestOptions> cases[] = {
      {{1, 2, 5, 6, 4}, {}},
      {{2, 4, 5, 7, 3}, {{"key_heads", "2"}, {"causal", "1"}, {"value_size", "2"}, {"sinks", "1"}}},
      {{1, 2, 6, 4, 3}, {{"causal", "1"}, {"softcap", "0.7"}, {"bias", "full"}}},
      {{2, 2, 4, 5, 3}, {{"softcap", "0.9"}, {"softcap_after_bias", "1"}, {"bias", "query"}, {"alibi", "1"}}},
      {{2, 2, 4, 5, 3}, {{"bias", "batch"}, {"dropout", "0.4"}, {"window_left", "2"}, {"sinks", "1"}}},
      {{2, 2, 4, 5, 3}, {{"bias", "head"}, {"mask", "full"}, {"segments", "1"}, {"lengths", "1"}}},
      {{1, 2, 12, 14, 3}, {{"sequences", "3"}, {"bias", "all"}, {"causal", "1"}, {"dropout", "0.2"}}},
      {{2, 2, 4, 5, 3}, {{"score_mod", kRelative}, {"captured", "2x3"}, {"bias", "full"}, {"softcap", "2"}}},
      {{1, 2, 12, 14, 3}, {{"sequences", "3"}, {"score_mod", kRelative}, {"captured", "2x3"}, {"mask_mod", kPrefix}}},
      {{1, 2, 9, 9, 3}, {{"blocks", "2"}, {"alibi", "1"}, {"sinks", "1"}, {"scale", "-0.8"}}},
  };
  for (const auto& [shape, options] : cases) {
    SCOPED_TRACE(options.empty() ? "plain" : options[0].first);
    Bound<ForwardProblem> bound = make(shape, DType::kFloat64, options);
    const ForwardProblem& problem = bound.problem;
    std::mt19937 random(11);
    std::normal_distribution<double> normal;
    Loss loss{std::vector<double>(problem.output.element_count()), std::vector<double>(problem.lse.element_count())};
    for (double& weight : loss.output_weights) weight = normal(random);
    for (double& weight : loss.lse_weights) weight = normal(random);
    OwnContext context;
    check_and_run(problem, context);
    BackwardProblem derivative =
        make_backward({.shape = shape, .dtype = DType::kFloat64, .device = {}, .options = options});
    Bound<ForwardProblem> gradients;
    for (TensorView* view : {&derivative.grad_query, &derivative.grad_key, &derivative.grad_value,
                             &derivative.grad_bias, &derivative.grad_sinks}) {
      if (view->is_present()) *view = gradients.own(*view, '\xff');
    }
    for (TensorView& view : derivative.grad_captured) view = gradients.own(view, '\xff');
    derivative.query = problem.query;
    derivative.key = problem.key;
    derivative.value = problem.value;
    derivative.output = problem.output;
    derivative.lse = problem.lse;
    derivative.scoring = problem.scoring;
    derivative.grad_output = gradients.own(problem.output);
    store_values(derivative.grad_output, loss.output_weights);
    derivative.grad_lse = gradients.own(problem.lse);
    store_values(derivative.grad_lse, loss.lse_weights);
    Bound<ForwardProblem> kept;  // differences run the forward again, which writes output and lse
    derivative.output = kept.own(problem.output);
    derivative.lse = kept.own(problem.lse);
    store_values(derivative.output, values_of(problem.output));
    store_values(derivative.lse, values_of(problem.lse));
    check_and_run(derivative, context);
    expect_gradient(problem, loss, problem.query, derivative.grad_query, "query");
    expect_gradient(problem, loss, problem.key, derivative.grad_key, "key");
    expect_gradient(problem, loss, problem.value, derivative.grad_value, "value");
    if (derivative.grad_bias.is_present()) {
      expect_gradient(problem, loss, problem.scoring.bias, derivative.grad_bias, "bias");
    }
    for (const TensorView& gradient : derivative.grad_captured) {
      expect_gradient(problem, loss, problem.scoring.captured[0], gradient, "captured");
    }
    if (derivative.grad_sinks.is_present()) {
      expect_gradient(problem, loss, problem.scoring.sinks, derivative.grad_sinks, "sinks");
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
