// Shapes [batch, m, n, k] that products are tested and measured on: edges of tiles, odd tails, all transpositions,
// every form and option. On the CPU; whoever wants a GPU sets the device.
#pragma once

#include <vector>

#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::matmul {

inline std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const char* order : {"nn", "nt", "tn", "tt"}) {
      add({1, 128, 256, 64}, dtype, {{"order", order}});
      add({1, 67, 130, 37}, dtype, {{"order", order}});
      add({2, 200, 136, 264}, dtype, {{"order", order}});
    }
    for (int64_t m : {1, 2, 3, 5, 8, 15, 17}) add({1, m, 328, 520}, dtype, {{"order", "nt"}});
    add({1, 3, 136, 1100}, dtype);
    add({1, 600, 3, 100}, dtype);
    add({1, 1, 1, 1}, dtype);
    add({1, 7, 9, 0}, dtype, {{"bias", "1"}, {"residual", "1"}, {"row_sums", "1"}});
    add({1, 0, 8, 8}, dtype);
    add({1, 520, 512, 1088}, dtype, {{"order", "nt"}});
    add({2, 600, 72, 100}, dtype, {{"order", "nt"}, {"bias", "1"}});  // rows are what many workers can share
    add({3, 40, 72, 56}, dtype, {{"expand_b", "1"}, {"padding", "8"}});
    add({1, 72, 104, 88}, dtype, {{"padding", "3"}, {"alpha", "0.5"}, {"residual", "1"}, {"beta", "-2"}});
    for (const char* kind : {"gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh"}) {
      add({1, 130, 264, 96}, dtype, {{"activation", kind}, {"bias", "1"}, {"order", "nt"}, {"preactivation", "1"}});
      add({1, 130, 264, 96}, dtype, {{"form", "gradient"}, {"activation", kind}});
    }
    for (const char* kind : {"gelu", "silu"}) {
      const registry::RequestOptions gated = {{"form", "gated"}, {"activation", kind},   {"bias", "1"},
                                              {"order", "nt"},   {"preactivation", "1"}, {"residual", "1"}};
      add({1, 130, 528, 96}, dtype, gated);
      add({2, 33, 70, 40}, dtype, gated);
      add({1, 5, 272, 520}, dtype, gated);
      add({1, 130, 264, 96}, dtype, {{"form", "gated_gradient"}, {"activation", kind}});
      add({2, 9, 34, 40}, dtype, {{"form", "gated_gradient"}, {"activation", kind}, {"residual", "1"}});
    }
    for (int64_t m : {1, 13, 130, 300}) {
      const registry::RequestOptions twice = {
          {"form", "gated_twice"}, {"activation", "silu"}, {"order", "nt"}, {"residual", "1"}};
      if (dtype != DType::kFloat32) add({1, m, 264, 136}, dtype, twice);
    }
    add({1, 192, 320, 128}, dtype, {{"order", "tn"}, {"row_sums", "1"}, {"bias", "1"}});
    add({2, 50, 70, 300}, dtype, {{"order", "tn"}, {"row_sums", "fp32"}, {"output", "fp32"}, {"residual", "1"}});
    add({1, 12, 264, 2100}, dtype, {{"row_sums", "1"}, {"output", "fp32"}, {"bias", "1"}, {"order", "nt"}});
    add({1, 264, 0, 2100}, dtype, {{"order", "tn"}, {"row_sums", "fp32"}});
    add({2, 40, 0, 72}, dtype, {{"row_sums", "1"}});
    add({1, 136, 264, 96}, dtype, {{"activation", "silu"}, {"bias", "fp32"}, {"residual", "fp32"}});
  }
  for (const char* precision : {"bf16", "bf16x3"}) {
    for (const char* order : {"nn", "nt", "tn", "tt"}) {
      add({1, 67, 130, 37}, DType::kFloat32, {{"order", order}, {"precision", precision}});
      add({2, 96, 160, 600}, DType::kFloat32, {{"order", order}, {"precision", precision}, {"row_sums", "1"}});
    }
    add({1, 4, 130, 70}, DType::kFloat32, {{"precision", precision}, {"bias", "1"}, {"activation", "gelu"}});
  }
  add({2, 20, 30, 40}, DType::kFloat64, {{"bias", "1"}, {"activation", "gelu"}, {"residual", "1"}, {"row_sums", "1"}});
  add({1, 20, 30, 40}, DType::kFloat64, {{"order", "tt"}, {"form", "gated"}, {"activation", "silu"}});
  return std::move(add.all);
}

}  // namespace kernel_pytorch::matmul
