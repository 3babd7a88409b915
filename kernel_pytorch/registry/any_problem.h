// A problem of an op with its types removed, so that choosing, trying, timing and explaining are ordinary code in .cpp
// files and each op adds only these small forwarding functions.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry {

struct ProblemTensor {
  std::string name;
  Role role = Role::kInput;
  TensorView view;
  Filling filling{};                   // where it is read
  Precision precision = {view.dtype};  // to which it is right, where it is written
};

class KP_EXPORT AnyProblem {
 public:
  virtual ~AnyProblem();

  virtual std::string_view op() const = 0;
  virtual uint64_t op_identity() const = 0;  // distinct for each op of this process, and cheap
  virtual const DeviceInfo& device() const = 0;
  virtual void describe(tuning::KeyBuilder& key) const = 0;

  // Kernels by their place in the op's list.
  virtual int kernel_count() const = 0;
  virtual std::string_view kernel_name(int kernel) const = 0;
  virtual Origin kernel_origin(int kernel) const = 0;
  virtual bool is_fallback(int kernel) const = 0;
  virtual uint64_t kernel_source_hash(int kernel) const = 0;  // 0: it has none
  virtual Support supports(int kernel) const = 0;
  virtual std::vector<std::string> configs(int kernel) const = 0;  // never empty
  virtual int heuristic(int kernel) const = 0;
  virtual void run(int kernel, int config, Context& context) const = 0;

  // For trials: the tensors, the same problem on other memory (in the order of `tensors`), and a smaller one.
  virtual Cost cost() const = 0;
  virtual std::vector<ProblemTensor> tensors() const = 0;
  virtual std::unique_ptr<AnyProblem> with_memory(const DeviceInfo& device, std::span<void* const> memory) const = 0;
  virtual std::unique_ptr<AnyProblem> shrink(int64_t elements) const = 0;
  virtual void set_trial_inputs() const = 0;  // its inputs, which are in host memory
  virtual Parts parts() const = 0;            // without memory
};

// What follows from the fields of a declared problem; nothing where there are none.
namespace detail {
KP_EXPORT void describe_declared(const Fields& fields, const void* problem, tuning::KeyBuilder& key);
// By Rules::content; by default floats are normal, integers below 8.
KP_EXPORT Filling declared_filling(const Fields& fields, const void* problem, std::string_view tensor);
KP_EXPORT void shrink_declared(const Fields& fields, const RequestForm& form, void* problem, int64_t elements);
KP_EXPORT Cost declared_cost(const Fields& fields, const void* problem, int64_t flops_per_element);
}  // namespace detail

// A view of a problem that the caller keeps.
template <class Problem>
class BorrowedProblem : public AnyProblem {
 public:
  BorrowedProblem(const Operation<Problem>& operation, const Problem& problem, const DeviceInfo& device)
      : operation_(operation), kernels_(operation.kernels()), problem_(problem), device_(device) {}

  std::string_view op() const final { return operation_.name; }
  uint64_t op_identity() const final {
    HashMixer mixer;
    mixer.add(reinterpret_cast<uintptr_t>(operation_.name.data()));
    mixer.add(reinterpret_cast<uintptr_t>(kernels_.data()));
    return mixer.value();
  }
  const DeviceInfo& device() const final { return device_; }
  void describe(tuning::KeyBuilder& key) const final {
    detail::describe_declared(operation_.fields, &problem_, key);
    if (operation_.describe != nullptr) operation_.describe(problem_, key);
  }

  int kernel_count() const final { return static_cast<int>(kernels_.size()); }
  std::string_view kernel_name(int kernel) const final { return kernels_[kernel].name; }
  Origin kernel_origin(int kernel) const final { return kernels_[kernel].origin; }
  bool is_fallback(int kernel) const final { return kernels_[kernel].is_fallback || kernel + 1 == kernel_count(); }
  uint64_t kernel_source_hash(int kernel) const final {
    return kernels_[kernel].source_hash != nullptr ? kernels_[kernel].source_hash() : 0;
  }
  Support supports(int kernel) const final { return kernels_[kernel].supports(problem_, device_); }
  std::vector<std::string> configs(int kernel) const final {
    std::vector<std::string> texts;
    if (kernels_[kernel].configs != nullptr) texts = kernels_[kernel].configs(problem_, device_);
    if (texts.empty()) texts.emplace_back();
    return texts;
  }
  int heuristic(int kernel) const final {
    return kernels_[kernel].heuristic != nullptr ? kernels_[kernel].heuristic(problem_, device_) : 0;
  }
  void run(int kernel, int config, Context& context) const final { kernels_[kernel].run(problem_, config, context); }

