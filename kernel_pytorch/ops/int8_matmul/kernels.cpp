// The kernels of the product of 8-bit integers, best first, the reference last, and what the registry asks.
#include "kernel_pytorch/ops/int8_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::int8_matmul {
namespace {

int64_t flops(const Product& problem) {
  return 2 * problem.x.sizes[0] * problem.weight.sizes[0] * problem.x.sizes[1];
}

// A request's shape is [m, n, k], its type the output's. Options besides those of the list: x=TYPE, bias=0|1.
Product make_product(const registry::ProblemRequest& request) {
  Product problem;
  std::vector<std::string_view> known = registry::option_names(kFields);
  known.insert(known.end(), {"x", "bias"});
  registry::check_options(request, known);
  registry::make_options(kFields, request, &problem);
  KP_CHECK(request.shape.size() == 3, "int8_matmul: the shape is ", shape_text(request.shape),
           "; it must be [m, n, k]");
  KP_CHECK(problem.group >= 0, "int8_matmul: group is ", problem.group, "; it must be 32, 64 or 128, or 0");
  const int64_t m = request.shape[0], n = request.shape[1], k = request.shape[2];
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  problem.x = tensor(registry::dtype_option(request, "x", request.dtype), {m, k});
  problem.weight = tensor(DType::kInt8, {n, k});
  problem.scale_weight = tensor(DType::kFloat32, {n, problem.group == 0 ? 1 : (k + problem.group - 1) / problem.group});
  if (has_codes(problem)) problem.scale_x = tensor(DType::kFloat32, {m});
  if (registry::flag_option(request, "bias", false)) problem.bias = tensor(request.dtype, {n});
  problem.output = tensor(request.dtype, {m, n});
  return problem;
}

// Shapes that the product is tested and measured on: [m, n, k].
constexpr const char* kShapes = R"(
    bf16 fp16 fp32: 1x70x512 x=int8 bias=1 activation=silu; 5x33x200 group=0,64; 67x130x320 group=0,128 bias=1
    bf16: 16x48x1024 x=int8 group=32,64,128; 3x5x37 x=int8,fp32 group=0,32; 130x72x96 x=int8; 1x9x1
    fp32: 0x8x32; 4x8x0 bias=1; 4x0x32; 2x24x70000
)";

}  // namespace

constinit const registry::Operation<Product> kProduct =
    registry::declared<Product, kFields, flops>({.name = "int8_matmul",
                                                 .kernels = registry::kernel_list<kCudaMma, kCpuDots, kCpu, kReference>,
                                                 .make = make_product,
                                                 .check = check,
                                                 .shapes = kShapes});

constexpr auto kDeclarations =
    registry::differentiable<Product, multiply>("int8_matmul", "int8_matmul_forward", kFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::int8_matmul
