// What tests of optimizer steps share: a list of parameters with its memory.
#pragma once

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/optimizer_step/optimizer_step.h"

namespace kernel_pytorch::optimizer_step {

struct ParameterList {
  std::vector<std::vector<char>> memory;
  std::vector<float> steps;
  Step step;

  ParameterList(size_t count, int misaligned_elements)
      : steps(count, 0.0f), misaligned_elements_(misaligned_elements) {}

  void run(Context& context) const { optimizer_step::step(step, context); }
  std::vector<double> values(TensorView Parameter::*which) const {
    std::vector<double> all;
    for (const Parameter& one : step.parameters) {
      const TensorView& view = one.*which;
      for (int64_t i = 0; i < view.element_count(); ++i) all.push_back(load_element(view.data, view.dtype, i));
    }
    return all;
  }

 protected:
  // Normal numbers or zeros; each call draws others.
  TensorView tensor(DType type, int64_t elements, bool is_normal) {
    memory.emplace_back(static_cast<size_t>((elements + misaligned_elements_) * size_of(type)) + 1);
    TensorView view = contiguous_view(memory.back().data() + misaligned_elements_ * size_of(type), type, {elements});
    std::mt19937 random(++seed_);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < elements && is_normal; ++i) store_element(view.data, type, i, normal(random));
    return view;
  }

 private:
  int misaligned_elements_;
  unsigned seed_ = 0;
};

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

}  // namespace kernel_pytorch::optimizer_step
