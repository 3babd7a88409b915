// A tensor that the caller owns: address, element type, sizes, strides in elements, device. Copying a view copies no
// data. A default-constructed view stands for an optional tensor that was not given.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "kernel_pytorch/base/device.h"
#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

inline constexpr int kMaxRank = 8;

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int8_t rank = -1;  // -1: absent
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> strides{};  // in elements; 0 where expanded

  bool is_present() const { return rank >= 0; }
  int64_t size(int dimension) const { return sizes[dimension < 0 ? rank + dimension : dimension]; }
  int64_t stride(int dimension) const { return strides[dimension < 0 ? rank + dimension : dimension]; }
  std::span<const int64_t> shape() const { return {sizes.data(), static_cast<size_t>(rank < 0 ? 0 : rank)}; }

  int64_t element_count() const {
    int64_t count = 1;
    for (int64_t size : shape()) count *= size;
    return rank < 0 ? 0 : count;
  }
  int64_t byte_count() const {
    return element_count() * size_of(dtype);
  }  // of the elements, not of the memory they span

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// A row-major view. Throws kInvalidArgument above kMaxRank dimensions or for a negative size.
KP_EXPORT TensorView contiguous_view(void* data, DType dtype, std::span<const int64_t> sizes, Device device = {});
inline TensorView contiguous_view(void* data, DType dtype, std::initializer_list<int64_t> sizes, Device device = {}) {
  return contiguous_view(data, dtype, std::span<const int64_t>(sizes.begin(), sizes.size()), device);
}

KP_EXPORT bool is_contiguous(const TensorView& view);
// A matrix whose columns are dense in memory, and not its rows.
inline bool is_column_major(const TensorView& matrix) {
  return matrix.rank == 2 && matrix.strides[0] == 1 && matrix.strides[1] > 1 && matrix.strides[1] >= matrix.sizes[0];
}
// Elements from the lowest to the highest one touched, so a buffer of that many elements backs the view (strides >= 0).
KP_EXPORT int64_t span_elements(const TensorView& view);
KP_EXPORT std::string to_string(
    const TensorView& view);  // "bf16[8, 4096] on cuda:0", with strides where not contiguous
KP_EXPORT std::string shape_text(std::span<const int64_t> sizes);  // "[8, 4096]"

inline std::ostream& operator<<(std::ostream& out, const TensorView& view) {
  return out << to_string(view);
}

}  // namespace kernel_pytorch
