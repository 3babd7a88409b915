#include "kernel_pytorch/base/overlap.h"

#include <algorithm>

namespace kernel_pytorch {
namespace {

// stride * factor with a factor in [low, high]: how far apart one dimension takes two indices.
struct Term {
  int64_t stride;
  int64_t low;
  int64_t high;
};

int64_t floor_divide(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// A sum of terms that is to be a given distance.
class Distance {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].stride != stride) continue;
      terms_[i].low += low;
      terms_[i].high += high;
      return;
    }
    terms_[count_++] = {stride, low, high};
  }

  bool can_be(int64_t distance) {
    std::sort(terms_.begin(), terms_.begin() + count_,
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    for (int i = count_ - 1; i >= 0; --i) {
      lowest_[i] = lowest_[i + 1] + terms_[i].stride * terms_[i].low;
      highest_[i] = highest_[i + 1] + terms_[i].stride * terms_[i].high;
    }
    return search(0, distance);
  }

 private:
  static constexpr int kMostTerms = 2 * kMaxRank + 1;
  static constexpr int kMostSteps = 1 << 16;

  // The largest stride first: what the smaller ones cannot make up leaves few factors to try.
  bool search(int first, int64_t distance) {
    if (distance < lowest_[first] || distance > highest_[first]) return false;
    if (first == count_ || ++steps_ > kMostSteps) return true;
    const Term& term = terms_[first];
    const int64_t low = std::max(term.low, -floor_divide(highest_[first + 1] - distance, term.stride));
    const int64_t high = std::min(term.high, floor_divide(distance - lowest_[first + 1], term.stride));
    for (int64_t factor = low; factor <= high; ++factor) {
      if (search(first + 1, distance - factor * term.stride)) return true;
    }
    return false;
  }

  std::array<Term, kMostTerms> terms_{};
  std::array<int64_t, kMostTerms + 1> lowest_{}, highest_{};
  int count_ = 0;
  int steps_ = 0;
};

int64_t address_of(const TensorView& view) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
}

}  // namespace

bool overlaps_itself(const TensorView& view) {
  if (is_contiguous(view) || view.element_count() == 0) return false;
  std::array<Term, kMaxRank> dimensions{};
  int count = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.sizes[i] == 1) continue;
    if (view.strides[i] == 0) return true;
    dimensions[count++] = {view.strides[i], 0, view.sizes[i] - 1};
  }
  std::sort(dimensions.begin(), dimensions.begin() + count,
            [](const Term& a, const Term& b) { return a.stride < b.stride; });
  int64_t reached = 0;  // by all smaller strides
  for (int i = 0; i < count; ++i) {
    const auto& [stride, low, high] = dimensions[i];
    if (stride <= reached) {
      // A step of this dimension, or several, may be steps of the smaller ones.
      Distance rest;
      for (int j = 0; j < i; ++j) rest.add(dimensions[j].stride, -dimensions[j].high, dimensions[j].high);
      for (int64_t factor = 1; factor <= high && factor * stride <= reached; ++factor) {
        if (rest.can_be(factor * stride)) return true;
      }
    }
    reached += high * stride;
  }
  return false;
}

bool overlap(const TensorView& first, const TensorView& second) {
  if (!first.is_present() || !second.is_present()) return false;
  const int64_t distance = address_of(second) - address_of(first);
  const int64_t first_size = size_of(first.dtype), second_size = size_of(second.dtype);
  if (distance >= span_elements(first) * first_size || -distance >= span_elements(second) * second_size) return false;
  if (first.element_count() == 0 || second.element_count() == 0) return false;
  Distance apart;
  apart.add(1, 1 - second_size, first_size - 1);  // bytes of two elements
  for (int i = 0; i < first.rank; ++i) {
    if (first.strides[i] != 0) apart.add(first.strides[i] * first_size, 0, first.sizes[i] - 1);
  }
  for (int i = 0; i < second.rank; ++i) {
    if (second.strides[i] != 0) apart.add(second.strides[i] * second_size, 1 - second.sizes[i], 0);
  }
  return apart.can_be(distance);
}

}  // namespace kernel_pytorch
