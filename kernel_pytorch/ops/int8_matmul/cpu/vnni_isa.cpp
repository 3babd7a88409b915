// kp-isa: v4vnni
// Products of 8-bit integers by AVX-512 VNNI: 64 products an instruction.
#include "kernel_pytorch/ops/int8_matmul/cpu/tile_isa.h"

namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE {

void multiply_dots(const IntegerBlock& block) {
  multiply_block(block);
}

}  // namespace kernel_pytorch::int8_matmul::KP_ISA_NAMESPACE
