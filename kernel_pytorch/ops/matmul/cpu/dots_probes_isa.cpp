// kp-isa: v4
// The kernels on pairs of bf16 with the instruction emulated, as isa_v4::kDotProductKernels, for machines without it.
#include "kernel_pytorch/ops/matmul/cpu/dots_isa.cpp"
