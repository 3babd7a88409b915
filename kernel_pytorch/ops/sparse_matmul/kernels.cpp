// The kernels of the product with a 2:4 weight, best first, the reference last, and what the registry asks.
#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"
#include "kernel_pytorch/ops/sparse_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::sparse_matmul {
namespace {

// Of the dense product, which is what rates are compared in.
int64_t flops(const Product& problem) {
  return 2 * problem.x.sizes[0] * problem.values.sizes[0] * problem.x.sizes[1];
}

// A request's shape is [m, n, k]. Options: activation, bias=0|1.
Product make_product(const registry::ProblemRequest& request) {
  Product problem;
  std::vector<std::string_view> known = registry::option_names(kFields);
  known.push_back("bias");
  registry::check_options(request, known);
  registry::make_options(kFields, request, &problem);
  KP_CHECK(request.shape.size() == 3, "sparse_matmul: the shape is ", shape_text(request.shape),
           "; it must be [m, n, k]");
  const int64_t m = request.shape[0], n = request.shape[1], k = request.shape[2];
  problem.x = contiguous_view(nullptr, request.dtype, {m, k}, request.device);
  problem.values = contiguous_view(nullptr, request.dtype, {n, k / 2}, request.device);
  const int64_t blocks = (k + sparse_compress::kBlockColumns - 1) / sparse_compress::kBlockColumns;
  problem.metadata = contiguous_view(nullptr, DType::kInt32, {blocks, n, 2}, request.device);
  if (registry::flag_option(request, "bias", false)) {
    problem.bias = contiguous_view(nullptr, request.dtype, {n}, request.device);
  }
  problem.output = contiguous_view(nullptr, request.dtype, {m, n}, request.device);
  return problem;
}

// Shapes that the product is tested and measured on: [m, n, k].
constexpr const char* kShapes = R"(
    bf16 fp16: 64x128x64; 256x128x128 bias=1 activation=silu; 300x264x192; 17x136x272; 513x136x320 activation=gelu
    1x96x256 bias=1; 129x264x544 bias=1 activation=relu; 8x8x16; 5x7x36; 2x9x4 bias=1; 1x41x1028
    fp32: 33x65x132 bias=1 activation=silu; 1x96x200; 70x24x64; 0x8x32; 4x8x0 bias=1
)";

}  // namespace

constinit const registry::Operation<Product> kProduct =
    registry::declared<Product, kFields, flops>({.name = "sparse_matmul",
                                                 .kernels = registry::kernel_list<kSm90, kCpu, kComposed, kReference>,
                                                 .make = make_product,
                                                 .check = check,
                                                 .shapes = kShapes});

constexpr auto kDeclarations =
    registry::differentiable<Product, multiply>("sparse_matmul", "sparse_matmul_forward", kFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::sparse_matmul
