// Shapes that the pointwise ops are tested and measured on: every function, every option, widths that vectors fit and
// odd ones.
#pragma once

#include <string>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/pointwise/pointwise.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::pointwise {

// Each function with everything around it and with nothing, at widths that are and are not whole vectors. `kinds` is a
// list with commas.
inline std::vector<registry::ProblemRequest> shapes_of(std::string_view kinds, bool gated) {
  const std::string_view first = kinds.substr(0, kinds.find(','));
  return registry::requests_of(concat("fp32 bf16 fp16: 37x1000 19x133 kind=", kinds, R"(
    43x264 bias=1 residual=1 dropout=0.25 kind=)",
                                      kinds, R"(
    21x77 bias=1 bias_dtype=fp32 dropout=0.1 kind=)",
                                      kinds, R"(
    5x1,2,7,8,33,64,4096,100001 1x4096 4x0 kind=$first; 700x256 bias=1 dropout=0.5 kind=$first
    3x65536 residual=1 kind=$first; 65x520 bias=1 bias_dtype=fp32 kind=$first; 9x72 dropout=1 kind=$first
    0x128 bias=1 kind=$first
    fp64: 11x100 bias=1 residual=1 dropout=0.25 kind=)",
                                      kinds,
                                      gated ? R"(
    fp32 bf16 fp16: 33x1536 packed=1 kind=$first; 33x77,152 packed=1 bias=1 dropout=0.25 kind=$first)"
                                            : ""),
                               {{"first", std::string(first)}});
}

}  // namespace kernel_pytorch::pointwise
