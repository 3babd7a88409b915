// kp-isa: v4
// The AMX backward with its tiles emulated: attention/cpu/amx_forward_probes_isa.cpp.
#define KP_EMULATE_TILES 1
#include "kernel_pytorch/ops/attention/cpu/amx_backward_isa.cpp"
