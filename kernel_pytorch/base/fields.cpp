#include "kernel_pytorch/base/fields.h"

#include <algorithm>

namespace kernel_pytorch {

DimensionSizes::DimensionSizes() {
  sizes_.fill(kUnknown);
}

void DimensionSizes::bind(const Field& field, const TensorView& view) {
  if (field.rank < 0 || !view.is_present()) return;
  const bool leads = field.has_leading_dimensions();
  const int named = field.rank - leads;
  if (view.rank < named || (!leads && view.rank != named)) return;
  if (leads && !has_leading_) {
    leading_count_ = static_cast<int8_t>(view.rank - named);
    std::copy_n(view.sizes.begin(), leading_count_, leading_.begin());
    has_leading_ = true;
  }
  for (int i = 0; i < named; ++i) {
    const int16_t name = field.dimensions[static_cast<size_t>(i + leads)];
    if (name >= 0 && sizes_[static_cast<size_t>(name)] == kUnknown) {
      sizes_[static_cast<size_t>(name)] = view.size(i - named);
    }
  }
}

std::optional<TensorView> DimensionSizes::shape_of(const Field& field) const {
  TensorView shape;
  shape.rank = 0;
  for (int i = 0; i < field.rank; ++i) {
    const int16_t dimension = field.dimensions[static_cast<size_t>(i)];
    if (dimension == kLeadingDimensions) {
      if (!has_leading_) return std::nullopt;
      std::copy_n(leading_.begin(), leading_count_, shape.sizes.begin());
      shape.rank = leading_count_;
      continue;
    }
    const int64_t size = dimension >= 0 ? sizes_[static_cast<size_t>(dimension)] : -2 - dimension;
    if (size == kUnknown || shape.rank == kMaxRank) return std::nullopt;
    shape.sizes[static_cast<size_t>(shape.rank++)] = size;
  }
  int64_t stride = 1;
  for (int i = shape.rank - 1; i >= 0; --i) {
    shape.strides[static_cast<size_t>(i)] = stride;
    stride *= std::max<int64_t>(shape.sizes[static_cast<size_t>(i)], 1);
  }
  return shape;
}

std::optional<DType> declared_type(const Fields& fields, const Field& field, const void* arguments) {
  if (field.type_rule == TypeRule::kFixed) return field.type;
  if (field.type_rule == TypeRule::kAny) return std::nullopt;
  const TensorView& source = fields.all[static_cast<size_t>(field.type_of)].tensor(arguments);
  if (!source.is_present()) return std::nullopt;
  return field.type_rule == TypeRule::kStatistic ? statistic_type(source.dtype) : source.dtype;
}

}  // namespace kernel_pytorch
