// bf16 to E2M1 on a GPU by pairs: the same bits as the CPU's, for every number and under all kinds of scales.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/group_quantize/group_quantize.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::group_quantize {
namespace {

struct Bits {
  std::vector<uint8_t> codes, scales;
};

constexpr int64_t kColumns = 1536, kGap = 8;  // elements between rows of x

// By a kernel of a device.
Bits quantized_on(Device device, const std::string& kernel, Format format, const std::vector<uint16_t>& x,
                  float tensor_scale) {
  const int64_t group = format == Format::kNvfp4 ? 16 : 32, stride = kColumns + kGap,
                rows = static_cast<int64_t>(x.size()) / stride;
  Bits bits{std::vector<uint8_t>(static_cast<size_t>(rows * kColumns / 2), 0xaa),
            std::vector<uint8_t>(static_cast<size_t>(rows * kColumns / group), 0xaa)};
  OwnContext context(device);
  context->kernel_override = kernel;
  registry::DeviceBuffer on_x(device, x.size() * 2), on_scale(device, sizeof(float)),
      on_codes(device, bits.codes.size()), on_scales(device, bits.scales.size());
  on_x.copy_from_host(x.data(), context->stream);
  on_scale.copy_from_host(&tensor_scale, context->stream);
  const DType scale_type = format == Format::kNvfp4 ? DType::kFloat8E4M3 : DType::kInt8;
  Quantize arguments{.x = contiguous_view(on_x.data(), DType::kBFloat16, {rows, kColumns}, device),
                     .format = format,
                     .group = group,
                     .codes = contiguous_view(on_codes.data(), DType::kInt8, {rows, kColumns / 2}, device),
                     .scales = contiguous_view(on_scales.data(), scale_type, {rows, kColumns / group}, device)};
  arguments.x.strides[0] = stride;
  if (format == Format::kNvfp4) {
    arguments.tensor_scale = contiguous_view(on_scale.data(), DType::kFloat32, {1}, device);
  }
  quantize(arguments, context);
  on_codes.copy_to_host(bits.codes.data(), context->stream);
  on_scales.copy_to_host(bits.scales.data(), context->stream);
  return bits;
}

TEST(GroupQuantizePairsOnGpu, EveryNumberHasTheBitsOfTheCpu) {
  if (!cuda_absence().empty()) GTEST_SKIP() << cuda_absence();
  if (!jit::nvrtc_info().found) GTEST_SKIP() << jit::nvrtc_info().absence;
  constexpr int64_t kRows = 129;  // three passes over all numbers: in order, shuffled, and of about one size
  std::vector<uint16_t> x(kRows * (kColumns + kGap));
  std::mt19937 random(7);
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t any = random();
    const size_t third = i / (x.size() / 3);
    x[i] = static_cast<uint16_t>(third == 0 ? i : third == 1 ? any : (any & 0x83ff) | 0x3e00);
  }
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const float tensor_scale : {1.0f, 0.25f, 0.3f, 0x1p-120f, 0x1p120f}) {
      const Bits expected = quantized_on({}, "cpu", format, x, tensor_scale);
      for (const char* kernel : {"cuda paired=0", "cuda paired=1"}) {
        const Bits actual = quantized_on({DeviceKind::kCuda, 0}, kernel, format, x, tensor_scale);
        EXPECT_EQ(actual.scales, expected.scales) << kernel << " " << static_cast<int>(format) << " " << tensor_scale;
        EXPECT_EQ(actual.codes, expected.codes) << kernel << " " << static_cast<int>(format) << " " << tensor_scale;
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::group_quantize
