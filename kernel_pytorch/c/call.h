// kp_call: an op of the front ends on a C caller's tensors.
#pragma once

#include <span>
#include <vector>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/explain.h"

namespace kernel_pytorch::c_interface {

class CallerThreads final : public Threads {
 public:
  void set(const kp_threads& threads) { threads_ = threads; }
  int count() const override { return threads_.count; }
  void run(int workers, void (*work)(void* state, int worker), void* state) override {
    threads_.run(threads_.state, workers, work, state);
  }

 private:
  kp_threads threads_{};
};

}  // namespace kernel_pytorch::c_interface

struct kp_context {
  kernel_pytorch::OwnContext own;
  kernel_pytorch::c_interface::CallerThreads threads{};
};

namespace kernel_pytorch::c_interface {

Device device_of(const kp_device& device);

// Throws kInvalidArgument for what the caller can change, in the names that the caller gave.
void call_op(Context& context, const char* op, std::span<const kp_argument> arguments);

// Bytes of scratch memory that call_op would take on this device, which it is made ready for; nothing is computed.
size_t workspace_bytes(Device device, const char* op, std::span<const kp_argument> arguments);

// What call_op would choose, for tensors that begin at multiples of 256 bytes.
std::vector<registry::Explanation> explain_call(Device device, const char* op, std::span<const kp_argument> arguments);

}  // namespace kernel_pytorch::c_interface
