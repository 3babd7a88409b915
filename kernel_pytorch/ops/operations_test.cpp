// Every op, every kernel and config the machine has, against the reference, over the op's own shapes.
#include "kernel_pytorch/ops/operations.h"

#include <gtest/gtest.h>

#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch {
namespace {

std::string text_of(const registry::ProblemRequest& request) {
  std::string text = shape_text(request.shape) + " " + std::string(name_of(request.dtype));
  for (const auto& [name, value] : request.options) text += " " + name + "=" + value;
  return text;
}

// Races between threads do not wait for a certain shape, and under ThreadSanitizer a reference takes minutes.
#if defined(__SANITIZE_THREAD__)
constexpr int kEvery = 6;
#else
constexpr int kEvery = 1;
#endif

class Operation : public testing::TestWithParam<const registry::AnyOperation*> {
 protected:
  static void verify_every_kernel_on(Device device) {
    int number = 0;
    for (registry::ProblemRequest request : GetParam()->shapes()) {
      if (number++ % kEvery != 0) continue;
      if (device.kind == DeviceKind::kCuda && request.dtype == DType::kFloat64) continue;
      request.device = device;
      for (const std::string& failure : GetParam()->verify(request))
        ADD_FAILURE() << text_of(request) << ": " << failure;
    }
  }
};

TEST_P(Operation, MatchesItsReferenceOnTheCpu) {
  verify_every_kernel_on({});
}

TEST_P(Operation, MatchesItsReferenceOnTheGpu) {
  if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
  verify_every_kernel_on({DeviceKind::kCuda, 0});
}

std::vector<const registry::AnyOperation*> all_operations() {
  std::vector<const registry::AnyOperation*> all;
  for (const registry::AnyOperation& operation : operations()) all.push_back(&operation);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Every, Operation, testing::ValuesIn(all_operations()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(Operations, NamesAreUniqueAndFound) {
  for (const registry::AnyOperation& operation : operations()) EXPECT_EQ(find_operation(operation.name), &operation);
  EXPECT_EQ(find_operation("no_such_op"), nullptr);
}

TEST(Operations, ExplainGivesAReasonForEveryNo) {
  for (const registry::AnyOperation& operation : operations()) {
    for (const registry::ProblemRequest& request : operation.shapes()) {
      const registry::Explanation explanation = operation.explain(request, "");
      EXPECT_FALSE(explanation.chosen_kernel.empty()) << operation.name << " " << text_of(request);
      for (const auto& candidate : explanation.candidates) {
        EXPECT_NE(candidate.supported, !candidate.reason.empty()) << candidate.kernel;
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch
