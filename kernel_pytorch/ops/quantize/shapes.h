// Shapes that quantising is tested and measured on: [rows, columns], the type being x's. On the CPU; whoever wants a
// GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::quantize {

inline std::vector<registry::ProblemRequest> shapes() {
  using Options = std::vector<std::pair<std::string, std::string>>;
  std::vector<registry::ProblemRequest> requests;
  const auto add = [&](std::vector<int64_t> shape, DType dtype, Options options) {
    requests.push_back({.shape = std::move(shape), .dtype = dtype, .device = {}, .options = std::move(options)});
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* scales : {"given", "tensor", "row", "1x128", "128x128"}) {
      add({1, 1}, dtype, {{"scales", scales}});
      add({200, 136}, dtype, {{"scales", scales}, {"amax", "1"}});
      add({130, 259}, dtype, {{"scales", scales}, {"code", "e5m2"}, {"amax", "1"}});
      add({256, 512}, dtype, {{"scales", scales}, {"padded", "1"}});
    }
    add({96, 384}, dtype, {{"scales", "tensor"}, {"codes", "0"}});
    add({300, 520}, dtype, {{"scales", "1x128"}, {"transposed", "0"}, {"power_of_two", "1"}});
    add({200, 300}, dtype, {{"scales", "1x128"}, {"square", "1"}, {"amax", "1"}});
    add({256, 384}, dtype, {{"scales", "1x128"}, {"square", "1"}, {"code", "e5m2"}});
    add({130, 100}, dtype, {{"scales", "given"}, {"seed", "1"}});
    add({130, 264}, dtype, {{"scales", "1x128"}, {"seed", "1"}, {"code", "e5m2"}});
    add({140, 70}, dtype, {{"scales", "row"}, {"strided", "1"}});
    // ProducerKind on the way. A value's last place may differ between kernels, and a scale that follows from it with
    // it: powers of two do not.
    for (const char* produced : {"norm", "gate", "gate_gradient"}) {
      add({200, 136}, dtype, {{"producer", produced}, {"scales", "given"}, {"value", "1"}});
      add({130, 384}, dtype, {{"producer", produced}, {"scales", "given"}, {"code", "e5m2"}, {"residual", "1"}});
      add({256, 256}, dtype, {{"producer", produced}, {"scales", "tensor"}, {"power_of_two", "1"}, {"kind", "gelu"}});
      add({140, 128}, dtype,
          {{"producer", produced}, {"scales", "row"}, {"power_of_two", "1"}, {"weight_dtype", "fp32"}});
      add({130, 264}, dtype, {{"producer", produced}, {"scales", "1x128"}, {"power_of_two", "1"}, {"square", "1"}});
      add({128, 512}, dtype, {{"producer", produced}, {"scales", "1x128"}, {"power_of_two", "1"}, {"transposed", "0"}});
      add({9, 37}, dtype, {{"producer", produced}, {"scales", "given"}, {"kind", "relu"}});
    }
    add({0, 16}, dtype, {{"scales", "tensor"}});
    add({16, 0}, dtype, {{"scales", "row"}});
  }
  return requests;
}

}  // namespace kernel_pytorch::quantize
