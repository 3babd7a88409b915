// The reference of rope: scalar, in double, one pair after another, any strides.
#include <cmath>
#include <limits>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/rope/table.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::rope {
namespace {

struct Pair {
  double first, second;
};

Pair turn(const Problem& problem, int64_t batch, int64_t place, int64_t pair) {
  const int64_t position = position_of(problem, batch, place);
  if (!problem.cos.is_present()) {
    const double angle = static_cast<double>(position) *
                         load_element(problem.inverse_frequencies.data, problem.inverse_frequencies.dtype, pair);
    return {std::cos(angle) * problem.scale, std::sin(angle) * problem.scale};
  }
  const auto at = [&](const TensorView& table) {
    return load_element(
        table.data, table.dtype,
        batch * table.strides[0] + position * table.strides[1] + pair * problem.table_step() * table.strides[2]);
  };
  return {at(problem.cos), at(problem.sin)};
}

void rotate_head(const Problem& problem, const TensorView& input, const TensorView& output, int64_t batch,
                 int64_t place, int64_t head) {
  const auto offset = [&](const TensorView& view, int64_t column) {
    return batch * view.strides[0] + place * view.strides[1] + head * view.strides[2] + column * view.strides[3];
  };
  const auto load = [&](int64_t column) { return load_element(input.data, input.dtype, offset(input, column)); };
  const auto store = [&](int64_t column, double value) {
    store_element(output.data, output.dtype, offset(output, column), value);
  };
  for (int64_t i = 0; i < problem.pairs(); ++i) {
    const int64_t first = problem.interleaved ? 2 * i : i;
    const int64_t second = problem.interleaved ? 2 * i + 1 : i + problem.pairs();
    const auto [cosine, sine] = turn(problem, batch, place, i);
    const double signed_sine = problem.inverse ? -sine : sine;
    const double a = load(first), b = load(second);
    store(first, a * cosine - b * signed_sine);
    store(second, b * cosine + a * signed_sine);
  }
  for (int64_t i = problem.rotary_dim; i < problem.head_dim(); ++i) store(i, load(i));
}

void run(const Problem& problem, int, Context&) {
  check_positions_in_table(problem);
  for (int64_t batch = 0; batch < problem.batch(); ++batch) {
    for (int64_t place = 0; place < problem.sequence(); ++place) {
      for (int64_t head = 0; head < problem.query.sizes[2]; ++head) {
        rotate_head(problem, problem.query, problem.output_of_query(), batch, place, head);
      }
      for (int64_t head = 0; problem.key.is_present() && head < problem.key.sizes[2]; ++head) {
        rotate_head(problem, problem.key, problem.output_of_key(), batch, place, head);
      }
    }
  }
}

uint64_t code_version() {
  return hash_text("rope reference 1");
}

}  // namespace

constinit const registry::Kernel<Problem> kReference{
    .name = "reference", .supports = supports_on_cpu<Problem>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::rope
