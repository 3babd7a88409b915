// Every op, every kernel and config the machine has, against the reference, over the op's own shapes.
#include "kernel_pytorch/ops/operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "kernel_pytorch/base/options.h"
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

// KP_TEST_SHAPES=2/7/50000: of each op's shapes of at most 50,000 points (the product of the sizes) the second of every
// seven, for a machine that is emulated.
struct Sample {
  int first = 1, every = kEvery;
  int64_t points = std::numeric_limits<int64_t>::max();
};
Sample sample_of_shapes() {
  const std::string text = environment("KP_TEST_SHAPES");
  Sample sample;
  if (text.empty()) return sample;
  std::istringstream stream(text);
  char slash = 0, second_slash = 0;
  stream >> sample.first >> slash >> sample.every >> second_slash >> sample.points;
  if (!stream || sample.first < 1 || sample.every < 1) throw std::invalid_argument("KP_TEST_SHAPES=" + text);
  return sample;
}

int64_t points_of(const registry::ProblemRequest& request) {
  int64_t points = 1;
  for (int64_t size : request.shape) points *= std::max<int64_t>(size, 1);
  return points;
}

// The shapes to verify; of an op with few of them one, whatever the sample.
std::vector<registry::ProblemRequest> sampled(std::vector<registry::ProblemRequest> shapes, const Sample& sample) {
  const auto least = std::min_element(shapes.begin(), shapes.end(),
                                      [](const auto& a, const auto& b) { return points_of(a) < points_of(b); });
  if (least == shapes.end()) return shapes;
  const int64_t points = std::max(sample.points, points_of(*least));
  std::erase_if(shapes, [&](const auto& request) { return points_of(request) > points; });
  std::vector<registry::ProblemRequest> chosen;
  for (size_t i = static_cast<size_t>(sample.first - 1) % shapes.size(); i < shapes.size();
       i += static_cast<size_t>(sample.every)) {
    chosen.push_back(shapes[i]);
  }
  return chosen;
}

class Operation : public testing::TestWithParam<const registry::AnyOperation*> {
 protected:
  static void verify_every_kernel_on(Device device) {
    const Sample sample = sample_of_shapes();
    const std::vector<registry::ProblemRequest> shapes = GetParam()->shapes(), chosen = sampled(shapes, sample);
    for (registry::ProblemRequest request : chosen) {
      if (device.kind == DeviceKind::kCuda && request.dtype == DType::kFloat64) continue;
      request.device = device;
      for (const std::string& failure : GetParam()->verify(request))
        ADD_FAILURE() << text_of(request) << ": " << failure;
    }
    if (sample.every > 1)
      std::cout << GetParam()->name << ": " << chosen.size() << " of " << shapes.size() << " shapes\n";
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
