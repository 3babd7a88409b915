// Shapes that the pointwise ops are tested and measured on: every function, every option, widths that vectors fit and
// odd ones.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::pointwise {

// Each function with everything around it and with nothing, at widths that are and are not whole vectors.
inline std::vector<registry::ProblemRequest> shapes_of(std::initializer_list<std::string_view> kinds, bool gated) {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (std::string_view word : kinds) {
      const std::pair<std::string, std::string> kind = {"kind", std::string(word)};
      add({37, 1000}, dtype, {kind});
      add({19, 133}, dtype, {kind});
      add({43, 264}, dtype, {kind, {"bias", "1"}, {"residual", "1"}, {"dropout", "0.25"}});
      add({21, 77}, dtype, {kind, {"bias", "1"}, {"bias_dtype", "fp32"}, {"dropout", "0.1"}});
    }
    const std::pair<std::string, std::string> kind = {"kind", std::string(*kinds.begin())};
    for (int64_t columns : {1, 2, 7, 8, 33, 64, 4096, 100001}) add({5, columns}, dtype, {kind});
    add({700, 256}, dtype, {kind, {"bias", "1"}, {"dropout", "0.5"}});
    add({3, 65536}, dtype, {kind, {"residual", "1"}});
    add({65, 520}, dtype, {kind, {"bias", "1"}, {"bias_dtype", "fp32"}});
    add({9, 72}, dtype, {kind, {"dropout", "1"}});
    add({1, 4096}, dtype, {kind});
    add({0, 128}, dtype, {kind, {"bias", "1"}});
    add({4, 0}, dtype, {kind});
    if (gated) {
      add({33, 1536}, dtype, {kind, {"packed", "1"}});
      add({33, 77}, dtype, {kind, {"packed", "1"}, {"bias", "1"}, {"dropout", "0.25"}});
      add({33, 152}, dtype, {kind, {"packed", "1"}, {"bias", "1"}, {"dropout", "0.25"}});
    }
  }
  for (std::string_view word : kinds) {
    const registry::RequestOptions options = {
        {"kind", std::string(word)}, {"bias", "1"}, {"residual", "1"}, {"dropout", "0.25"}};
    add({11, 100}, DType::kFloat64, options);
  }
  return std::move(add.all);
}

}  // namespace kernel_pytorch::pointwise
