// Lists that a step is tested and measured on: [parameters, average elements]. On the CPU; whoever wants a GPU sets the
// device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::adamw {

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](int64_t tensors, int64_t average, DType dtype,
                       std::vector<std::pair<std::string, std::string>> options = {}) {
    requests.push_back({.shape = {tensors, average}, .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (auto [tensors, average] :
         {std::pair<int64_t, int64_t>{1, 1}, {1, 0}, {3, 7}, {1, 4096}, {7, 5000}, {900, 20}, {3, 70001}}) {
      add(tensors, average, dtype);
    }
    add(5, 3001, dtype, {{"amsgrad", "1"}});
    add(5, 3001, dtype, {{"scale", "1"}, {"clip", "1"}});
    add(5, 3001, dtype, {{"skip", "1"}});
    add(5, 3001, dtype, {{"lr_tensor", "1"}, {"maximize", "1"}});
    if (dtype == DType::kFloat16) {
      add(5, 3001, dtype, {{"state", "fp16"}});
      continue;
    }
    add(5, 3001, dtype, {{"state", "bf16"}});
    add(5, 3001, dtype, {{"state", "bf16"}, {"stochastic", "1"}, {"amsgrad", "1"}});
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    add(7, 5000, dtype, {{"master", "1"}});
    add(5, 3001, dtype, {{"master", "1"}, {"amsgrad", "1"}, {"scale", "1"}});
  }
  add(5, 3001, DType::kBFloat16, {{"stochastic", "1"}});
  add(5, 3001, DType::kBFloat16, {{"master", "1"}, {"state", "bf16"}});
  add(5, 301, DType::kFloat64);
  add(5, 301, DType::kFloat64, {{"amsgrad", "1"}, {"clip", "1"}});
  return requests;
}

}  // namespace kernel_pytorch::adamw
