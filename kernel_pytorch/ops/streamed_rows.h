// What the CPU kernels over rows share: outputs stored past the caches or into them, as the two configs of a kernel,
// the size of a task, and where a row begins.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

// Past the caches: 1.7 to 2x where the output does not fit them (1024x4096 fp32, two AVX-512 cores).
inline constexpr int kStreamStores = 0, kCachedStores = 1;
inline std::vector<std::string> store_configs() {
  return {"stores=stream", "stores=cached"};
}
// Measured equal at 2 MB when the next op reads the output, ahead at 16 MB.
inline constexpr int64_t kStreamFromBytes = 4 << 20;
// Of the main input: long enough to hide the atomic, short enough to balance. Kernels that ask for their next row ahead
// have device/task_size.h.
inline constexpr int64_t kTaskBytes = 128 << 10;

// Whether every row of a contiguous output begins and ends with a cache line, as stores past the caches ask.
inline bool rows_are_aligned(const TensorView& contiguous) {
  constexpr uintptr_t kLine = 64;
  return reinterpret_cast<uintptr_t>(contiguous.data) % kLine == 0 &&
         columns_of(contiguous) * size_of(contiguous.dtype) % kLine == 0;
}

inline void* row_start(const TensorView& view, int64_t row) {  // null for an absent view
  return view.is_present() ? static_cast<char*>(view.data) + row_offset(view, row) * size_of(view.dtype) : nullptr;
}

}  // namespace kernel_pytorch
