// What steps 2 to 4 share: the problem, and the formula in double, which every kernel is compared with.
#pragma once

#include "measure.h"

struct RmsNorm {
  long rows, columns;
  course::Floats x, weight, y, expected;

  explicit RmsNorm(bool quick, long columns_ = 4096) : rows(quick ? 64 : 2048), columns(columns_) {
    x = course::random_floats(rows * columns, 1);
    weight = course::random_floats(columns, 2);
    y = course::random_floats(rows * columns, 3);
    expected = course::make_floats(rows * columns);
    for (long row = 0; row < rows; ++row) {
      double sum = 0;
      for (long i = 0; i < columns; ++i) sum += double(x[row * columns + i]) * x[row * columns + i];
      const double scale = 1 / std::sqrt(sum / columns + kEps);
      for (long i = 0; i < columns; ++i) {
        expected[row * columns + i] = float(x[row * columns + i] * scale * weight[i]);
      }
    }
    char text[80];
    std::snprintf(text, sizeof text, "rms_norm of %ld x %ld fp32", rows, columns);
    course::problem(text);
  }
  static constexpr float kEps = 1e-6f;
  double elements() const { return double(rows) * columns; }
  double bytes() const { return 8 * elements(); }  // x is read once, y is written once
  double flops() const { return 4 * elements(); }  // square and add; two products

  // rms_norm(x, weight, y, rows, columns)
  template <class Kernel>
  void measure(const char* name, Kernel&& kernel) {
    std::fill(y.get(), y.get() + rows * columns, 0.0f);
    const double seconds = course::typical_seconds([&] { kernel(x.get(), weight.get(), y.get(), rows, columns); });
    course::measured(name, seconds, bytes(), flops(), course::error_of(y.get(), expected.get(), rows * columns));
  }
};
