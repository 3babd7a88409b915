// Shapes that embedding is tested and measured on: [positions, columns], rows of the table as an option. On the CPU;
// whoever wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::embedding {

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](int64_t positions, int64_t columns, const char* rows, DType dtype,
                       std::vector<std::pair<std::string, std::string>> more = {}) {
    more.emplace_back("rows", rows);
    requests.push_back({.shape = {positions, columns}, .dtype = dtype, .device = {}, .options = std::move(more)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add(1, 1, "1", dtype);
    add(0, 64, "10", dtype);
    add(37, 7, "5", dtype);
    add(300, 64, "1000", dtype);
    add(1000, 1032, "77", dtype, {{"indices", "int32"}});
    add(2500, 520, "4000", dtype, {{"padding", "3"}});
    add(5000, 96, "3", dtype, {{"padding", "1"}});
    add(4000, 33, "2", dtype);
    add(64, 4096, "300", dtype);
  }
  add(40, 9, "11", DType::kFloat64, {{"padding", "0"}});
  return requests;
}

}  // namespace kernel_pytorch::embedding
