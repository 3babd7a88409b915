#include "kernel_pytorch/device/cuda/tensor_map.h"

#include <algorithm>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/driver_table.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch::cuda_device {
namespace {

constexpr int kMaxMapRank = 5;
constexpr int64_t kAlignmentBytes = 16;

TensorMapType map_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return TensorMapType::kBFloat16;
    case DType::kFloat16:
      return TensorMapType::kFloat16;
    case DType::kFloat32:
      return TensorMapType::kFloat32;
    default:
      return TensorMapType::kBytes;  // copied as they are
  }
}

}  // namespace

const char* tensor_map_obstacle(const TensorView& view) {
  const int64_t element_bytes = size_of(view.dtype);
  if (view.stride(-1) != 1 && view.size(-1) > 1) return "the last dimension is not dense";
  if (!is_aligned(view, kAlignmentBytes)) return "the address is no multiple of 16 bytes";
  for (int i = 0; i + 1 < view.rank; ++i) {
    const int64_t stride = view.strides[i] * element_bytes;
    if (view.sizes[i] > 1 && (stride % kAlignmentBytes != 0 || stride < 0))
      return "a stride is no multiple of 16 bytes";
  }
  return nullptr;
}

void encode_tensor_map(const TensorView& view, int box_rows, uint64_t (&words)[16], int box_groups, int box_bytes) {
  const int rank = view.rank;
  const bool is_known = map_type(view.dtype) != TensorMapType::kBytes || size_of(view.dtype) == 1;
  KP_CHECK(rank >= 2 && rank <= kMaxMapRank && is_known, "cuda: a tensor map of ", view,
           ": the copy engine takes two to five dimensions of fp32, bf16, fp16 or bytes here");
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
    box[i] = i == 0   ? static_cast<unsigned>(box_bytes / static_cast<int>(size_of(view.dtype)))
             : i == 1 ? static_cast<unsigned>(box_rows)
             : i == 2 ? static_cast<unsigned>(box_groups)
                      : 1;
    steps[i] = 1;
  }
  const TensorMapSwizzle swizzle = box_bytes == 64 ? TensorMapSwizzle::k64Bytes : TensorMapSwizzle::k128Bytes;
  if (Rehearsal::is_running()) return;
  const CurrentDevice current(view.device.index);  // the driver encodes for a context
  check(require_driver().tensor_map_encode(words, map_type(view.dtype), static_cast<unsigned>(rank), view.data, sizes,
                                           strides, box, steps, TensorMapInterleave::kNone, swizzle,
                                           TensorMapPromotion::k256Bytes, TensorMapFill::kZeros),
        "cuda: a tensor map of ", view);
}

}  // namespace kernel_pytorch::cuda_device
