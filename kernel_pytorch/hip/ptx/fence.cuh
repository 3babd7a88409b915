// Fences of the copy engine, which an AMD GPU has not.
#pragma once

namespace kernel_pytorch::ptx {

KP_NO_AMD_FORM("a copy engine") void fence_proxy_async_shared_cta();
KP_NO_AMD_FORM("mbarriers") void fence_mbarrier_init_release_cluster();

}  // namespace kernel_pytorch::ptx
