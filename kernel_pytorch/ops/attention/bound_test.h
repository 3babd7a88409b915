// Problems of attention with memory of their own, for its tests.
#pragma once

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/attention/check.h"
#include "kernel_pytorch/ops/attention/trial.h"

namespace kernel_pytorch::attention {

// A problem of a request with memory of its own: the trial's data, the same for forward and backward.
template <class Problem>
struct Bound {
  Problem problem;
  std::vector<std::unique_ptr<std::vector<char>>> memory;

  TensorView own(const TensorView& view, char byte = 0) {
    TensorView owned = view;
    const auto bytes = static_cast<size_t>(span_elements(view) * size_of(view.dtype));
    memory.push_back(std::make_unique<std::vector<char>>(bytes, byte));
    owned.data = memory.back()->data();
    return owned;
  }
};

inline std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  std::array<int64_t, kMaxRank> index{};
  for (int64_t left = view.element_count(); left > 0; --left) {
    int64_t offset = 0;
    for (int i = 0; i < view.rank; ++i) offset += index[i] * view.strides[i];
    values.push_back(load_element(view.data, view.dtype, offset));
    for (int i = view.rank - 1; i >= 0 && ++index[i] == view.sizes[i]; --i) index[i] = 0;
  }
  return values;
}

template <class Problem>
Bound<Problem> bind(const registry::Operation<Problem>& operation, Problem problem) {
  Bound<Problem> bound;
  struct State {
    Bound<Problem>* bound;
    std::mt19937 random{5};
  } state{&bound};
  operation.visit_tensors(
      problem,
      [](void* opaque, std::string_view, registry::Role, TensorView& view) {
        State& state = *static_cast<State*>(opaque);
        view = state.bound->own(view);
        const bool is_whole = view.dtype == DType::kInt32 || view.dtype == DType::kInt64 || view.dtype == DType::kBool;
        std::normal_distribution<double> normal;
        for (int64_t i = 0; i < span_elements(view); ++i) {
          store_element(view.data, view.dtype, i,
                        is_whole ? state.random() % (view.dtype == DType::kBool ? 2 : 4) : normal(state.random));
        }
      },
      &state);
  operation.set_trial_inputs(problem);
  bound.problem = problem;
  return bound;
}

inline Bound<ForwardProblem> make(std::vector<int64_t> shape, DType dtype,
                                  std::vector<std::pair<std::string, std::string>> options) {
  return bind(kForward, make_forward({.shape = shape, .dtype = dtype, .device = {}, .options = options}));
}

inline void store_values(const TensorView& view, const std::vector<double>& values) {
  for (size_t i = 0; i < values.size(); ++i) store_element(view.data, view.dtype, static_cast<int64_t>(i), values[i]);
}

}  // namespace kernel_pytorch::attention
