// Host side of the matrix product on Hopper that ops/matmul and ops/scaled_matmul share: which tiles there are, which
// of them a size is given, and the launch.
#pragma once

#include <span>
#include <string>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/ops/product_sm90_cuda.h"

namespace kernel_pytorch::product {

// One compiled kernel.
struct Sm90Variant {
  Sm90Config config;
  Sm90Operands operands;
  Sm90Epilogue epilogue;
  DType output;
};

// m and n of the sums; k in elements.
struct Sm90Sizes {
  int64_t batch, m, n, k;
};

// Best first for large sizes. `promoted` sums leave room for fewer columns; `factors` are for blocks' scales.
std::span<const Sm90Config> sm90_configs(bool promoted, bool factors);
std::string to_text(const Sm90Config& config);
// The least estimated time: whole waves of tiles, each as long as its share of the tensor cores' work and its end.
int sm90_heuristic(std::span<const Sm90Config> configs, const Sm90Sizes& sizes, int64_t element_bytes,
                   int multiprocessors);

// The type of an operand's elements; of others this may not be asked.
Sm90Type sm90_type(DType dtype);

// Null, or why sizes or their number of tiles are beyond the kernel.
const char* sm90_size_obstacle(const Sm90Sizes& sizes);

DeviceCode sm90_code(const Sm90Variant& variant);
uint64_t sm90_source_hash();

// What the launch fills in by itself are the tensor maps and the order. Of a and b the last dimension is dense; a is
// [batch, m, k], or [batch, k, m] with operands.a_rows, b likewise [batch, n, k] or [batch, k, n]. Batch strides of 0
// are legal. `preactivation` may be absent.
struct Sm90Tensors {
  TensorView a, b, output, preactivation;
};
void sm90_launch(const Sm90Variant& variant, const Sm90Tensors& tensors, const Sm90Sizes& sizes,
                 Sm90Arguments& arguments, Context& context, const std::string& label);

}  // namespace kernel_pytorch::product
