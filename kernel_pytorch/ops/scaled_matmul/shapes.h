// Shapes that the scaled product is tested and measured on: [m, n, k], the type being the output's. On the CPU; whoever
// wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::scaled_matmul {

inline std::vector<registry::ProblemRequest> shapes() {
  using Options = std::vector<std::pair<std::string, std::string>>;
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype, Options options) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  constexpr DType kFp32 = DType::kFloat32, kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  for (const char* scale : {"tensor", "row", "1x128"}) {
    add({1, 1, 1}, kFp32, {{"scale_a", scale}, {"scale_b", scale}});
    add({65, 130, 200}, kFp32, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "fp32"}});
    add({128, 256, 512}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"a", "e5m2"}});
    add({300, 144, 1040}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"b", "e5m2"}, {"bias", "bf16"}});
    add({17, 640, 384}, kFp16, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "fp16"}, {"padded", "1"}});
    add({0, 16, 32}, kBf16, {{"scale_a", scale}, {"scale_b", scale}});
    add({16, 32, 0}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "bf16"}});
  }
  for (const char* scale : {"1x128", "128x128"}) {
    add({200, 300, 400}, kFp32, {{"scale_a", scale}, {"scale_b", "128x128"}, {"bias", "fp32"}});
    add({256, 384, 1024}, kBf16, {{"scale_a", scale}, {"scale_b", "128x128"}});
  }
  add({256, 256, 256}, kBf16, {{"accurate", "0"}});
  add({256, 256, 256}, kBf16, {{"amax", "1"}});
  add({130, 272, 768}, kBf16, {{"accurate", "0"}, {"scale_a", "row"}, {"scale_b", "row"}, {"bias", "bf16"}});
  add({130, 272, 320}, DType::kFloat8E4M3, {{"amax", "1"}, {"bias", "bf16"}});
  add({96, 128, 256}, DType::kFloat8E5M2, {{"scale_a", "row"}, {"scale_b", "row"}});
  return requests;
}

}  // namespace kernel_pytorch::scaled_matmul
