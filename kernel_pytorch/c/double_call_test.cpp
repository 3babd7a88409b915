// fp64 on a GPU by kp_call: ops with kernels for it run there, the others on the host, on copies of their tensors.
// Needs a GPU; tools/emulate has one.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::c_interface {
namespace {

struct Given {
  const char* name;
  std::vector<int64_t> sizes;
  std::vector<double> values;  // empty: an output
};

std::vector<double> waves(size_t count, double phase) {
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<double>(i) * 0.7 + phase);
  return values;
}

// The outputs of a call on a device, all tensors in one buffer: outputs lie between inputs.
std::vector<std::vector<double>> called(const char* op, const std::vector<Given>& given, kp_device place) {
  const Device device{static_cast<DeviceKind>(place.kind), 0};
  size_t elements = 0;
  std::vector<size_t> begins;
  for (const Given& one : given) {
    size_t count = 1;
    for (const int64_t size : one.sizes) count *= static_cast<size_t>(size);
    begins.push_back(elements);
    elements += count;
  }
  std::vector<double> all(elements, -7.0);
  for (size_t i = 0; i < given.size(); ++i)
    std::ranges::copy(given[i].values, all.begin() + static_cast<long>(begins[i]));
  const registry::DeviceBuffer memory(device, elements * sizeof(double));
  memory.copy_from_host(all.data(), nullptr);
  std::vector<kp_tensor> tensors;
  std::vector<kp_argument> arguments;
  for (size_t i = 0; i < given.size(); ++i) {
    tensors.push_back({static_cast<double*>(memory.data()) + begins[i], KP_FLOAT64, place,
                       static_cast<int>(given[i].sizes.size()), given[i].sizes.data(), nullptr});
  }
  for (size_t i = 0; i < given.size(); ++i) arguments.push_back(kp_tensor_argument(given[i].name, &tensors[i]));
  kp_context* context = nullptr;
  EXPECT_EQ(kp_context_create(place, nullptr, &context), KP_OK) << kp_last_error();
  EXPECT_EQ(kp_call(context, op, arguments.data(), arguments.size()), KP_OK) << op << ": " << kp_last_error();
  kp_context_destroy(context);
  memory.copy_to_host(all.data(), nullptr);
  std::vector<std::vector<double>> outputs;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto begin = all.begin() + static_cast<long>(begins[i]);
    const auto end = i + 1 < given.size() ? all.begin() + static_cast<long>(begins[i + 1]) : all.end();
    if (given[i].values.empty()) {
      outputs.emplace_back(begin, end);
    } else {
      EXPECT_TRUE(std::equal(begin, end, given[i].values.begin())) << op << " wrote into " << given[i].name;
    }
  }
  return outputs;
}

void compare_devices(const char* op, const std::vector<Given>& given) {
  const auto expected = called(op, given, {KP_CPU, 0}), actual = called(op, given, {KP_CUDA, 0});
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    for (size_t j = 0; j < expected[i].size(); ++j) ASSERT_NEAR(actual[i][j], expected[i][j], 1e-13) << op << " " << j;
  }
}

TEST(DoubleCall, EveryOpTakesFp64OnAGpu) {
  if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
  if (!jit::nvrtc_info().found) GTEST_SKIP() << jit::nvrtc_info().absence;
  // On the GPU.
  compare_devices("matmul", {{"a", {7, 5}, waves(35, 0)}, {"output", {7, 9}, {}}, {"b", {5, 9}, waves(45, 1)}});
  compare_devices("linear", {{"x", {7, 5}, waves(35, 0)}, {"output", {7, 9}, {}}, {"weight", {9, 5}, waves(45, 1)}});
  compare_devices("activation", {{"x", {7, 5}, waves(35, 0)}, {"output", {7, 5}, {}}});
  compare_devices("attention", {{"query", {1, 2, 6, 8}, waves(96, 0)},
                                {"key", {1, 2, 9, 8}, waves(144, 1)},
                                {"output", {1, 2, 6, 8}, {}},
                                {"value", {1, 2, 9, 8}, waves(144, 2)}});
  // On the host.
  compare_devices("softmax", {{"x", {7, 5}, waves(35, 0)}, {"output", {7, 5}, {}}});
  compare_devices("rms_norm", {{"x", {7, 5}, waves(35, 0)}, {"output", {7, 5}, {}}, {"weight", {5}, waves(5, 2)}});
  compare_devices("attention", {{"query", {1, 1, 6, 136}, waves(816, 0)},  // wider than the GPU's kernel takes
                                {"key", {1, 1, 9, 136}, waves(1224, 1)},
                                {"output", {1, 1, 6, 136}, {}},
                                {"value", {1, 1, 9, 136}, waves(1224, 2)}});
}

}  // namespace
}  // namespace kernel_pytorch::c_interface
