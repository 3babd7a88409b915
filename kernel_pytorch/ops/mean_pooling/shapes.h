// Shapes that the poolings are tested and measured on: [batch, tokens, columns]; with sequences=N the batch is 1. On
// the CPU; whoever wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::mean_pooling {

inline void add_shapes(std::vector<registry::ProblemRequest>& requests, const std::string& name,
                       std::initializer_list<const char*> values) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* value : values) {
      const bool is_packed = name == "sequences" && std::string(value) != "0";
      for (auto [batch, tokens, columns] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                            {3, 37, 7},
                                            {2, 300, 520},
                                            {1, 5000, 64},
                                            {5, 64, 1024},
                                            {2, 0, 8}}) {
        if (is_packed && tokens == 0) continue;
        requests.push_back({.shape = {is_packed ? 1 : batch, tokens, columns},
                            .dtype = dtype,
                            .device = {},
                            .options = {{name, value}}});
      }
    }
    requests.push_back(
        {.shape = {2, 130, 64}, .dtype = dtype, .device = {}, .options = {{name, *values.begin()}, {"heads", "3"}}});
  }
  requests.push_back(
      {.shape = {2, 33, 5}, .dtype = DType::kFloat64, .device = {}, .options = {{name, *values.begin()}}});
}

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  add_shapes(requests, "sequences", {"0", "1", "7"});
  return requests;
}
inline std::vector<registry::ProblemRequest> chunk_shapes() {
  std::vector<registry::ProblemRequest> requests;
  add_shapes(requests, "chunk", {"32", "1", "100"});
  return requests;
}

}  // namespace kernel_pytorch::mean_pooling
