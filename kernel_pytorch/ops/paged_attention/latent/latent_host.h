// What the hosts of the kernels of latent rows by tensor cores share.
#pragma once

#include "kernel_pytorch/ops/paged_attention/cuda/attend_host.h"
#include "kernel_pytorch/ops/paged_attention/latent/operation.h"

namespace kernel_pytorch::paged_attention {

inline constexpr int32_t kLatentValueSize = 512, kLatentSize = 576;  // columns of values, and of keys

// Null, or why no kernel by tensor cores takes the problem.
const char* latent_obstacle(const Latent& problem, const DeviceInfo& device);

// Keys are latent rows, and values rope rows: the kernels know.
AttendArguments latent_arguments(const Latent& problem, const Attend& attend);

}  // namespace kernel_pytorch::paged_attention
