// Shapes that rope is tested and measured on: [batch, sequence, heads, head_dim], every option. On the CPU; whoever
// wants a GPU sets the device.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::rope {

inline std::vector<registry::ProblemRequest> shapes() {
  using Options = std::vector<std::pair<std::string, std::string>>;
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype, Options options) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const char* interleaved : {"0", "1"}) {
      const std::pair<std::string, std::string> mode = {"interleaved", interleaved};
      add({2, 17, 8, 128}, dtype, {mode});
      add({1, 33, 4, 64}, dtype, {mode, {"inverse", "1"}, {"key_heads", "1"}, {"table", "full"}});
      add({2, 9, 6, 80}, dtype, {mode, {"rotary_dim", "32"}, {"key_heads", "2"}});
      add({2, 9, 3, 96}, dtype, {mode, {"rotary_dim", "64"}, {"in_place", "1"}, {"positions", "int64"}});
      add({3, 5, 2, 10}, dtype, {mode, {"rotary_dim", "6"}, {"positions", "int32"}});
      add({2, 7, 5, 72}, dtype, {mode, {"key_heads", "0"}, {"table", "computed"}, {"positions", "int32"}});
      add({2, 31, 8, 128}, dtype, {mode, {"packed", "1"}, {"key_heads", "2"}, {"table_dtype", "fp32"}});
      add({2, 13, 4, 64}, dtype, {mode, {"heads_first", "1"}, {"table", "computed"}});
      add({2, 13, 4, 48}, dtype, {mode, {"heads_first", "1"}, {"table", "batch"}});
    }
    add({0, 16, 4, 64}, dtype, {});
    add({2, 0, 4, 64}, dtype, {});
    add({1, 1, 1, 2}, dtype, {});
    add({1, 300, 32, 128}, dtype, {{"key_heads", "8"}});
  }
  for (auto& request : requests) {
    if (request.dtype != DType::kFloat64) continue;
    std::erase_if(request.options, [](const auto& option) { return option.first == "table_dtype"; });
  }
  return requests;
}

}  // namespace kernel_pytorch::rope
