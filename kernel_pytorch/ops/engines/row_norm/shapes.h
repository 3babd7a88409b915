// Shapes that both norms are tested and measured on: the widths of models, the edges of every kernel's range, odd
// tails.
#pragma once

#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/row_norm/row_norm.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::row_norm {

constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 19x1,2,7,8,33,64,127,128,520,1000,1024,2048,3072 9x4096,5120,8192,12288,16384
    3x32768,65536,100001,131072,262144 1x4096 0x128 700x256; 37x768 3x65536 residual=1
    5x4096 residual=1 weight_dtype=fp32; 33x1536 weight=0 bias=$bias; weight_offset=1 weight_dtype=fp32
    # A 16-bit output, residual or both with fp32 rows: every kernel's range once.
    fp32: 19x1,7,33,64,127,768,1000,1004,4096,8192 3x65544 0x128 output_dtype=bf16,fp16
    700x256 output_dtype=bf16,fp16 weight=0 bias=$bias; 37x7,33,128,768,4096 3x65544 residual=1 output_dtype=bf16,fp16
    fp64: 11x1,5,64,1000,4096; 11x1000 residual=1
)";
// Backward does not see the residual's type, nor whether forward kept statistics.
constexpr const char* kForwardShapes = R"(
    fp32 bf16 fp16: 33x1536 stats=0; fp32: 37x7,33,128,768,4096 3x65544 residual=1 residual_dtype=bf16,fp16
    37x7,33,128,768,4096 3x65544 700x4096 residual=1 output_dtype+residual_dtype=bf16,fp16
    fp32 bf16 fp16 fp64: 19x7,64,1000 activation=gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh
    bf16: 3x4096,65544 activation=gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh
    fp32: 9x768 activation=gelu,gelu_tanh,silu,relu,relu_squared,sigmoid,tanh output_dtype=bf16 residual=1
)";

// Only layer_norm has a bias.
template <Norm kNorm, bool kForward>
std::vector<registry::ProblemRequest> shapes() {
  return registry::requests_of(concat(kShapes, kForward ? kForwardShapes : ""),
                               {{"bias", kNorm == Norm::kRms ? "-" : "0"}});
}

}  // namespace kernel_pytorch::row_norm
