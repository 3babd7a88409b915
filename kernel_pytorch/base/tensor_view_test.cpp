#include "kernel_pytorch/base/tensor_view.h"

#include <gtest/gtest.h>

#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch {
namespace {

TEST(DType, NamesParseBackAndSizesAreTheTypes) {
  const int64_t sizes[] = {4, 8, 2, 2, 1, 1, 1, 4, 8, 1};
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
    EXPECT_EQ(size_of(dtype), sizes[i]) << name_of(dtype);
    EXPECT_EQ(is_floating(dtype), i < 6) << name_of(dtype);
  }
}

TEST(DType, TorchNamesParse) {
  EXPECT_EQ(parse_dtype("float32"), DType::kFloat32);
  EXPECT_EQ(parse_dtype("bfloat16"), DType::kBFloat16);
  EXPECT_EQ(parse_dtype("half"), DType::kFloat16);
  EXPECT_EQ(parse_dtype("float8_e4m3fn"), DType::kFloat8E4M3);
  EXPECT_EQ(parse_dtype("long"), DType::kInt64);
  for (const char* wrong : {"", "fp", "FP32", "fp32 ", "bf16x", "complex64"})
    EXPECT_EQ(parse_dtype(wrong), std::nullopt) << wrong;
}

TEST(Device, ParsesItsOwnTextAndNothingElse) {
  EXPECT_EQ(parse_device("cpu"), Device{});
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceKind::kCuda, 0}));
  for (int16_t index : {0, 1, 7, 32767}) {
    const Device device{DeviceKind::kCuda, index};
    EXPECT_EQ(parse_device(to_string(device)), device);
  }
  for (const char* wrong : {"", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1x", "cuda:32768",
                            "cuda0", "cuda:99999999999999999999", "gpu", " cpu"}) {
    EXPECT_EQ(parse_device(wrong), std::nullopt) << wrong;
  }
}

TEST(TensorView, ContiguousStridesForManyShapes) {
  float data[1];
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
           {}, {1}, {7}, {2, 3}, {2, 1, 3}, {0, 5}, {5, 0}, {4, 3, 2, 1}, {1, 1, 1, 1, 1, 1, 1, 9}}) {
    const TensorView view = contiguous_view(data, DType::kFloat32, sizes);
    ASSERT_EQ(view.rank, static_cast<int>(sizes.size()));
    EXPECT_TRUE(is_contiguous(view)) << to_string(view);
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    EXPECT_EQ(view.element_count(), count);
    EXPECT_EQ(view.byte_count(), 4 * count);
    EXPECT_EQ(span_elements(view), count);
    if (!sizes.empty()) {
      EXPECT_EQ(view.size(-1), sizes.back());
      EXPECT_EQ(view.size(0), sizes.front());
      EXPECT_EQ(view.stride(-1), 1);
    }
  }
}

TEST(TensorView, StridesDecideContiguityAndSpan) {
  TensorView view = contiguous_view(nullptr, DType::kBFloat16, {4, 6});
  view.strides[0] = 10;
  EXPECT_FALSE(is_contiguous(view));
  EXPECT_EQ(span_elements(view), 3 * 10 + 6);
  EXPECT_EQ(view.byte_count(), 48);
  view.strides[0] = 0;  // expanded
  EXPECT_FALSE(is_contiguous(view));
  EXPECT_EQ(span_elements(view), 6);
  view.sizes[0] = 1;  // the stride of a size-1 dimension means nothing
  EXPECT_TRUE(is_contiguous(view));
  view.sizes[0] = 0;
  EXPECT_TRUE(is_contiguous(view));
  EXPECT_EQ(span_elements(view), 0);
  TensorView transposed = contiguous_view(nullptr, DType::kFloat32, {3, 5});
  std::swap(transposed.sizes[0], transposed.sizes[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  EXPECT_FALSE(is_contiguous(transposed));
  EXPECT_EQ(span_elements(transposed), 15);
}

TEST(TensorView, MoreThan2To31Elements) {
  const TensorView view = contiguous_view(nullptr, DType::kFloat32, {100000, 262144});
  EXPECT_EQ(view.element_count(), 26214400000);
  EXPECT_EQ(view.byte_count(), 104857600000);
  EXPECT_EQ(view.stride(0), 262144);
}

TEST(TensorView, AbsentAndText) {
  const TensorView absent;
  EXPECT_FALSE(absent.is_present());
  EXPECT_EQ(absent.element_count(), 0);
  EXPECT_TRUE(absent.shape().empty());
  EXPECT_EQ(to_string(absent), "absent");
  TensorView view = contiguous_view(nullptr, DType::kBFloat16, {8, 4096}, Device{DeviceKind::kCuda, 0});
  EXPECT_EQ(to_string(view), "bf16[8, 4096] on cuda:0");
  view.strides[0] = 8192;
  EXPECT_EQ(to_string(view), "bf16[8, 4096] strides [8192, 1] on cuda:0");
  std::ostringstream out;
  out << contiguous_view(nullptr, DType::kInt64, {});
  EXPECT_EQ(out.str(), "int64[] on cpu");
}

std::string message_of(const std::vector<int64_t>& sizes) {
  try {
    contiguous_view(nullptr, DType::kFloat32, sizes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "no error";
}

TEST(TensorView, BadShapesAreRefusedWithTheValues) {
  EXPECT_NE(message_of({1, 1, 1, 1, 1, 1, 1, 1, 1}).find("9 dimensions given, at most 8"), std::string::npos);
  EXPECT_NE(message_of({2, -3}).find("dimension 1 has size -3"), std::string::npos);
  EXPECT_NE(message_of({int64_t{1} << 40, int64_t{1} << 40}).find("more than 2^63 elements"), std::string::npos);
}

}  // namespace
}  // namespace kernel_pytorch
