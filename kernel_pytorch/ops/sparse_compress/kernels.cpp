// The kernels of 2:4 compression and back, best first, references last, and the shapes they are tested on.
#include "kernel_pytorch/ops/sparse_compress/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::sparse_compress {
namespace {

constexpr const char* kCompressShapes = R"(
    fp32 bf16 fp16: 3x64; 65x200; 1x4; 130x260; 64x1024; 0x64; 4x0
)";
constexpr const char* kDecompressShapes = R"(
    fp32 bf16 fp16: 3x32; 65x100; 1x2; 130x130; 64x512; 0x32; 4x0
)";

}  // namespace

constinit const registry::Operation<Compress> kCompress = registry::declared<Compress, kCompressFields>(
    {.name = "sparse_compress",
     .kernels = registry::kernel_list<kCompressCuda, kCompressCpu, kCompressReference>,
     .check = registry::check_only<Compress, check>,
     .flops_per_element = 3,
     .shapes = kCompressShapes});

constinit const registry::Operation<Decompress> kDecompress = registry::declared<Decompress, kDecompressFields>(
    {.name = "sparse_decompress",
     .kernels = registry::kernel_list<kDecompressCuda, kDecompressCpu, kDecompressReference>,
     .check = registry::check_only<Decompress, check>,
     .flops_per_element = 1,
     .shapes = kDecompressShapes});

constexpr auto kDeclarations =
    registry::join(registry::plain<Compress, compress>("sparse_compress", kCompressFields),
                   registry::plain<Decompress, decompress>("sparse_decompress", kDecompressFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kCompress, kDecompress>};

}  // namespace kernel_pytorch::sparse_compress
