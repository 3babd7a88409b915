#include "kernel_pytorch/device/cuda/tensor_map.h"

#include <algorithm>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"

namespace kernel_pytorch::cuda_device {
namespace {

constexpr int kMaxMapRank = 5;
constexpr int64_t kAlignmentBytes = 16;
constexpr unsigned kBoxColumns = 64;  // of 16 bits: the 128 bytes of the swizzle

}  // namespace

const char* tensor_map_obstacle(const TensorView& view) {
  const int64_t element_bytes = size_of(view.dtype);
  if (view.stride(-1) != 1 && view.size(-1) > 1) return "the last dimension is not dense";
  if (reinterpret_cast<uintptr_t>(view.data) % kAlignmentBytes != 0) return "the address is no multiple of 16 bytes";
  for (int i = 0; i + 1 < view.rank; ++i) {
    const int64_t stride = view.strides[i] * element_bytes;
    if (view.sizes[i] > 1 && (stride % kAlignmentBytes != 0 || stride < 0))
      return "a stride is no multiple of 16 bytes";
  }
  return nullptr;
}

void encode_tensor_map(const TensorView& view, int box_rows, uint64_t (&words)[16]) {
  const int rank = view.rank;
  KP_CHECK(rank >= 2 && rank <= kMaxMapRank && size_of(view.dtype) == 2, "cuda: a tensor map of ", view,
           ": the copy engine takes two to five dimensions of 16-bit elements here");
  uint64_t sizes[kMaxMapRank], strides[kMaxMapRank - 1];
  unsigned box[kMaxMapRank], steps[kMaxMapRank];
  for (int i = 0; i < rank; ++i) {
    const int dimension = rank - 1 - i;
    sizes[i] = static_cast<uint64_t>(view.sizes[dimension]);
    // A stride of a dimension of size 1 is never used, but has to be legal.
    if (i > 0) {
      const int64_t stride =
          view.sizes[dimension] > 1 ? view.strides[dimension] * size_of(view.dtype) : kAlignmentBytes;
      strides[i - 1] = static_cast<uint64_t>(stride);
    }
    box[i] = i == 0 ? kBoxColumns : i == 1 ? static_cast<unsigned>(box_rows) : 1;
    steps[i] = 1;
  }
  const CurrentDevice current(view.device.index);  // the driver encodes for a context
  const TensorMapType type = view.dtype == DType::kBFloat16 ? TensorMapType::kBFloat16 : TensorMapType::kFloat16;
  check(require_driver().tensor_map_encode(words, type, static_cast<unsigned>(rank), view.data, sizes, strides, box,
                                           steps, TensorMapInterleave::kNone, TensorMapSwizzle::k128Bytes,
                                           TensorMapPromotion::k256Bytes, TensorMapFill::kZeros),
        "cuda: a tensor map of ", view);
}

}  // namespace kernel_pytorch::cuda_device
