// The reference of optimizer_step: scalar, one element or one group after another. It rounds as the contract says, so
// that codes can be compared bit for bit; tests compare the rule itself with formulas in double.
#include <bit>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/draws_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::optimizer_step {
namespace {

template <class Real>
struct ScalarMath {
  static Real mul(Real a, Real b) { return a * b; }
  static Real add(Real a, Real b) { return a + b; }
  static Real sub(Real a, Real b) { return a - b; }
  static Real fma(Real a, Real b, Real c) { return std::fma(a, b, c); }
  static Real root(Real x) { return x < kLeastSquare ? Real{0} : std::sqrt(x); }
  static Real reciprocal(Real x) { return 1 / x; }
  static Real scalar_reciprocal(Real x) { return 1 / x; }
  static Real abs(Real x) { return std::fabs(x); }
  static Real at_least(Real x, Real least) { return x < least ? least : x; }
  static Real larger(Real x, Real y) { return x > y || std::isnan(x) ? x : y; }
  static Real sign(Real x) { return x > 0 ? Real{1} : x < 0 ? Real{-1} : x; }
  static uint32_t min_bits(uint32_t a, uint32_t b) { return std::min(a, b); }
  static uint32_t max_bits(uint32_t a, uint32_t b) { return std::max(a, b); }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
  static uint32_t quiet_bits(float x) { return std::isnan(x) ? 0x7fc00000u : bits(x); }
};
using FloatMath = ScalarMath<float>;

template <class Real>
void update_by_rule(Rule rule, Element<Real>& element, Keeps keeps, const FactorsOf<Real>& factors) {
  using Math = ScalarMath<Real>;
  if (rule == Rule::kAdamW) update<Math, Rule::kAdamW>(element, keeps, factors);
  if (rule == Rule::kLion) update<Math, Rule::kLion>(element, keeps, factors);
  if (rule == Rule::kSgd) update<Math, Rule::kSgd>(element, keeps, factors);
}

template <class Real>
Real value_of(const TensorView& view, int64_t i) {
  return view.is_present() ? static_cast<Real>(load_element(view.data, view.dtype, i)) : Real{0};
}

float master_of(const Parameter& one, int64_t i) {
  const uint32_t weight = one.parameter.as<const uint16_t>()[i];
  const int32_t correction = one.correction.as<const int8_t>()[i];
  return std::bit_cast<float>(master_bits(weight, correction));
}
void store_master(const Parameter& one, int64_t i, float value) {
  const uint32_t rounded = rounded_master<FloatMath>(value);
  one.parameter.as<uint16_t>()[i] = static_cast<uint16_t>((rounded + 0x8000u) >> 16);
  one.correction.as<uint8_t>()[i] = static_cast<uint8_t>(rounded >> 8);
}

struct Rounding {
  const TensorView& seed;
  uint64_t first_block;

  void store(const TensorView& view, int64_t i, double value, Draw draw) const {
    if (!seed.is_present() || view.dtype != DType::kBFloat16) return store_element(view.data, view.dtype, i, value);
    const auto* seeds = seed.as<const int64_t>();
    const uint64_t block = draw_block(first_block + static_cast<uint64_t>(i / kPhiloxElements), draw);
    const uint32_t random = philox(seeds[0], seeds[1], block).bits(static_cast<int>(i % kPhiloxElements));
    view.as<uint16_t>()[i] = round_stochastically(std::bit_cast<uint32_t>(static_cast<float>(value)), random);
  }
};

template <class Real>
void update_plain(const Step& step, const Parameter& one, const Rounding& rounding) {
  const FactorsOf<Real> factors = factors_of<Real>(step, one);
  const Keeps keeps{.first = one.first.is_present(), .maximum = one.maximum.is_present()};
  const bool has_correction = one.correction.is_present(), has_master = one.master.is_present();
  for (int64_t i = 0; i < one.parameter.element_count(); ++i) {
    Element<Real> element{};
    element.parameter = has_correction ? master_of(one, i) : value_of<Real>(has_master ? one.master : one.parameter, i);
    element.gradient = value_of<Real>(one.gradient, i);
    element.first = value_of<Real>(one.first, i);
    element.second = value_of<Real>(one.second, i);
    element.maximum = value_of<Real>(one.maximum, i);
    update_by_rule(step.rule, element, keeps, factors);
    if (one.first.is_present()) rounding.store(one.first, i, element.first, Draw::kFirst);
    if (one.second.is_present()) rounding.store(one.second, i, element.second, Draw::kSecond);
    if (one.maximum.is_present()) rounding.store(one.maximum, i, element.maximum, Draw::kSecond);
    if (has_master) store_element(one.master.data, DType::kFloat32, i, element.parameter);
    if (has_correction) {
      store_master(one, i, static_cast<float>(element.parameter));
    } else {
      rounding.store(one.parameter, i, element.parameter, Draw::kParameter);
    }
  }
}

const auto& first_map() {
  static constexpr DynamicMap<true> kMap = make_dynamic_map<true>();
  return kMap;
}
const auto& second_map() {
  static constexpr DynamicMap<false> kMap = make_dynamic_map<false>();
  return kMap;
}

// Elements of 8-bit states that share a scale.
class Group {
 public:
  Group(const Step& step, const Parameter& one, int64_t begin, int64_t end)
      : step_(step), one_(one), begin_(begin), end_(end), place_(begin / group_elements(step.storage)) {}

