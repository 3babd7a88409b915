// kp-isa: v4
// The AMX kernels with their tiles emulated, as isa_v4::kAmxProductKernels, so that machines without AMX test all but
// the instructions.
#define KP_EMULATE_TILES 1
#include "kernel_pytorch/ops/matmul/cpu/amx_isa.cpp"
