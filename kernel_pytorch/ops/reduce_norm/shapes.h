// Lists that the norm is tested and measured on: [tensors, average elements]. On the CPU; whoever wants a GPU sets the
// device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::reduce_norm {

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (auto [tensors, average] : {std::pair<int64_t, int64_t>{1, 1},
                                    {1, 0},
                                    {3, 7},
                                    {1, 16384},
                                    {1, 16385},
                                    {7, 1000},
                                    {200, 3001},
                                    {1500, 40},
                                    {5, 300000}}) {
      requests.push_back({.shape = {tensors, average}, .dtype = dtype, .device = {}, .options = {}});
    }
  }
  requests.push_back({.shape = {7, 1000}, .dtype = DType::kFloat64, .device = {}, .options = {}});
  return requests;
}

}  // namespace kernel_pytorch::reduce_norm
