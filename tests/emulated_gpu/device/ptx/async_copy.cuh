// cp.async, emulated: runtime/copies.cpp.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void cp_async_cg_shared_global_16(uint32_t destination, const void* source) {
  emulated_cp_async(destination, source, 16, 16);
}
inline void cp_async_cg_shared_global_16_fill(uint32_t destination, const void* source, uint32_t bytes) {
  emulated_cp_async(destination, source, 16, bytes);
}
inline void cp_async_cg_shared_global_16_fill_l2_256(uint32_t destination, const void* source, uint32_t bytes) {
  emulated_cp_async(destination, source, 16, bytes);
}
inline void cp_async_ca_shared_global_8_fill(uint32_t destination, const void* source, uint32_t bytes) {
  emulated_cp_async(destination, source, 8, bytes);
}
inline void cp_async_ca_shared_global_4(uint32_t destination, const void* source) {
  emulated_cp_async(destination, source, 4, 4);
}
inline void cp_async_ca_shared_global_4_fill(uint32_t destination, const void* source, uint32_t bytes) {
  emulated_cp_async(destination, source, 4, bytes);
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  emulated_cp_async_mbarrier_arrive(barrier);
}
inline void cp_async_commit_group() {
  emulated_cp_async_commit();
}
template <int kPending>
inline void cp_async_wait_group() {
  emulated_cp_async_wait(kPending);
}

}  // namespace kernel_pytorch::ptx
