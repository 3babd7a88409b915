#include "../support/check.h"
#include EXERCISES

bool sums_do_not_wait() {
  const std::vector<float> ones((1 << 25) + 3, 1.0f), few = check::numbers(7);
  double expected = 0;
  for (float value : few) expected += double(value) * value;
  return sum_of_squares(ones.data(), 1 << 25) == 1 << 25 && check::near(sum_of_squares(few.data(), 7), expected);
}

bool honours_strides() {
  const long rows = 3, columns = 10, stride = 17;
  const std::vector<float> x = check::numbers(rows * stride), weight = check::numbers(columns, 3);
  std::vector<float> y(rows * columns), expected(rows * columns);
  for (long row = 0; row < rows; ++row) {
    double sum = 0;
    for (long i = 0; i < columns; ++i) sum += double(x[row * stride + i]) * x[row * stride + i];
    for (long i = 0; i < columns; ++i) {
      expected[row * columns + i] = float(x[row * stride + i] / std::sqrt(sum / columns + 1e-5) * weight[i]);
    }
  }
  rms_norm(x.data(), stride, weight.data(), y.data(), rows, columns, 1e-5f);
  return check::near(y, expected);
}

int main() {
  check::exercise(1, "four sums", sums_do_not_wait(),
                  "2^25 ones must sum to 2^25; mind counts that four does not divide");
  check::exercise(2, "strides", honours_strides(), "row r begins at x + r * row_stride");
  check::exercise(3, "the prediction", check::near(predicted_seconds(1e6, 1e-9, 8e9), 2e-3), "latency, then bytes");
  return check::result();
}
