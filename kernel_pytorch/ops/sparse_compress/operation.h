// Compressing and decompressing as the registry sees them, and the kernels that their lists name.
#pragma once

#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::sparse_compress {

void check(const Compress& problem, Device device);
void check(const Decompress& problem, Device device);

extern const registry::Operation<Compress> kCompress;
extern const registry::Operation<Decompress> kDecompress;
extern const registry::Kernel<Compress> kCompressCuda, kCompressCpu, kCompressReference;
extern const registry::Kernel<Decompress> kDecompressCuda, kDecompressCpu, kDecompressReference;

}  // namespace kernel_pytorch::sparse_compress