  void update(const Factors& factors) {
    for (int64_t i = begin_; i < end_; ++i) {
      Element<float> element{};
      element.parameter = one_.correction.is_present() ? master_of(one_, i) : value_of<float>(one_.parameter, i);
      element.gradient = value_of<float>(one_.gradient, i);
      element.first = load_first(i);
      if (one_.second.is_present()) element.second = load_second(i);
      update_by_rule(step_.rule, element, {.first = true, .maximum = false}, factors);
      if (one_.correction.is_present()) {
        store_master(one_, i, element.parameter);
      } else {
        store_element(one_.parameter.data, one_.parameter.dtype, i, element.parameter);
      }
      elements_.push_back(element);
    }
    store_first();
    if (one_.second.is_present()) store_second();
  }

 private:
  static uint32_t code(const TensorView& view, int64_t i) { return view.as<const uint8_t>()[i]; }
  float load_first(int64_t i) const {
    const float scale = one_.first_scale.as<const float>()[place_];
    if (step_.storage == Storage::kDynamic) return dynamic_first(first_map(), code(one_.first, i)) * scale;
    const float compressed = one_.first.as<const int8_t>()[i];
    return compressed / (254.0f - std::fabs(compressed)) * scale;
  }
  float load_second(int64_t i) const {
    const float scale = one_.second_scale.as<const float>()[place_];
    if (step_.storage == Storage::kDynamic) return second_map().magnitudes[code(one_.second, i)] * scale;
    const float root = static_cast<float>(code(one_.second, i)) * (scale * kRootUnit);
    return root * root;
  }
  // NaN is above infinity, which is above every number.
  float scale_of(float Element<float>::*which) const {
    uint32_t largest = 0;
    for (const Element<float>& element : elements_) {
      largest = std::max(largest, FloatMath::bits(element.*which) & 0x7fffffffu);
    }
    return std::bit_cast<float>(largest);
  }
  void store_first() const {
    const float scale = scale_of(&Element<float>::first), inverse = inverse_of_scale<FloatMath>(scale);
    one_.first_scale.as<float>()[place_] = scale;
    for (int64_t i = begin_; i < end_; ++i) {
      const float value = elements_[i - begin_].first, scaled = value * inverse;
      const uint32_t code = step_.storage == Storage::kCompanded
                                ? first_code<FloatMath>(value, inverse)
                                : dynamic_first_code(first_map(), scaled, FloatMath::bits(scaled));
      one_.first.as<uint8_t>()[i] = static_cast<uint8_t>(code);
    }
  }
  void store_second() const {
    const bool is_companded = step_.storage == Storage::kCompanded;
    const float scale = scale_of(is_companded ? &Element<float>::root : &Element<float>::second);
    const float inverse = inverse_of_scale<FloatMath>(scale);
    one_.second_scale.as<float>()[place_] = scale;
    for (int64_t i = begin_; i < end_; ++i) {
      const Element<float>& element = elements_[i - begin_];
      const float scaled = element.second * inverse;
      const uint32_t code = is_companded
                                ? root_code<FloatMath>(element.root, inverse * 255.0f)
                                : static_cast<uint32_t>(nearest_rank(second_map(), scaled, FloatMath::bits(scaled)));
      one_.second.as<uint8_t>()[i] = static_cast<uint8_t>(code);
    }
  }

  const Step& step_;
  const Parameter& one_;
  int64_t begin_, end_, place_;
  std::vector<Element<float>> elements_;
};

void update_coded(const Step& step, const Parameter& one) {
  const Factors factors = factors_of<float>(step, one);
  const int64_t group = group_elements(step.storage), count = one.parameter.element_count();
  for (int64_t begin = 0; begin < count; begin += group) {
    Group(step, one, begin, std::min(begin + group, count)).update(factors);
  }
}

void run(const Step& step, int, Context&) {
  if (is_skipped(step)) return;
  const std::vector<int64_t> starts = random_starts(step);
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    const Parameter& one = step.parameters[i];
    const Rounding rounding{step.seed, static_cast<uint64_t>(starts[i])};
    if (step.storage != Storage::kPlain) {
      update_coded(step, one);
    } else if (one.parameter.dtype == DType::kFloat64) {
      update_plain<double>(step, one, rounding);
    } else {
      update_plain<float>(step, one, rounding);
    }
    *one.step.as<float>() += 1;
  }
}

uint64_t code_version() {
  return hash_text("optimizer_step reference 2");
}

}  // namespace

constinit const registry::Kernel<Step> kReference{
    .name = "reference", .supports = supports_on_cpu<Step>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::optimizer_step
