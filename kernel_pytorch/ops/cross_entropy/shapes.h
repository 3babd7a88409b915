// Shapes that cross_entropy is tested and measured on: the vocabularies of models, odd tails, every option. On the CPU;
// whoever wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::cross_entropy {

using Words = std::vector<std::pair<std::string, std::string>>;

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](int64_t rows, int64_t columns, DType dtype, Words options = {}) {
    requests.push_back({.shape = {rows, columns}, .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t columns : {1, 2, 7, 64, 129, 1000, 4096}) add(19, columns, dtype);
    for (int64_t columns : {32000, 50257, 128256, 262144}) add(3, columns, dtype);
    add(700, 8, dtype, {{"ignore_index", "3"}});
    add(70000, 8, dtype, {{"ignore_index", "3"}, {"weight", "fp32"}});  // so many that they are counted first
    add(0, 128, dtype);
    add(5, 4096, dtype, {{"gradient", "0"}});
    add(5, 4096, dtype, {{"reduction", "none"}});
    add(5, 4096, dtype, {{"reduction", "sum"}, {"z_loss", "0.001"}});
    add(5, 1000, dtype, {{"partials", "1"}});
    add(5, 1000, dtype, {{"partials", "1"}, {"parts", "3"}, {"softcap", "2"}});
    add(40, 30, dtype, {{"label_smoothing", "0.1"}, {"ignore_index", "2"}});
    add(7, 513, dtype, {{"weight", "same"}});
    add(7, 512, dtype, {{"weight", "fp32"}, {"label_smoothing", "0.2"}});
    add(7, 511, dtype, {{"softcap", "2"}});
    add(2, 65536, dtype,
        {{"softcap", "3"}, {"z_loss", "0.01"}, {"label_smoothing", "0.1"}, {"weight", "same"}, {"reduction", "mean"}});
    add(2, 65536, dtype, {{"label_smoothing", "0.1"}, {"z_loss", "0.01"}});
  }
  for (int64_t columns : {1, 5, 1000}) add(11, columns, DType::kFloat64);
  add(11, 30, DType::kFloat64, {{"softcap", "2"}, {"weight", "same"}, {"label_smoothing", "0.1"}});
  return requests;
}

inline std::vector<registry::ProblemRequest> rescale_shapes() {
  std::vector<registry::ProblemRequest> requests;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (int64_t columns : {0, 1, 15, 4096, 100003}) {
      requests.push_back({.shape = {3, columns}, .dtype = dtype, .device = {}, .options = {}});
    }
  }
  return requests;
}

}  // namespace kernel_pytorch::cross_entropy
