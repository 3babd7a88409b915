#include "kernel_pytorch/registry/compare.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::registry {
namespace {

double read_element(const TensorView& view, int64_t offset) {
  if (view.dtype == DType::kBool) return view.as<const uint8_t>()[offset];  // poison is no bool
  return load_element(view.data, view.dtype, offset);
}

bool is_poison(const TensorView& view, int64_t offset) {
  const auto* bytes = view.as<const unsigned char>() + offset * size_of(view.dtype);
  for (int64_t i = 0; i < size_of(view.dtype); ++i) {
    if (bytes[i] != kPoisonByte) return false;
  }
  return true;
}

// Walks the elements of a shape in row-major order.
class Walk {
 public:
  explicit Walk(const TensorView& view) : view_(view), count_(view.element_count()), left_(count_) {}
  bool is_done() const { return left_ == 0; }
  int64_t offset_in(const TensorView& view, bool is_dense) const {
    if (is_dense) return count_ - left_;
    int64_t offset = 0;
    for (int i = 0; i < view.rank; ++i) offset += index_[i] * view.strides[i];
    return offset;
  }
  std::string place() const { return shape_text({index_.data(), static_cast<size_t>(view_.rank)}); }
  void next() {
    --left_;
    for (int i = view_.rank - 1; i >= 0; --i) {
      if (++index_[i] < view_.sizes[i]) return;
      index_[i] = 0;
    }
  }

 private:
  const TensorView& view_;
  std::array<int64_t, kMaxRank> index_{};
  const int64_t count_;
  int64_t left_;
};

double largest_finite(const TensorView& view) {
  double largest = 0;
  const bool is_dense = is_contiguous(view);
  for (Walk walk(view); !walk.is_done(); walk.next()) {
    const double value = std::fabs(read_element(view, walk.offset_in(view, is_dense)));
    if (std::isfinite(value)) largest = std::max(largest, value);
  }
  return largest;
}

// How far past its allowance an element is: 0 when within, infinite where no allowance helps (NaN, infinity).
double excess(double actual, double reference, double allowance) {
  if (std::isnan(actual) && std::isnan(reference)) return 0;
  if (actual == reference) return 0;
  if (!std::isfinite(actual) || !std::isfinite(reference)) return HUGE_VAL;
  const double difference = std::fabs(actual - reference);
  return difference <= allowance ? 0 : difference - allowance;
}

}  // namespace

std::string compare(const TensorView& actual, const TensorView& reference, const Tolerance& tolerance) {
  const double largest = largest_finite(reference);
  int64_t different = 0, unwritten = 0;
  double worst_excess = 0;
  std::string worst;
  const bool actual_is_dense = is_contiguous(actual), reference_is_dense = is_contiguous(reference);
  for (Walk walk(reference); !walk.is_done(); walk.next()) {
    const int64_t offset = walk.offset_in(actual, actual_is_dense);
    const double value = read_element(actual, offset);
    const double expected = read_element(reference, walk.offset_in(reference, reference_is_dense));
    const double allowance =
        std::max(tolerance.relative * std::fabs(expected) + tolerance.absolute * largest, tolerance.least);
    const double over = excess(value, expected, allowance);
    if (over == 0) continue;
    ++different;
    if (is_poison(actual, offset)) ++unwritten;
    if (over <= worst_excess) continue;
    worst_excess = over;
    worst = concat(walk.place(), ": ", value, " instead of ", expected, " (allowed difference ", allowance, ")");
  }
  if (different == 0) return "";
  std::string text = concat(different, " of ", reference.element_count(), " elements differ");
  if (unwritten > 0) text += concat(", ", unwritten, " of them were not written");
  return text + "; worst at " + worst;
}

}  // namespace kernel_pytorch::registry
