// The kernels of the product with a weight in few bits, best first, the reference last, and what the registry asks.
#include "kernel_pytorch/ops/quantized_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

int64_t flops(const Product& problem) {
  return 2 * problem.x.sizes[0] * problem.codes.sizes[0] * problem.x.sizes[1];
}

// Where a product is decoded into memory on a GPU, tensor_scale is rounded into the weight. On a CPU few rows meet
// integers' weights before these are rounded to x's type, which the reference does.
registry::Precision precision(const Product& problem, std::string_view, DType own) {
  const bool is_on_gpu = problem.x.device.kind == DeviceKind::kCuda;
  if (is_on_gpu) return {own, problem.tensor_scale.is_present() ? 0x1p-7 : 0};
  const bool rounds_sums = group_format::is_integer(problem.format) && problem.x.sizes[0] <= kIntegerRows;
  return {own, !rounds_sums ? 0 : own == DType::kBFloat16 ? 0x1p-8 : own == DType::kFloat16 ? 0x1p-11 : 0};
}

// A request's shape is [m, n, k]. Options besides those of the list: zeros, tensor_scale, bias=0|1.
Product make_product(const registry::ProblemRequest& request) {
  Product problem;
  std::vector<std::string_view> known = registry::option_names(kFields);
  known.insert(known.end(), {"zeros", "tensor_scale", "bias"});
  registry::check_options(request, known);
  registry::make_options(kFields, request, &problem);
  KP_CHECK(request.shape.size() == 3, "quantized_matmul: the shape is ", shape_text(request.shape),
           "; it must be [m, n, k]");
  KP_CHECK(problem.group > 0, "quantized_matmul: group is ", problem.group, "; it must be a group of the format");
  const int64_t m = request.shape[0], n = request.shape[1], k = request.shape[2];
  const auto matrix = [&](DType dtype, int64_t rows, int64_t columns) {
    return contiguous_view(nullptr, dtype, {rows, columns}, request.device);
  };
  const int64_t groups = (k + problem.group - 1) / problem.group;
  problem.x = matrix(request.dtype, m, k);
  problem.codes = matrix(DType::kInt8, n, group_format::code_bytes(problem.format, k));
  problem.scales = matrix(group_quantize::scale_type_of(problem.format, request.dtype), n, groups);
  if (registry::flag_option(request, "zeros", false)) problem.zeros = matrix(DType::kInt8, n, groups);
  if (registry::flag_option(request, "tensor_scale", false)) {
    problem.tensor_scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
  if (registry::flag_option(request, "bias", false)) {
    problem.bias = contiguous_view(nullptr, request.dtype, {n}, request.device);
  }
  problem.output = matrix(request.dtype, m, n);
  return problem;
}

// Shapes that the product is tested and measured on: [m, n, k].
constexpr const char* kShapes = R"(
    bf16 fp16: 1x96x256 format=nvfp4 group=16 tensor_scale=0,1 bias=1 activation=silu
    5x72x416 format=nvfp4 group=16; 16x48x1024 format=mxfp4 group=32; 9x130x576 format=mxfp4,mxfp8 group=32 bias=1
    3x64x512 format=int4,int8 group=32,64,128 zeros=0,1; 16x80x640 format=int4,int8 group=128 zeros=1
    40x200x384 format=nvfp4 group=16 tensor_scale=1 bias=1 activation=gelu
    129x72x512 format=mxfp4,mxfp8 group=32; 70x136x896 format=int4,int8 group=64 zeros=0,1
    4x24x20480 format=int4 group=128; 40x1040x384 format=nvfp4 group=16
    3x5x37 format=int4 group=32; 33x7x53 format=nvfp4 group=16; 300x24x128 format=int8 group=128
    1x70x512 format=int2,int3,int5,int6 group=128 bias=1 activation=silu; 13x33x352 format=int2,int3,int5,int6 group=32 zeros=1
    5x9x77 format=int2,int3,int5,int6 group=64; 40x24x256 format=int3 group=64 zeros=1
    fp32: 1x96x200 format=nvfp4 group=16 tensor_scale=1 bias=1 activation=silu; 4x33x130 format=mxfp4,mxfp8 group=32
    3x40x200 format=int2,int3,int5,int6 group=64 zeros=0,1
    17x40x256 format=int4,int8 group=64 zeros=0,1; 0x8x32 format=int4 group=32; 4x8x0 format=int4 group=32 bias=1
)";

}  // namespace

constinit const registry::Operation<Product> kProduct = registry::declared<Product, kFields, flops>(
    {.name = "quantized_matmul",
     .kernels = registry::kernel_list<kCudaStream, kCudaWgmma, kCudaThin, kCudaMma, kCudaBits, kCpuIntegers, kCpuDots,
                                      kCpuThin, kComposed, kReference>,
     .precision = precision,
     .make = make_product,
     .check = check,
     .shapes = kShapes});

constexpr auto kDeclarations =
    registry::differentiable<Product, multiply>("quantized_matmul", "quantized_matmul_forward", kFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::quantized_matmul
