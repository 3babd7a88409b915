// What a warm call pays between an op's entry and its kernel. Prints the figures; the bound is loose, since CI machines
// are busy, and still far below what text or a lock held too long would cost.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "kernel_pytorch/base/emulation_test.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/toy_operation_test.h"
#include "kernel_pytorch/tuning/temporary_store_test.h"

namespace kernel_pytorch::registry {
namespace {

const double kLooseBoundNanoseconds = unless_emulated(5000.0, 200'000.0);

class ChooseBenchmark : public tuning::TemporaryStore {};

// Five kernels, of which the fourth takes the problem, as on a machine where the first ones are for other hardware.
std::span<const Kernel<toy::Problem>> five_kernels() {
  static const Kernel<toy::Problem> kList[] = {toy::kFuture, toy::kFuture, toy::kFuture, toy::kAligned,
                                               toy::kReference};
  return kList;
}
const Operation<toy::Problem> kFive = toy::make_operation("toy_five", five_kernels);

double nanoseconds_per_choice(const toy::Problem& problem, Context& context) {
  constexpr int kCalls = 20000;
  double best = 1e9;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      const Choice<toy::Problem> choice = choose(kFive, problem, context);
      asm volatile("" : : "r"(choice.kernel) : "memory");
    }
    const double ns =
        std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kCalls;
    best = std::min(best, ns);
  }
  return best;
}

TEST_F(ChooseBenchmark, WarmCalls) {
  alignas(64) static float data[4096];
  toy::Problem problem;
  problem.x = contiguous_view(data, DType::kFloat32, {64, 64});
  problem.output = problem.x;
  OwnContext context;
  const double nothing_measured = nanoseconds_per_choice(problem, context);
  tuning::remember(tuning::make_test_key("another problem"), tuning::make_test_measurement());
  const double other_measured = nanoseconds_per_choice(problem, context);
  const tuning::Key key = make_key(BorrowedProblem<toy::Problem>(kFive, problem, *context->info));
  tuning::remember(key, {"aligned", "wait=0", 5, 0.1, tuning::utc_now(), "0.0.1"});
  const double this_measured = nanoseconds_per_choice(problem, context);
  std::printf(
      "choose, five kernels: %.0f ns with nothing measured, %.0f ns with another problem measured, "
      "%.0f ns with this one measured\n",
      nothing_measured, other_measured, this_measured);
  EXPECT_EQ(choose(kFive, problem, context).tier, tuning::Tier::kMemory);
  for (const double ns : {nothing_measured, other_measured, this_measured}) EXPECT_LT(ns, kLooseBoundNanoseconds);
}

}  // namespace
}  // namespace kernel_pytorch::registry
