// cp.async.bulk, emulated: runtime/copies.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void cp_async_bulk_shared_global(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  emulated_bulk_load(destination, source, bytes, barrier);
}
inline void cp_async_bulk_shared_global_l2_cache_hint(uint32_t destination, const void* source, uint32_t bytes,
                                                      uint32_t barrier, uint64_t) {
  emulated_bulk_load(destination, source, bytes, barrier);
}
inline void cp_async_bulk_global_shared(void* destination, uint32_t source, uint32_t bytes) {
  emulated_bulk_store(destination, source, bytes);
}
inline void cp_async_bulk_commit_group() {
  emulated_bulk_commit();
}
template <int kPending>
inline void cp_async_bulk_wait_group_read() {
  emulated_bulk_wait(kPending);
}
template <int kPending>
inline void cp_async_bulk_wait_group() {
  emulated_bulk_wait(kPending);
}

}  // namespace kernel_pytorch::ptx
