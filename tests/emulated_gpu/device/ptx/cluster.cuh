// Clusters, emulated.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline uint32_t cluster_ctarank() {
  const EmulatedIndex& rank = emulated_cluster_rank;
  return rank.x + emulated_cluster_size.x * (rank.y + emulated_cluster_size.y * rank.z);
}
inline uint32_t cluster_nctarank() {
  return emulated_cluster_size.x * emulated_cluster_size.y * emulated_cluster_size.z;
}
inline uint32_t clusterid_x() {
  return emulated_block.x / emulated_cluster_size.x;
}
inline uint32_t nclusterid_x() {
  return emulated_grid.x / emulated_cluster_size.x;
}
inline void barrier_cluster_arrive() {
  emulated_cluster_arrive();
}
inline void barrier_cluster_wait() {
  emulated_cluster_wait();
}
inline uint32_t mapa_shared_cluster(uint32_t address, uint32_t rank) {
  return emulated_map_shared(address, rank);
}
inline void st_async_shared_cluster_b32(uint32_t address, uint32_t value, uint32_t barrier) {
  emulated_store_async(address, &value, 4, barrier);
}
inline void st_async_shared_cluster_b64(uint32_t address, uint64_t value, uint32_t barrier) {
  emulated_store_async(address, &value, 8, barrier);
}
inline void st_async_shared_cluster_v4_f32(uint32_t address, float x, float y, float z, float w, uint32_t barrier) {
  const float values[4] = {x, y, z, w};
  emulated_store_async(address, values, 16, barrier);
}

}  // namespace kernel_pytorch::ptx
