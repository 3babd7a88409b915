// What ops over lists of tensors share: many tensors of uneven size are one row of chunks, so that work is balanced
// however the elements are spread, and results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

// Whether the elements fill one stretch of memory without gap or overlap, in whatever order: then an elementwise op may
// take them in the order of memory.
inline bool is_dense(const TensorView& view) {
  if (view.element_count() == 0) return true;
  int64_t covered = 1;  // elements that the dimensions found so far fill
  for (int found = 0; found < view.rank; ++found) {
    bool is_next_found = false;
    for (int i = 0; i < view.rank; ++i) {
      if (view.sizes[i] <= 1 || view.strides[i] != covered) continue;
      covered *= view.sizes[i];
      is_next_found = true;
      break;
    }
    if (!is_next_found) break;
  }
  return covered == view.element_count();
}

// Whether the same place in memory is the same element in both (dense views of one shape).
inline bool has_layout_of(const TensorView& view, const TensorView& other) {
  if (!std::ranges::equal(view.shape(), other.shape())) return false;
  for (int i = 0; i < view.rank; ++i) {
    if (view.sizes[i] > 1 && view.strides[i] != other.strides[i]) return false;
  }
  return true;
}

// One entry of a list next to `expected` parameters, absent where the whole list is empty.
inline TensorView entry_of(std::string_view op, std::string_view name, const std::vector<TensorView>& views,
                           size_t index, size_t expected) {
  KP_CHECK(views.empty() || views.size() == expected, op, ": ", name, " has ", views.size(), " tensors, parameters ",
           expected, "; give one for each");
  return views.empty() ? TensorView() : views[index];
}

// Elements [begin, begin + count) of one tensor of a list.
struct Chunk {
  int64_t tensor = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

// The chunks of a list, each at most `chunk_elements` long. `sizes` are element counts.
class ChunkMap {
 public:
  ChunkMap(std::span<const int64_t> sizes, int64_t chunk_elements)
      : sizes_(sizes.begin(), sizes.end()), chunk_elements_(chunk_elements) {
    ends_.reserve(sizes_.size());
    int64_t end = 0;
    for (int64_t size : sizes_) ends_.push_back(end += (size + chunk_elements - 1) / chunk_elements);
  }
  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t end_of(int64_t tensor) const { return ends_[tensor]; }  // the number of its last chunk, plus one
  Chunk operator[](int64_t index) const {
    const int64_t tensor = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
    const int64_t begin = (index - (tensor == 0 ? 0 : ends_[tensor - 1])) * chunk_elements_;
    return {tensor, begin, std::min(chunk_elements_, sizes_[tensor] - begin)};
  }

 private:
  std::vector<int64_t> sizes_;
  std::vector<int64_t> ends_;
  int64_t chunk_elements_;
};

// Sizes of a list for tests and benchmarks: as in a model, some tensors are vectors and most of the rest is in a few
// large ones; odd tails; the sum is close to tensors * average.
inline std::vector<int64_t> uneven_sizes(int64_t tensors, int64_t average) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < tensors; ++i) {
    const bool is_small = tensors > 1 && i % 4 == 1;
    const int64_t large = average * (4 + i * 7 % 13) / 10;  // 0.4 to 1.6 of the average
    sizes.push_back(is_small ? average / 300 + i % 3 : tensors > 1 ? large + large / 3 + i % 5 : average);
  }
  return sizes;
}

}  // namespace kernel_pytorch
