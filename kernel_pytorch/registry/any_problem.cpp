#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch::registry {

AnyProblem::~AnyProblem() = default;

namespace detail {

void collect_tensor(void* tensors, std::string_view name, Role role, TensorView& view) {
  static_cast<std::vector<ProblemTensor>*>(tensors)->push_back({.name = std::string(name), .role = role, .view = view});
}

void bind_tensor(void* state, std::string_view, Role, TensorView& view) {
  Binding& binding = *static_cast<Binding*>(state);
  view.data = binding.memory[binding.next++];
  view.device = binding.device;
}

}  // namespace detail
}  // namespace kernel_pytorch::registry
