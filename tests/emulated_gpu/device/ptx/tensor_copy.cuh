// cp.async.bulk.tensor, emulated: runtime/tensor_copies.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void prefetch_tensormap(const void*) {}
inline void cp_async_bulk_tensor_3d_shared_global(uint32_t destination, const void* map, int x0, int x1, int x2,
                                                  uint32_t barrier) {
  const int coordinates[3] = {x0, x1, x2};
  emulated_tensor_load(destination, map, 3, coordinates, barrier, 0);
}
inline void cp_async_bulk_tensor_3d_shared_global_multicast(uint32_t destination, const void* map, int x0, int x1,
                                                            int x2, uint32_t barrier, uint16_t blocks) {
  const int coordinates[3] = {x0, x1, x2};
  emulated_tensor_load(destination, map, 3, coordinates, barrier, blocks);
}
inline void cp_async_bulk_tensor_4d_shared_global(uint32_t destination, const void* map, int x0, int x1, int x2, int x3,
                                                  uint32_t barrier) {
  const int coordinates[4] = {x0, x1, x2, x3};
  emulated_tensor_load(destination, map, 4, coordinates, barrier, 0);
}
inline void cp_async_bulk_tensor_3d_global_shared(const void* map, int x0, int x1, int x2, uint32_t source) {
  const int coordinates[3] = {x0, x1, x2};
  emulated_tensor_store(map, 3, coordinates, source);
}

}  // namespace kernel_pytorch::ptx
