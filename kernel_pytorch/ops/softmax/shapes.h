// Shapes that softmax is tested and measured on: the edges of every kernel's range, odd tails, the options. On the CPU;
// whoever wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::softmax {

inline std::vector<registry::ProblemRequest> shapes() {
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype,
                       std::vector<std::pair<std::string, std::string>> options = {}) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t columns : {1, 2, 7, 8, 33, 64, 127, 128, 520, 1000, 1024, 2048}) add({19, columns}, dtype);
    for (int64_t columns : {4096, 8192, 16384, 32768}) add({5, columns}, dtype);
    for (int64_t columns : {65536, 100001, 131072, 262144}) add({2, columns}, dtype);
    add({700, 256}, dtype, {{"log", "1"}});
    add({0, 128}, dtype);
    add({5, 4096}, dtype, {{"log", "1"}, {"scale", "-0.5"}});
    add({2, 65536}, dtype, {{"log", "1"}});
    add({3, 40, 72}, dtype, {{"causal", "1"}, {"scale", "0.125"}});
    add({3, 72, 40}, dtype, {{"causal", "1"}});
    add({2, 9, 1030}, dtype, {{"causal", "1"}, {"mask", "bool"}, {"log", "1"}});
    for (const char* mask : {"bool", "added", "fp32"}) {
      add({3, 6, 256}, dtype, {{"mask", mask}});
      add({2, 3, 4096}, dtype, {{"mask", mask}, {"causal", "1"}});
      add({2, 2, 65536}, dtype, {{"mask", mask}});
      add({3, 6, 333}, dtype, {{"mask", mask}});
    }
  }
  for (int64_t columns : {1, 5, 1000}) add({11, columns}, DType::kFloat64);
  add({2, 11, 30}, DType::kFloat64, {{"causal", "1"}, {"mask", "added"}});
  return requests;
}

}  // namespace kernel_pytorch::softmax
