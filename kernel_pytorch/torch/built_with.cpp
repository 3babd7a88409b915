// What this adapter was compiled against, for `kpt doctor`: C functions, so that ctypes can ask without an op.
#include "kernel_pytorch/base/export.h"

extern "C" {
KP_EXPORT const char* kp_torch_adapter_version();
KP_EXPORT const char* kp_torch_adapter_built_with();
}

const char* kp_torch_adapter_version() {
  return KP_VERSION;
}

const char* kp_torch_adapter_built_with() {
  return KP_TORCH_VERSION;
}
