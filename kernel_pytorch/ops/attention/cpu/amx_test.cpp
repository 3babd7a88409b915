// The AMX kernels against the reference, on every shape in bf16: with tiles emulated, and with AMX where the machine
// has it.
#include <gtest/gtest.h>

#include <cmath>

#include "kernel_pytorch/ops/attention/bound_test.h"
#include "kernel_pytorch/ops/attention/cpu/plan.h"
#include "kernel_pytorch/ops/attention/shapes.h"
#include "kernel_pytorch/registry/declared.h"

#if defined(__x86_64__)
namespace kernel_pytorch::attention {
namespace isa_v4 {
extern const TileKernels kAmxKernels;  // attention/cpu/amx_forward_probes_isa.cpp
}
namespace {

template <class Problem>
std::vector<std::vector<double>> results_of(const registry::Operation<Problem>& operation, Problem problem) {
  std::vector<std::vector<double>> results;
  operation.visit_tensors(
      problem,
      [](void* state, std::string_view, registry::Role role, TensorView& view) {
        if (role == registry::Role::kInput) return;
        static_cast<std::vector<std::vector<double>>*>(state)->push_back(values_of(view));
      },
      &results);
  return results;
}

// Probabilities and gradients of scores are rounded to bf16 before the second products.
void expect_close(const std::vector<std::vector<double>>& actual, const std::vector<std::vector<double>>& expected,
                  const std::string& name) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t t = 0; t < actual.size(); ++t) {
    double largest = 1;
    for (double value : expected[t]) largest = std::max(largest, std::isfinite(value) ? std::abs(value) : 0);
    for (size_t i = 0; i < actual[t].size(); ++i) {
      if (actual[t][i] == expected[t][i]) continue;  // infinities
      ASSERT_NEAR(actual[t][i], expected[t][i], 0.015 * largest) << name << ", result " << t << ", element " << i;
    }
  }
}

template <class Problem, class Run>
void expect_reference(const registry::Operation<Problem>& operation, const registry::Kernel<Problem>& reference,
                      Run run) {
  int compared = 0;
  for (const registry::ProblemRequest& request : shapes()) {
    if (request.dtype != DType::kBFloat16) continue;
    std::string name{operation.name};
    for (int64_t size : request.shape) name += " " + std::to_string(size);
    for (const auto& [word, value] : request.options) name += " " + word + "=" + value;
    Bound<Problem> bound = bind(operation, registry::make_problem(operation, request));
    OwnContext context;
    reference.run(bound.problem, 0, context);
    const auto expected = results_of(operation, bound.problem);
    Bound<Problem> again = bind(operation, registry::make_problem(operation, request));  // results may be added to
    run(again.problem, context);
    expect_close(results_of(operation, again.problem), expected, name);
    if (testing::Test::HasFatalFailure()) return;
    ++compared;
  }
  EXPECT_GT(compared, 20);
}

std::vector<const TileKernels*> tables() {
  const CpuIsa isa = device_info({}).cpu.machine_isa;
  std::vector<const TileKernels*> tables;
  if (isa >= CpuIsa::kX86V4) tables.push_back(&isa_v4::kAmxKernels);
  if (isa >= CpuIsa::kX86V4Amx) tables.push_back(&isa_v4amx::kAmxKernels);
  return tables;
}

TEST(AttentionAmx, ForwardIsTheReference) {
  if (tables().empty()) GTEST_SKIP() << "this CPU has no AVX-512";
  for (const TileKernels* table : tables()) {
    expect_reference(kForward, kForwardReference,
                     [&](const ForwardProblem& problem, Context& context) { run_forward(problem, *table, context); });
  }
}

TEST(AttentionAmx, BackwardIsTheReference) {
  if (tables().empty()) GTEST_SKIP() << "this CPU has no AVX-512";
  for (const TileKernels* table : tables()) {
    expect_reference(kBackward, kBackwardReference,
                     [&](const BackwardProblem& problem, Context& context) { run_backward(problem, *table, context); });
  }
}

}  // namespace
}  // namespace kernel_pytorch::attention
#endif
