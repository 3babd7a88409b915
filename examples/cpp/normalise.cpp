// Normalises a small matrix on the CPU with rms_norm and checks it against the formula. Exit status 0 when they agree.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "kernel_pytorch/ops/rms_norm/rms_norm.h"

namespace kp = kernel_pytorch;

namespace {

float normalised(const std::vector<float>& x, const std::vector<float>& weight, int64_t row, int64_t column,
                 double eps) {
  const int64_t columns = static_cast<int64_t>(weight.size());
  double squares = 0;
  for (int64_t i = 0; i < columns; ++i) squares += double(x[row * columns + i]) * x[row * columns + i];
  return static_cast<float>(x[row * columns + column] / std::sqrt(squares / columns + eps) * weight[column]);
}

int run() {
  const int64_t rows = 64, columns = 1000;
  std::vector<float> x(rows * columns), weight(columns), output(rows * columns);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = 1.0f + 0.001f * static_cast<float>(i);

  kp::OwnContext context;  // the CPU, on the library's own threads
  kp::rms_norm::Forward arguments;
  arguments.x = kp::contiguous_view(x.data(), kp::DType::kFloat32, {rows, columns});
  arguments.weight = kp::contiguous_view(weight.data(), kp::DType::kFloat32, {columns});
  arguments.eps = 1e-5;
  arguments.output = kp::contiguous_view(output.data(), kp::DType::kFloat32, {rows, columns});
  kp::rms_norm::forward(arguments, context);

  double worst = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const float expected = normalised(x, weight, row, column, *arguments.eps);
      worst = std::fmax(worst, std::fabs(output[row * columns + column] - expected));
    }
  }
  std::printf("largest difference from the formula: %.1e\n", worst);
  return worst < 1e-5 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
