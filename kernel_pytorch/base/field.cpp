#include "kernel_pytorch/base/field.h"

#include <algorithm>

namespace kernel_pytorch {

DimensionSizes::DimensionSizes(const Fields& fields) : fields_(fields) {
  std::fill_n(sizes_.begin(), fields.dimensions.size(), kUnknown);
}

void DimensionSizes::set(int dimension, int64_t size) {
  int64_t& known = sizes_[static_cast<size_t>(dimension)];
  if (known == kUnknown) known = size;
}

void DimensionSizes::bind_options(const void* arguments) {
  for (size_t i = 0; i < fields_.dimensions.size(); ++i) {
    const int8_t option = fields_.dimensions[i].option;
    if (option >= 0) sizes_[i] = std::max<int64_t>(fields_[option].value<int64_t>(arguments), kUnknown);
  }
}

void DimensionSizes::bind(const Field& field, const TensorView& view, const void* arguments) {
  const Shape* shape = picked_shape(fields_, field, arguments);
  if (shape != nullptr && view.is_present()) bind(*shape, view);
}

void DimensionSizes::bind(const Shape& shape, const TensorView& view) {
  const int named = shape.named();
  if (view.rank < named || (shape.any_at < 0 && view.rank != named)) return;
  const int any_count = view.rank - named;
  if (shape.any_at >= 0 && !has_any_) {
    any_count_ = static_cast<int8_t>(any_count);
    std::copy_n(view.sizes.begin() + shape.any_at, any_count, any_.begin());
    has_any_ = true;
  }
  for (int i = 0; i < shape.rank; ++i) {
    const int16_t dimension = shape.dimensions[static_cast<size_t>(i)];
    const bool is_behind = shape.any_at >= 0 && i > shape.any_at;
    if (dimension >= 0) set(dimension, view.size(is_behind ? i - 1 + any_count : i));
  }
}

int64_t DimensionSizes::computed(int16_t dimension) const {
  if (dimension < 0) return -2 - dimension;
  const Dimension& definition = fields_.dimensions[static_cast<size_t>(dimension)];
  if (definition.operation == 0) return sizes_[static_cast<size_t>(dimension)];
  const int64_t left = computed(definition.left), right = computed(definition.right);
  if (left < 0 || right < 0) return kUnknown;
  if (definition.operation == '-') return std::max<int64_t>(left - right, 0);
  if (definition.operation == '*') {
    int64_t product = 0;
    return __builtin_mul_overflow(left, right, &product) ? kUnknown : product;
  }
  if (right == 0) return kUnknown;
  return left / right + (definition.operation == '^' && left % right != 0);
}

std::optional<int64_t> DimensionSizes::size_of(int dimension) const {
  const int64_t size = computed(static_cast<int16_t>(dimension));
  return size == kUnknown ? std::nullopt : std::optional(size);
}

std::optional<TensorView> DimensionSizes::shape_of(const Shape& shape) const {
  TensorView view;
  view.rank = 0;
  for (int i = 0; i < shape.rank; ++i) {
    const int16_t dimension = shape.dimensions[static_cast<size_t>(i)];
    if (dimension == kAnyDimensions) {
      if (!has_any_ || view.rank + any_count_ > kMaxRank) return std::nullopt;
      std::copy_n(any_.begin(), any_count_, view.sizes.begin() + view.rank);
      view.rank = static_cast<int8_t>(view.rank + any_count_);
      continue;
    }
    const int64_t size = computed(dimension);
    if (size == kUnknown || view.rank == kMaxRank) return std::nullopt;
    view.sizes[static_cast<size_t>(view.rank++)] = size;
  }
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.strides[static_cast<size_t>(i)] = stride;
    stride *= std::max<int64_t>(view.sizes[static_cast<size_t>(i)], 1);
  }
  return view;
}

std::optional<TensorView> DimensionSizes::shape_of(const Field& field, const void* arguments) const {
  if (field.like >= 0) {
    const TensorView& like = fields_[field.like].tensor(arguments);
    return like.is_present() ? std::optional(contiguous_view(nullptr, like.dtype, like.shape())) : std::nullopt;
  }
  if (field.row_list >= 0) {
    const auto bits = static_cast<uint64_t>(fields_[field.row_bits].value<int64_t>(arguments));
    int64_t elements = 0;
    const std::vector<TensorView>& list = fields_[field.row_list].tensors(const_cast<void*>(arguments));
    for (size_t i = 0; i < std::min<size_t>(list.size(), 64); ++i) {
      if (bits >> i & 1) elements += list[i].element_count();
    }
    return contiguous_view(nullptr, DType{}, {elements});
  }
  const Shape* shape = picked_shape(fields_, field, arguments);
  if (shape == nullptr) return std::nullopt;
  auto view = shape_of(*shape);
  if (!view || !field.follows_order(*shape)) return view;
  const TensorView& order = fields_[field.order_of].tensor(arguments);
  if (view->rank == 2 && is_column_major(order)) view->strides[0] = 1, view->strides[1] = view->sizes[0];
  if (view->rank < 4 || order.rank < 4 || order.strides[1] >= order.strides[2]) return view;
  std::swap(view->sizes[1], view->sizes[2]);
  *view = contiguous_view(nullptr, view->dtype, view->shape());
  std::swap(view->sizes[1], view->sizes[2]);
  std::swap(view->strides[1], view->strides[2]);
  return view;
}

const Shape* picked_shape(const Fields& fields, const Field& field, const void* arguments) {
  if (field.shape_count == 0) return nullptr;
  if (field.shape_count == 1) return field.shapes.data();
  int alternative = 0;
  for (const int8_t selector : field.shape_by) {
    if (selector < 0) break;
    const Field& by = fields[selector];
    if (by.kind == FieldKind::kChoice) {
      alternative = by.value<uint8_t>(arguments);
      break;
    }
    const bool is_set = by.is_tensor()                   ? by.tensor(arguments).is_present()
                        : by.kind == FieldKind::kInteger ? by.value<int64_t>(arguments) != 0
                                                         : by.value<bool>(arguments);
    if (is_set) break;
    ++alternative;
  }
  return &field.shapes[static_cast<size_t>(std::min<int>(alternative, field.shape_count - 1))];
}

std::optional<DType> declared_type(const Fields& fields, const Field& field, const void* arguments) {
  if (field.type_rule == TypeRule::kFixed) return field.type;
  if (field.type_rule == TypeRule::kAny) return std::nullopt;
  if (field.type_rule == TypeRule::kComputed) return field.rules.compute_dtype(arguments);
  const Field& source = fields[field.type_of];
  if (field.type_rule == TypeRule::kNamed) {
    std::string_view words = source.rules.choices;
    for (uint8_t i = 0; i < source.value<uint8_t>(arguments); ++i) take_token(words);
    return parse_dtype(take_token(words));
  }
  if (source.kind == FieldKind::kTensorList) {
    DType widest = DType::kFloat32;
    for (const TensorView& view : source.tensors(const_cast<void*>(arguments))) {
      if (view.dtype == DType::kFloat64) widest = DType::kFloat64;
    }
    return widest;
  }
  const TensorView& view = source.tensor(arguments);
  if (!view.is_present()) return std::nullopt;
  const bool is_statistic =
      field.type_rule == TypeRule::kStatistic && (field.type_if < 0 || fields[field.type_if].value<bool>(arguments));
  return is_statistic ? statistic_type(view.dtype) : view.dtype;
}

}  // namespace kernel_pytorch
