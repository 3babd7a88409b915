// Barriers in memory, on which a half of a wave would wait for the other.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

KP_NO_AMD_FORM("mbarriers") void mbarrier_init(uint32_t barrier, uint32_t count);
KP_NO_AMD_FORM("mbarriers") void mbarrier_arrive(uint32_t barrier);
KP_NO_AMD_FORM("mbarriers") void mbarrier_arrive_shared_cluster(uint32_t barrier);
KP_NO_AMD_FORM("mbarriers") void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes);
KP_NO_AMD_FORM("mbarriers") bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity);
KP_NO_AMD_FORM("mbarriers") bool mbarrier_try_wait_parity_acquire_cluster(uint32_t barrier, uint32_t parity);

}  // namespace kernel_pytorch::ptx
