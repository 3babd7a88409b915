// Fences between proxies: one thread runs at a time, so there is nothing to order.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void fence_proxy_async_shared_cta() {}
inline void fence_mbarrier_init_release_cluster() {}

}  // namespace kernel_pytorch::ptx
