// The reference of optimizer_step: scalar, one group after another. It rounds as the contract says, so that codes can
// be compared bit for bit; tests compare the rule itself with formulas in double.
#include <bit>
#include <cmath>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/optimizer_step/arithmetic_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/dynamic_map_cuda.h"
#include "kernel_pytorch/ops/optimizer_step/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::optimizer_step {
namespace {

struct ScalarMath {
  static float mul(float a, float b) { return a * b; }
  static float add(float a, float b) { return a + b; }
  static float sub(float a, float b) { return a - b; }
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float root(float x) { return x < kLeastSquare ? 0.0f : std::sqrt(x); }
  static float reciprocal(float x) { return 1.0f / x; }
  static float scalar_reciprocal(float x) { return 1.0f / x; }
  static float abs(float x) { return std::fabs(x); }
  static float at_least(float x, float least) { return x < least ? least : x; }
  static float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
  static uint32_t min_bits(uint32_t a, uint32_t b) { return std::min(a, b); }
  static uint32_t max_bits(uint32_t a, uint32_t b) { return std::max(a, b); }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
  static uint32_t quiet_bits(float x) { return std::isnan(x) ? 0x7fc00000u : bits(x); }
};

const auto& first_map() {
  static constexpr DynamicMap<true> kMap = make_dynamic_map<true>();
  return kMap;
}
const auto& second_map() {
  static constexpr DynamicMap<false> kMap = make_dynamic_map<false>();
  return kMap;
}

class Group {
 public:
  Group(const Step& step, const Parameter& one, int64_t begin, int64_t end)
      : step_(step), one_(one), begin_(begin), end_(end), place_(begin / group_elements(step.storage)) {}

  void update(const Factors& factors) {
    for (int64_t i = begin_; i < end_; ++i) {
      Element<float> element = load(i);
      switch (step_.rule) {
        case Rule::kAdamW:
          optimizer_step::update<ScalarMath, Rule::kAdamW>(element, true, factors);
          break;
        case Rule::kLion:
          optimizer_step::update<ScalarMath, Rule::kLion>(element, true, factors);
          break;
        case Rule::kSgd:
          optimizer_step::update<ScalarMath, Rule::kSgd>(element, one_.first.is_present(), factors);
          break;
      }
      store_parameter(i, element.parameter);
      elements_.push_back(element);
    }
    if (one_.first.is_present()) store_first();
    if (one_.second.is_present()) store_second();
  }

 private:
  static uint32_t code(const TensorView& view, int64_t i) { return view.as<const uint8_t>()[i]; }
  static float float_of(const TensorView& view, int64_t i) {
    return static_cast<float>(load_element(view.data, view.dtype, i));
  }
  Element<float> load(int64_t i) const {
    Element<float> element{};
    element.parameter = float_of(one_.parameter, i);
    element.gradient = float_of(one_.gradient, i);
    if (one_.correction.is_present()) {
      const uint32_t weight = one_.parameter.as<const uint16_t>()[i];
      const int32_t correction = one_.correction.as<const int8_t>()[i];
      element.parameter = std::bit_cast<float>(master_bits(weight, correction));
    }
    if (one_.first.is_present()) element.first = load_first(i);
    if (one_.second.is_present()) element.second = load_second(i);
    return element;
  }
  float load_first(int64_t i) const {
    if (step_.storage == Storage::kFloat) return one_.first.as<const float>()[i];
    const float scale = one_.first_scale.as<const float>()[place_];
    if (step_.storage == Storage::kDynamic) return dynamic_first(first_map(), code(one_.first, i)) * scale;
    const float compressed = one_.first.as<const int8_t>()[i];
    return compressed / (254.0f - std::fabs(compressed)) * scale;
  }
  float load_second(int64_t i) const {
    if (step_.storage == Storage::kFloat) return one_.second.as<const float>()[i];
    const float scale = one_.second_scale.as<const float>()[place_];
    if (step_.storage == Storage::kDynamic) return second_map().magnitudes[code(one_.second, i)] * scale;
    const float root = static_cast<float>(code(one_.second, i)) * (scale * kRootUnit);
    return root * root;
  }
  void store_parameter(int64_t i, float value) const {
    if (!one_.correction.is_present()) return store_element(one_.parameter.data, one_.parameter.dtype, i, value);
    const uint32_t rounded = rounded_master<ScalarMath>(value);
    one_.parameter.as<uint16_t>()[i] = static_cast<uint16_t>((rounded + 0x8000u) >> 16);
    one_.correction.as<uint8_t>()[i] = static_cast<uint8_t>(rounded >> 8);
  }
  // NaN is above infinity, which is above every number.
  float scale_of(float Element<float>::*which) const {
    uint32_t largest = 0;
    for (const Element<float>& element : elements_) {
      largest = std::max(largest, ScalarMath::bits(element.*which) & 0x7fffffffu);
    }
    return std::bit_cast<float>(largest);
  }
  void store_first() const {
    const float scale = scale_of(&Element<float>::first), inverse = inverse_of_scale<ScalarMath>(scale);
    if (step_.storage != Storage::kFloat) one_.first_scale.as<float>()[place_] = scale;
    for (int64_t i = begin_; i < end_; ++i) {
      const float value = elements_[i - begin_].first;
      if (step_.storage == Storage::kFloat) {
        one_.first.as<float>()[i] = value;
      } else if (step_.storage == Storage::kCompanded) {
        one_.first.as<uint8_t>()[i] = static_cast<uint8_t>(first_code<ScalarMath>(value, inverse));
      } else {
        const float scaled = value * inverse;
        one_.first.as<uint8_t>()[i] =
            static_cast<uint8_t>(dynamic_first_code(first_map(), scaled, ScalarMath::bits(scaled)));
      }
    }
  }
  void store_second() const {
    if (step_.storage == Storage::kFloat) {
      for (int64_t i = begin_; i < end_; ++i) one_.second.as<float>()[i] = elements_[i - begin_].second;
      return;
    }
    const bool is_companded = step_.storage == Storage::kCompanded;
    const float scale = scale_of(is_companded ? &Element<float>::root : &Element<float>::second);
    const float inverse = inverse_of_scale<ScalarMath>(scale);
    one_.second_scale.as<float>()[place_] = scale;
    for (int64_t i = begin_; i < end_; ++i) {
      const Element<float>& element = elements_[i - begin_];
      const float scaled = element.second * inverse;
      const uint32_t code = is_companded
                                ? root_code<ScalarMath>(element.root, inverse * 255.0f)
                                : static_cast<uint32_t>(nearest_rank(second_map(), scaled, ScalarMath::bits(scaled)));
      one_.second.as<uint8_t>()[i] = static_cast<uint8_t>(code);
    }
  }

  const Step& step_;
  const Parameter& one_;
  int64_t begin_, end_, place_;
  std::vector<Element<float>> elements_;
};

void run(const Step& step, int, Context&) {
  if (is_skipped(step)) return;
  const int64_t group = group_elements(step.storage);
  for (const Parameter& one : step.parameters) {
    const Factors factors = factors_of(step, one);
    const int64_t count = one.parameter.element_count();
    for (int64_t begin = 0; begin < count; begin += group) {
      Group(step, one, begin, std::min(begin + group, count)).update(factors);
    }
    *one.step.as<float>() += 1;
  }
}

uint64_t code_version() {
  return hash_text("optimizer_step reference 1");
}

}  // namespace

constinit const registry::Kernel<Step> kReference{
    .name = "reference", .supports = supports_on_cpu<Step>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::optimizer_step