  Cost cost() const final {
    return operation_.cost != nullptr
               ? operation_.cost(problem_)
               : detail::declared_cost(operation_.fields, &problem_, operation_.flops_per_element);
  }
  std::vector<ProblemTensor> tensors() const final;
  std::unique_ptr<AnyProblem> with_memory(const DeviceInfo& device, std::span<void* const> memory) const final;
  std::unique_ptr<AnyProblem> shrink(int64_t elements) const final;
  void set_trial_inputs() const final {
    if (operation_.set_trial_inputs != nullptr) operation_.set_trial_inputs(problem_);
  }
  Parts parts() const final { return operation_.parts != nullptr ? operation_.parts(problem_, device_) : Parts(); }

 private:
  const Operation<Problem>& operation_;
  std::span<const Kernel<Problem>> kernels_;
  const Problem& problem_;
  const DeviceInfo& device_;
};

namespace detail {
template <class Problem>
struct Holder {
  Problem held;
};
// Visitors: into a vector of ProblemTensor; onto the memory of a Binding, one piece after the other.
KP_EXPORT void collect_tensor(void* tensors, std::string_view name, Role role, TensorView& view);
struct Binding {
  Device device;
  std::span<void* const> memory;
  size_t next = 0;
};
KP_EXPORT void bind_tensor(void* binding, std::string_view name, Role role, TensorView& view);
}  // namespace detail

// Keeps its problem. The operation and the device outlive it: both live as long as the process.
template <class Problem>
class OwnedProblem final : private detail::Holder<Problem>, public BorrowedProblem<Problem> {
 public:
  OwnedProblem(const Operation<Problem>& operation, Problem problem, const DeviceInfo& device)
      : detail::Holder<Problem>{std::move(problem)}, BorrowedProblem<Problem>(operation, this->held, device) {}
  OwnedProblem(const OwnedProblem&) = delete;
  OwnedProblem& operator=(const OwnedProblem&) = delete;
};

template <class Problem>
std::vector<ProblemTensor> BorrowedProblem<Problem>::tensors() const {
  std::vector<ProblemTensor> found;
  Problem copy = problem_;
  operation_.visit_tensors(copy, detail::collect_tensor, &found);
  for (ProblemTensor& tensor : found) {
    tensor.filling = operation_.filling != nullptr
                         ? operation_.filling(problem_, tensor.name)
                         : detail::declared_filling(operation_.fields, &problem_, tensor.name);
  }
  if (operation_.precision != nullptr) {
    for (ProblemTensor& tensor : found) {
      tensor.precision = operation_.precision(problem_, tensor.name, tensor.view.dtype);
    }
  }
  return found;
}

template <class Problem>
std::unique_ptr<AnyProblem> BorrowedProblem<Problem>::with_memory(const DeviceInfo& device,
                                                                  std::span<void* const> memory) const {
  detail::Binding binding{device.device, memory};
  Problem copy = problem_;
  operation_.visit_tensors(copy, detail::bind_tensor, &binding);
  return std::make_unique<OwnedProblem<Problem>>(operation_, std::move(copy), device);
}

template <class Problem>
std::unique_ptr<AnyProblem> BorrowedProblem<Problem>::shrink(int64_t elements) const {
  Problem small = operation_.shrink != nullptr ? operation_.shrink(problem_, elements) : problem_;
  if (operation_.shrink == nullptr) detail::shrink_declared(operation_.fields, operation_.request, &small, elements);
  return std::make_unique<OwnedProblem<Problem>>(operation_, std::move(small), device_);
}

}  // namespace kernel_pytorch::registry
