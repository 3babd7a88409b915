// Shapes that the lists are tested and measured on. build: [batch, heads, rows, columns]. select: [batch,
// heads, queries, keys, size]. On the CPU; whoever wants a
// GPU sets the device.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::block_list {

inline std::vector<registry::ProblemRequest> build_shapes() {
  std::vector<registry::ProblemRequest> requests;
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {1, 1, 1, 1}, {2, 3, 5, 7}, {1, 2, 64, 64}, {1, 2, 33, 150}, {2, 1, 130, 31}, {1, 0, 4, 4}, {1, 1, 0, 5}}) {
    for (const char* lists : {"all", "rows", "columns", "partial"}) {
      requests.push_back({.shape = shape, .dtype = DType::kInt8, .device = {}, .options = {{"lists", lists}}});
    }
  }
  requests.push_back({.shape = {1, 2, 40, 70}, .dtype = DType::kBool, .device = {}, .options = {{"lists", "partial"}}});
  return requests;
}

inline std::vector<registry::ProblemRequest> select_shapes() {
  using Options = std::vector<std::pair<std::string, std::string>>;
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype, Options options) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({2, 2, 1000, 1000, 64}, dtype, {});
    add({1, 4, 700, 1900, 40}, dtype, {{"key_heads", "2"}, {"key_parts", "4"}, {"causal", "0"}});
    add({1, 2, 2100, 2100, 7}, dtype, {{"query_block", "128"}, {"key_block", "16"}, {"key_parts", "2"}});
    add({1, 2, 520, 520, 128}, dtype, {{"query_block", "8"}, {"key_block", "8"}, {"sparsity", "0.9"}, {"map", "0"}});
  }
  add({1, 2, 900, 900, 32}, DType::kFloat32, {{"threshold", "1"}, {"sinks", "0"}, {"local", "0"}});
  add({2, 3, 640, 640, 0}, DType::kFloat32, {{"scores", "1"}, {"sparsity", "0.5"}});
  add({1, 1, 300, 300, 16}, DType::kFloat32, {{"sparsity", "0"}});
  add({1, 1, 300, 300, 16}, DType::kFloat32, {{"sparsity", "1"}, {"local", "5"}});
  for (const char* causal : {"0", "1"}) {
    add({5, 2, 700, 900, 32}, DType::kBFloat16, {{"lengths", "1"}, {"causal", causal}, {"key_parts", "4"}});
    add({4, 2, 500, 500, 0}, DType::kFloat32, {{"lengths", "1"}, {"causal", causal}, {"scores", "1"}});
  }
  add({1, 2, 0, 300, 16}, DType::kFloat32, {});
  add({1, 2, 300, 0, 16}, DType::kFloat32, {});
  add({1, 2, 1900, 300, 16}, DType::kFloat32, {{"query_block", "32"}});  // rows before the first key
  add({1, 1, 300, 300, 16}, DType::kFloat64, {});
  return requests;
}

}  // namespace kernel_pytorch::block_list
