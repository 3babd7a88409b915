#include "../support/check.h"
#include EXERCISES

double norm_loss(const std::vector<double>& x, const std::vector<float>& weight, const std::vector<float>& dy) {
  double squares = 0, loss = 0;
  for (double value : x) squares += value * value;
  const double r = 1 / std::sqrt(squares / x.size() + 1e-6);
  for (size_t i = 0; i < x.size(); ++i) loss += x[i] * r * weight[i] * dy[i];
  return loss;
}

// Against differences of the forward, in double.
bool norm_is_right() {
  const long columns = 19;
  const std::vector<float> x = check::numbers(columns), weight = check::numbers(columns, 3),
                           dy = check::numbers(columns, 5);
  std::vector<float> dx(columns), expected(columns);
  std::vector<double> moved(x.begin(), x.end());
  for (long i = 0; i < columns; ++i) {
    moved[i] = x[i] + 1e-5;
    const double above = norm_loss(moved, weight, dy);
    moved[i] = x[i] - 1e-5;
    expected[i] = float((above - norm_loss(moved, weight, dy)) / 2e-5);
    moved[i] = x[i];
  }
  rms_norm_backward(x.data(), weight.data(), dy.data(), dx.data(), columns, 1e-6f);
  return check::near(dx, expected, 1e-4);
}

bool swiglu_is_right() {
  const auto forward = [](double gate, double up) { return gate / (1 + std::exp(-gate)) * up; };
  for (float gate : {-3.0f, -0.1f, 0.0f, 2.0f}) {
    const float up = 1.7f, dy = -0.6f;
    float d_gate, d_up;
    swiglu_backward(gate, up, dy, d_gate, d_up);
    const double expected = dy * (forward(gate + 1e-5, up) - forward(gate - 1e-5, up)) / 2e-5;
    if (std::fabs(d_gate - expected) > 1e-4 || std::fabs(d_up - dy * forward(gate, 1)) > 1e-5) return false;
  }
  return true;
}

int main() {
  check::exercise(1, "backward of rms_norm", norm_is_right(), "two sums over the row, then one pass");
  check::exercise(2, "backward of SwiGLU", swiglu_is_right(), "d_up = dy * silu(gate)");
  check::exercise(3, "what fusion saves", check::near(seconds_saved(2, 2, 3, 1e9, 4e12), 0.5e-3),
                  "6 transfers become 4");
  return check::result();
}
