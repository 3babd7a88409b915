// The reference: scalar, in double, one row after another, any strides. What every other kernel is tested against and
// the last one in the lists, so it is written to be read.
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::cross_entropy {
namespace {

double at(const TensorView& vector, int64_t index, double absent) {
  return vector.is_present() ? load_element(vector.data, vector.dtype, index * vector.stride(-1)) : absent;
}
void put(const TensorView& vector, int64_t index, double value) {
  if (vector.is_present()) store_element(vector.data, vector.dtype, index, value);
}

// What a row needs besides its logits.
struct Whole {
  double weight_sum = 0;  // over the vocabulary
  double divisor = 1;     // of the mean
};

Whole whole_of(const Problem& problem) {
  Whole whole;
  for (int64_t j = 0; j < problem.options.vocabulary; ++j) whole.weight_sum += at(problem.weight, j, 1);
  if (problem.reduction != Reduction::kMean) return whole;
  whole.divisor = 0;
  for (int64_t row = 0; row < rows_of(problem.logits); ++row) {
    const int64_t target = target_at(problem.target, row);
    if (target != problem.options.ignore_index) whole.divisor += at(problem.weight, target, 1);
  }
  return whole;
}

struct Row {
  std::vector<double> z;  // capped logits
  double largest, sum, weighted_sum;
};

void read_row(const Problem& problem, int64_t row, Row& values) {
  const Options& options = problem.options;
  const int64_t start = row_offset(problem.logits, row);
  values.largest = -std::numeric_limits<double>::infinity();
  values.sum = values.weighted_sum = 0;
  for (size_t j = 0; j < values.z.size(); ++j) {
    const int64_t column = static_cast<int64_t>(j);
    const double logit =
        load_element(problem.logits.data, problem.logits.dtype, start + column * problem.logits.stride(-1));
    values.z[j] = options.softcap == 0 ? logit : options.softcap * std::tanh(logit / options.softcap);
    values.largest = std::max(values.z[j], values.largest);
    values.weighted_sum += at(problem.weight, options.first_column + column, 1) * values.z[j];
  }
  for (double z : values.z) values.sum += std::exp(z - values.largest);
}

// d loss / d logit, for a loss whose own gradient is `scale`.
void write_gradient(const Problem& problem, int64_t row, const Row& values, double lse, double scale,
                    const Whole& whole) {
  const Options& options = problem.options;
  const int64_t target = target_at(problem.target, row), start = row_offset(problem.grad_logits, row);
  const double share = options.label_smoothing / static_cast<double>(options.vocabulary);
  const double on_target = (1 - options.label_smoothing) * at(problem.weight, target, 1);
  const double along = on_target + share * whole.weight_sum + 2 * options.z_loss * lse;
  for (size_t j = 0; j < values.z.size(); ++j) {
    const int64_t column = options.first_column + static_cast<int64_t>(j);
    double gradient = along * std::exp(values.z[j] - lse) - share * at(problem.weight, column, 1);
    if (column == target) gradient -= on_target;
    if (options.softcap != 0) gradient *= 1 - std::pow(values.z[j] / options.softcap, 2);
    store_element(problem.grad_logits.data, problem.grad_logits.dtype, start + static_cast<int64_t>(j),
                  scale * gradient);
  }
}

void ignore_row(const Problem& problem, int64_t row) {
  put(problem.loss, row, 0);
  put(problem.lse, row, 0);
  if (problem.partials.is_present()) {
    put(problem.partials, 4 * row, -std::numeric_limits<double>::infinity());
    for (int64_t i = 1; i < 4; ++i) put(problem.partials, 4 * row + i, 0);
  }
  if (!problem.grad_logits.is_present()) return;
  const int64_t start = row_offset(problem.grad_logits, row);
  for (int64_t j = 0; j < columns_of(problem.logits); ++j) {
    store_element(problem.grad_logits.data, problem.grad_logits.dtype, start + j, 0);
  }
}

double run_row(const Problem& problem, int64_t row, const Whole& whole, Row& values) {
  const Options& options = problem.options;
  const int64_t target = target_at(problem.target, row), column = target - options.first_column;
  if (target == options.ignore_index) {
    ignore_row(problem, row);
    return 0;
  }
  read_row(problem, row, values);
  if (problem.is_backward()) {
    const int64_t place = problem.grad_loss.element_count() == 1 ? 0 : row;
    write_gradient(problem, row, values, at(problem.given_lse, row, 0), at(problem.grad_loss, place, 0), whole);
    return 0;
  }
  const bool is_here = column >= 0 && column < columns_of(problem.logits);
  const double own = is_here ? values.z[static_cast<size_t>(column)] : 0;
  if (problem.partials.is_present()) {
    const double shares[] = {values.largest, values.sum, own, values.weighted_sum};
    for (int64_t i = 0; i < 4; ++i) put(problem.partials, 4 * row + i, shares[i]);
    return 0;
  }
  const double lse = values.largest + std::log(values.sum);
  // As max - x + log(sum), so that large logits cancel before small numbers are added to them.
  double loss =
      (1 - options.label_smoothing) * at(problem.weight, target, 1) * ((values.largest - own) + std::log(values.sum));
  if (options.label_smoothing != 0) {
    loss += options.label_smoothing / static_cast<double>(options.vocabulary) *
            (whole.weight_sum * lse - values.weighted_sum);
  }
  if (options.z_loss != 0) loss += options.z_loss * lse * lse;
  put(problem.loss, row, loss);
  put(problem.lse, row, lse);
  if (problem.grad_logits.is_present()) {
    write_gradient(problem, row, values, lse, problem.gradient_scale / whole.divisor, whole);
  }
  return loss;
}

void run(const Problem& problem, int, Context&) {
  const Whole whole = whole_of(problem);
  Row values{std::vector<double>(static_cast<size_t>(columns_of(problem.logits))), 0, 0, 0};
  double total = 0;
  for (int64_t row = 0; row < rows_of(problem.logits); ++row) total += run_row(problem, row, whole, values);
  put(problem.total, 0, total / whole.divisor);
}

void run_rescale(const RescaleProblem& problem, int, Context&) {
  const double scale = at(problem.scale, 0, 1);
  if (scale == 1) return;
  for (int64_t i = 0; i < problem.tensor.element_count(); ++i) put(problem.tensor, i, at(problem.tensor, i, 0) * scale);
}

uint64_t code_version() {
  return hash_text("cross_entropy reference 1");
}

}  // namespace

constinit const registry::Kernel<Problem> kReference{
    .name = "reference", .supports = supports_on_cpu<Problem>, .run = run, .source_hash = code_version};
constinit const registry::Kernel<RescaleProblem> kRescaleReference{
    .name = "reference", .supports = supports_on_cpu<RescaleProblem>, .run = run_rescale, .source_hash = code_version};

}  // namespace kernel_pytorch::cross_entropy
