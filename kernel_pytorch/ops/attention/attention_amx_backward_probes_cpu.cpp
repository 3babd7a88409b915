// kp-isa: v4
// The AMX backward with its tiles emulated: attention_amx_probes_cpu.cpp.
#define KP_EMULATE_TILES 1
#include "kernel_pytorch/ops/attention/attention_amx_backward_cpu.cpp"
