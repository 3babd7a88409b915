// Evaluates a program for one element, in float or double: the reference for tiles and for CUDA code.
#pragma once

#include <span>
#include <vector>

#include "kernel_pytorch/expression/expression.h"
#include "kernel_pytorch/expression/scalar.h"

namespace kernel_pytorch::expression {

template <class Real>
struct Inputs {
  Real score = 0;
  int64_t batch = 0, head = 0, query = 0, key = 0;
};

// The results in order. `captured` passed check_captures and lies in host memory.
template <class Real>
std::vector<Value<Real>> interpret(const Program& program, const Inputs<Real>& inputs,
                                   std::span<const TensorView> captured = {});

extern template std::vector<Value<float>> interpret(const Program&, const Inputs<float>&, std::span<const TensorView>);
extern template std::vector<Value<double>> interpret(const Program&, const Inputs<double>&,
                                                     std::span<const TensorView>);

}  // namespace kernel_pytorch::expression
