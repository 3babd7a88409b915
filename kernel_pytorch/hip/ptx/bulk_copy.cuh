// The copy engine.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

KP_NO_AMD_FORM("a copy engine")
void cp_async_bulk_shared_global(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier);
KP_NO_AMD_FORM("a copy engine")
void cp_async_bulk_shared_global_l2_cache_hint(uint32_t destination, const void* source, uint32_t bytes,
                                               uint32_t barrier, uint64_t policy);
KP_NO_AMD_FORM("a copy engine") void cp_async_bulk_global_shared(void* destination, uint32_t source, uint32_t bytes);
KP_NO_AMD_FORM("a copy engine") void cp_async_bulk_commit_group();
template <int kPending>
KP_NO_AMD_FORM("a copy engine")
void cp_async_bulk_wait_group_read();
template <int kPending>
KP_NO_AMD_FORM("a copy engine")
void cp_async_bulk_wait_group();

}  // namespace kernel_pytorch::ptx
