// Runs a problem on memory of its own: for tuning, benchmarks and verification. The caller's tensors are not touched,
// only their shapes, strides and types are.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/registry/any_problem.h"
#include "kernel_pytorch/registry/device_buffer.h"

namespace kernel_pytorch::registry {

// The caller's device, stream and threads, with a scratch of the trial's own that every run uses again.
class TrialContext {
 public:
  explicit TrialContext(const Context& context);
  void run(const AnyProblem& problem, int kernel, int config);
  const Context& context() const { return context_; }

 private:
  OwnContext own_;
  Context context_;
};

// A problem bound to buffers with random inputs and poisoned outputs.
class BoundProblem {
 public:
  // `inputs`: host memory for each input in the order of tensors(), null to leave the memory as it is.
  BoundProblem(const AnyProblem& problem, const DeviceInfo& device, const std::vector<DeviceBuffer>* inputs,
               void* stream);
  const AnyProblem& problem() const { return *problem_; }
  const std::vector<ProblemTensor>& tensors() const { return tensors_; }
  void poison_outputs(void* stream) const;
  void restore_updated(const std::vector<DeviceBuffer>& inputs, void* stream);  // to what they were before a run
  const DeviceBuffer& buffer(size_t tensor) const { return buffers_[tensor]; }

 private:
  std::vector<ProblemTensor> tensors_;
  std::vector<DeviceBuffer> buffers_;
  std::unique_ptr<AnyProblem> problem_;
};

// Random host memory for each tensor of the problem (outputs get an empty buffer).
std::vector<DeviceBuffer> make_random_inputs(const AnyProblem& problem, Threads* threads);

// As many bound copies of a problem as it takes to leave the last-level cache between two visits of the same one.
class RotatedProblem {
 public:
  RotatedProblem(const AnyProblem& problem, const Context& context);
  int rotations() const { return static_cast<int>(sets_.size()); }
  const AnyProblem& at(int rotation) const { return sets_[static_cast<size_t>(rotation)].problem(); }

 private:
  std::vector<BoundProblem> sets_;
};
// How many sets of this many bytes the rule above asks for on a device.
KP_EXPORT int rotation_count(int64_t bytes, const DeviceInfo& device);

// The reference's answer to a problem, computed once on the host, and kernels held against it.
class ReferenceCheck {
 public:
  // Reads of `problem` only shapes and types. Throws kInternal when the op's last kernel is no reference for the host.
  ReferenceCheck(const AnyProblem& problem, const Context& context);
  ~ReferenceCheck();
  // "" when right; "not supported at this size" is no verdict, so it returns false and leaves `failure` alone.
  bool try_check(int kernel, const std::string& config, std::string& failure);

 private:
  const Context& context_;
  TrialContext trial_;
  std::vector<DeviceBuffer> inputs_;
  std::unique_ptr<BoundProblem> expected_;
  std::unique_ptr<BoundProblem> actual_;
};

}  // namespace kernel_pytorch::registry
