// The reference of adamw: scalar, in double, one element after another.
#include <bit>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/adamw/draws_cuda.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/adamw/rates.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::adamw {
namespace {

struct Rounding {
  const TensorView& seed;
  uint64_t first_block;

  void store(const TensorView& view, int64_t i, double value, Draw draw) const {
    if (!seed.is_present() || view.dtype != DType::kBFloat16) return store_element(view.data, view.dtype, i, value);
    const auto* seeds = seed.as<const int64_t>();
    const uint64_t block = draw_block(first_block + static_cast<uint64_t>(i / 8), draw);
    const uint32_t random = philox(seeds[0], seeds[1], block).bits(static_cast<int>(i % 8));
    view.as<uint16_t>()[i] = round_stochastically(std::bit_cast<uint32_t>(static_cast<float>(value)), random);
  }
};

void update(const Step& step, const Parameter& one, const Rounding& rounding) {
  const Factors factors = factors_of(step, one);
  const auto load = [](const TensorView& view, int64_t i) { return load_element(view.data, view.dtype, i); };
  for (int64_t i = 0; i < one.parameter.element_count(); ++i) {
    const double gradient = load(one.gradient, i) * factors.gradient;
    const double first = load(one.exp_avg, i) + (1 - step.beta1) * (gradient - load(one.exp_avg, i));
    const double second = step.beta2 * load(one.exp_avg_sq, i) + (1 - step.beta2) * gradient * gradient;
    double largest = second;
    if (one.max_exp_avg_sq.is_present()) {
      const double before = load(one.max_exp_avg_sq, i);
      largest = second > before || std::isnan(second) ? second : before;
    }
    const double before = load(one.master.is_present() ? one.master : one.parameter, i);
    const double after =
        before * factors.keep - factors.step_size * first / (std::sqrt(largest) * factors.root + step.eps);
    rounding.store(one.exp_avg, i, first, Draw::kFirst);
    rounding.store(one.exp_avg_sq, i, second, Draw::kSecond);
    if (one.max_exp_avg_sq.is_present()) rounding.store(one.max_exp_avg_sq, i, largest, Draw::kSecond);
    if (one.master.is_present()) store_element(one.master.data, DType::kFloat32, i, after);
    rounding.store(one.parameter, i, after, Draw::kParameter);
  }
}

void run(const Step& step, int, Context&) {
  if (is_skipped(step)) return;
  const std::vector<int64_t> starts = random_starts(step);
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    update(step, step.parameters[i], {step.seed, static_cast<uint64_t>(starts[i])});
    *step.parameters[i].step.as<float>() += 1;
  }
}

uint64_t code_version() {
  return hash_text("adamw reference 1");
}

}  // namespace

constinit const registry::Kernel<Step> kReference{
    .name = "reference", .supports = supports_on_cpu<Step>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::adamw
