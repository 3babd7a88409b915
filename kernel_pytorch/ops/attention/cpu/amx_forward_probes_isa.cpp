// kp-isa: v4
// The AMX forward with its tiles emulated, as isa_v4::kAmxKernels, so that machines without AMX test all but the
// instructions.
#define KP_EMULATE_TILES 1
#include "kernel_pytorch/ops/attention/cpu/amx_forward_isa.cpp"
