// Attention over latent rows (MLA) as the registry sees it, and the kernels that its list names.
#pragma once

#include "kernel_pytorch/ops/paged_attention/operation.h"

namespace kernel_pytorch::paged_attention {

void check(Latent& problem, Device device);

extern const registry::Operation<Latent> kLatent;
extern const registry::Kernel<Latent> kLatentSm90, kLatentCuda, kLatentCudaRows, kLatentCpu, kLatentReference;

// Attention over latent rows as attention over pages with one key head: keys are latent_cache, values rope_cache. With
// indices every token is a request and every slot a page, for which pages have to follow one another in both caches.
Attend attend_of(const Latent& problem);
bool has_even_pages(const Latent& problem);
inline constexpr int64_t kLatentScaleColumns = 128;

}  // namespace kernel_pytorch::paged_attention
