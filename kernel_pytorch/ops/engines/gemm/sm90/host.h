// Host side of the matrix product on Hopper that ops/matmul and ops/scaled_matmul share: which tiles there are, which
// of them a size is given, and the launch.
#pragma once

#include <span>
#include <string>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/device_code.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/tile_cuda.h"

namespace kernel_pytorch::product {

inline constexpr auto kSm90ConfigFields = config_fields<Sm90Config>(
    config_field<&Sm90Config::tile_m>(), config_field<&Sm90Config::tile_n>(), config_field<&Sm90Config::stages>(),
    config_field<&Sm90Config::cluster>(), config_field<&Sm90Config::share_a>(), config_field<&Sm90Config::factors>(),
    config_field<&Sm90Config::splits>());
constexpr ConfigFields fields_of(const Sm90Config&) {
  return kSm90ConfigFields;
}

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

// Best first for large sizes. `promoted` sums leave registers for fewer columns; `factors` are for blocks' scales.
// `takes_192`: results leave in boxes of 64 columns of sums or fewer, which divide a tile of 192 (gates with their ups
// are 128); the configs without it are the same but for the last.
std::span<const Sm90Config> sm90_configs(bool promoted, bool factors, bool takes_192 = false);
// Of fp32 in parts (Sm90Type::kFloat32Parts).
std::span<const Sm90Config> sm90_parts_configs();
// Blocks of a cluster share no operand that is gathered.
std::span<const Sm90Config> sm90_grouped_configs(const Sm90Operands& operands, bool promoted = false,
                                                 bool factors = false);
// The least estimated time: whole waves of tiles, each as long as its share of the tensor cores' work and its end.
int sm90_heuristic(std::span<const Sm90Config> configs, const Sm90Sizes& sizes, int64_t element_bytes,
                   int multiprocessors);

// The type of an operand's elements; of others this may not be asked.
Sm90Type sm90_type(DType dtype);

// Null, or why sizes or their number of tiles are beyond the kernel.
const char* sm90_size_obstacle(const Sm90Sizes& sizes);

DeviceCode sm90_code(const Sm90Variant& variant);
uint64_t sm90_source_hash();

// The launch fills in the tensor maps and the order. The last dimension of a and b is dense; a is
// [batch, m, k], or [batch, k, m] with operands.a_rows, b likewise [batch, n, k] or [batch, k, n], or [n / 2, 2, k]
// with operands.b_pairs. Batch strides of 0 are legal. `preactivation` may be absent. With a grouping the caller has
// filled in arguments.groups: of kRows a and the outputs are one batch and b has a matrix per group, of kDepth the
// output has one; a tensor that is gathered needs no map.
struct Sm90Tensors {
  TensorView a, b, output, preactivation;
};
// [1, rows, columns] of [rows, columns], for a grouping of kRows; an absent tensor stays absent.
TensorView sm90_batch_of_one(const TensorView& view);
void sm90_launch(const Sm90Variant& variant, const Sm90Tensors& tensors, const Sm90Sizes& sizes,
                 Sm90Arguments& arguments, Context& context, const std::string& label);

}  // namespace kernel_pytorch::product
