// The kernels of the scaled product, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

void describe(const Product& problem, tuning::KeyBuilder& key) {
  key.field("scaling_a", static_cast<int64_t>(scaling_of_a(problem)));
  key.field("scaling_b", static_cast<int64_t>(scaling_of_b(problem)));
}

// Hopper's tensor cores keep about 14 bits of a sum of FP8 products: what is made of such sums is as far from exact.
registry::Precision precision(const Product& problem, std::string_view, DType own) {
  const bool has_short_sums = problem.a.device.kind == DeviceKind::kCuda && own == DType::kFloat32;
  return {own, has_short_sums ? 0x1p-11 : 0};
}

TensorView make_scale(const registry::ProblemRequest& request, std::string_view name, int64_t rows, int64_t k) {
  const int scaling = registry::choice_option(request, name, {"tensor", "row", "1x128", "128x128"}, "tensor");
  const int64_t blocks = (k + kBlock - 1) / kBlock, groups = (rows + kBlock - 1) / kBlock;
  const int64_t sizes[][2] = {{1, 1}, {rows, 1}, {rows, blocks}, {groups, blocks}};
  return contiguous_view(nullptr, DType::kFloat32, sizes[scaling], request.device);
}

// Options besides those of the list: a, b=TYPE, scale_a, scale_b=tensor|row|1x128|128x128, padded=1: rows of a, b and
// output lie 16 bytes further apart than they are long. An FP8 output has a scale.
void arrange(const registry::ProblemRequest& request, Product& problem) {
  problem.a.dtype = registry::dtype_option(request, "a", DType::kFloat8E4M3);
  problem.b.dtype = registry::dtype_option(request, "b", DType::kFloat8E4M3);
  problem.scale_a = make_scale(request, "scale_a", problem.a.sizes[0], problem.a.sizes[1]);
  problem.scale_b = make_scale(request, "scale_b", problem.b.sizes[0], problem.b.sizes[1]);
  if (size_of(request.dtype) == 1) {
    problem.output_scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
  const int64_t padding = registry::flag_option(request, "padded", false) ? 16 : 0;  // bytes
  for (TensorView* view : {&problem.a, &problem.b, &problem.output}) view->strides[0] += padding / size_of(view->dtype);
}

// Not below the rows of a block.
Product shrink(const Product& problem, int64_t elements) {
  Product small = problem;
  const int64_t widest = std::max(problem.a.sizes[1], problem.output.sizes[1]);
  registry::shrink_fields(kFields, &small, std::max(elements, kBlock * widest));
  const Scaling scaling = scaling_of_a(problem);
  const int64_t rows = small.a.sizes[0];
  if (scaling != Scaling::kTensor) {
    small.scale_a.sizes[0] = scaling == Scaling::k128x128 ? (rows + kBlock - 1) / kBlock : rows;
  }
  return small;
}

int64_t flops(const Product& problem) {
  return 2 * problem.a.sizes[0] * problem.b.sizes[0] * problem.a.sizes[1];
}

// Shapes that the scaled product is tested and measured on: [m, n, k], the type being the output's.
constexpr const char* kShapes = R"(
    fp32: 1x1x1 scale_a+scale_b=tensor,row,1x128; 65x130x200 scale_a+scale_b=tensor,row,1x128 bias=fp32
    200x300x400 scale_a=1x128,128x128 scale_b=128x128 bias=fp32
    bf16: 128x256x512 scale_a+scale_b=tensor,row,1x128 a=e5m2
    300x144x1040 scale_a+scale_b=tensor,row,1x128 b=e5m2 bias=bf16; 0x16x32 scale_a+scale_b=tensor,row,1x128
    16x32x0 scale_a+scale_b=tensor,row,1x128 bias=bf16; 256x384x1024 scale_a=1x128,128x128 scale_b=128x128
    256x256x256 accurate=0; amax=1; 130x272x768 accurate=0 scale_a+scale_b=row bias=bf16
    fp16: 17x640x384 scale_a+scale_b=tensor,row,1x128 bias=fp16 padded=1; e4m3: 130x272x320 amax=1 bias=bf16
    e5m2: 96x128x256 scale_a+scale_b=row
)";

}  // namespace

constinit const registry::Operation<Product> kProduct = registry::declared<Product, kFields, flops>(
    {.name = "scaled_matmul",
     .kernels = registry::kernel_list<kSm90, kCublasLt, kCudaMma, kTile, kCpu, kReference>,
     .describe = describe,
     .precision = precision,
     .request = {.shape = "m n k", .type_of = "output", .options = "a b scale_a scale_b padded"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink,
     .shapes = kShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Product, multiply>("scaled_matmul", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::scaled_matmul
