// Clusters of thread blocks and their shared memory.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

KP_NO_AMD_FORM("clusters") uint32_t cluster_ctarank();
KP_NO_AMD_FORM("clusters") uint32_t cluster_nctarank();
KP_NO_AMD_FORM("clusters") uint32_t clusterid_x();
KP_NO_AMD_FORM("clusters") uint32_t nclusterid_x();
KP_NO_AMD_FORM("clusters") void barrier_cluster_arrive();
KP_NO_AMD_FORM("clusters") void barrier_cluster_wait();
KP_NO_AMD_FORM("clusters") uint32_t mapa_shared_cluster(uint32_t address, uint32_t rank);
KP_NO_AMD_FORM("clusters") void st_async_shared_cluster_b32(uint32_t address, uint32_t value, uint32_t barrier);
KP_NO_AMD_FORM("clusters") void st_async_shared_cluster_b64(uint32_t address, uint64_t value, uint32_t barrier);
KP_NO_AMD_FORM("clusters")
void st_async_shared_cluster_v4_f32(uint32_t address, float x, float y, float z, float w, uint32_t barrier);

}  // namespace kernel_pytorch::ptx
