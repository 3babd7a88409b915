// Shapes that both norms are tested and measured on: the widths of models, the edges of every kernel's range, odd
// tails.
#pragma once

#include <vector>

#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::row_norm {

// Only layer_norm has a bias. Backward does not see the residual's type, nor whether forward kept statistics.
inline std::vector<registry::ProblemRequest> shapes(Norm norm, bool is_forward) {
  registry::RequestList requests;
  const auto add = [&](int64_t rows, int64_t columns, DType dtype, registry::RequestOptions options = {}) {
    if (norm == Norm::kRms) std::erase_if(options, [](const auto& option) { return option.first == "bias"; });
    for (const auto& [name, value] : options) {
      if (!is_forward && (name == "residual_dtype" || name == "stats" || name == "activation")) return;
    }
    requests({rows, columns}, dtype, std::move(options));
  };
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t columns : {1, 2, 7, 8, 33, 64, 127, 128, 520, 1000, 1024, 2048, 3072}) add(19, columns, dtype);
    for (int64_t columns : {4096, 5120, 8192, 12288, 16384}) add(9, columns, dtype);
    for (int64_t columns : {32768, 65536, 100001, 131072, 262144}) add(3, columns, dtype);
    add(1, 4096, dtype);
    add(0, 128, dtype);
    add(700, 256, dtype);
    add(37, 768, dtype, {{"residual", "1"}});
    add(5, 4096, dtype, {{"residual", "1"}, {"weight_dtype", "fp32"}});
    add(3, 65536, dtype, {{"residual", "1"}});
    add(33, 1536, dtype, {{"weight", "0"}, {"bias", "0"}});
    add(33, 1536, dtype, {{"weight_offset", "1"}, {"weight_dtype", "fp32"}});
    add(33, 1536, dtype, {{"stats", "0"}});
  }
  // A 16-bit output, residual or both with fp32 rows: every kernel's range once.
  for (const char* narrow : {"bf16", "fp16"}) {
    for (int64_t columns : {1, 7, 33, 64, 127, 768, 1000, 1004, 4096, 8192, 65544}) {
      add(columns < 60000 ? 19 : 3, columns, DType::kFloat32, {{"output_dtype", narrow}});
    }
    add(700, 256, DType::kFloat32, {{"output_dtype", narrow}, {"weight", "0"}, {"bias", "0"}});
    add(0, 128, DType::kFloat32, {{"output_dtype", narrow}});
    for (int64_t columns : {7, 33, 128, 768, 4096, 65544}) {
      const int64_t rows = columns < 60000 ? 37 : 3;
      add(rows, columns, DType::kFloat32, {{"residual", "1"}, {"output_dtype", narrow}});
      add(rows, columns, DType::kFloat32, {{"residual", "1"}, {"residual_dtype", narrow}});
      add(rows, columns, DType::kFloat32, {{"residual", "1"}, {"output_dtype", narrow}, {"residual_dtype", narrow}});
    }
    add(700, 4096, DType::kFloat32, {{"residual", "1"}, {"output_dtype", narrow}, {"residual_dtype", narrow}});
  }
  for (const char* activation : {"gelu", "gelu_tanh", "silu", "relu", "relu_squared", "sigmoid", "tanh"}) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      for (int64_t columns : {7, 64, 1000}) add(19, columns, dtype, {{"activation", activation}});
    }
    for (int64_t columns : {4096, 65544}) add(3, columns, DType::kBFloat16, {{"activation", activation}});
    add(9, 768, DType::kFloat32, {{"activation", activation}, {"output_dtype", "bf16"}, {"residual", "1"}});
  }
  for (int64_t columns : {1, 5, 64, 1000, 4096}) add(11, columns, DType::kFloat64);
  add(11, 1000, DType::kFloat64, {{"residual", "1"}});
  return std::move(requests.all);
}

}  // namespace kernel_pytorch::row_norm
