// kp_call: an op of the front ends on a C caller's tensors.
#pragma once

#include <span>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/device/context.h"

struct kp_context {
  kernel_pytorch::OwnContext own;
};

namespace kernel_pytorch::c_interface {

Device device_of(const kp_device& device);

// Throws kInvalidArgument for what the caller can change, in the names that the caller gave.
void call_op(Context& context, const char* op, std::span<const kp_argument> arguments);

// Bytes of scratch memory that call_op would take on this device, which it is made ready for; nothing is computed.
size_t workspace_bytes(Device device, const char* op, std::span<const kp_argument> arguments);

}  // namespace kernel_pytorch::c_interface
