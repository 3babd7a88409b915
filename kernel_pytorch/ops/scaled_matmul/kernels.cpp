// The kernels of the scaled product, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

void describe(const Product& problem, tuning::KeyBuilder& key) {
  registry::describe_fields(kFields, &problem, key);
  key.field("scaling_a", static_cast<int64_t>(scaling_of_a(problem)));
  key.field("scaling_b", static_cast<int64_t>(scaling_of_b(problem)));
}

registry::Filling fill(const Product&, std::string_view tensor) {
  const bool is_positive = tensor == "scale_a" || tensor == "scale_b" || tensor == "output_scale" || tensor == "amax";
  return {.content = is_positive ? registry::Content::kPositive : registry::Content::kNormal};
}

// Hopper's tensor cores keep about 14 bits of a sum of FP8 products: what is made of such sums is as far from exact.
registry::Precision precision(const Product& problem, std::string_view, DType own) {
  const bool has_short_sums = problem.a.device.kind == DeviceKind::kCuda && own == DType::kFloat32;
  return {own, has_short_sums ? 0x1p-11 : 0};
}

TensorView make_scale(const registry::ProblemRequest& request, std::string_view name, int64_t rows, int64_t k) {
  const auto scaling =
      static_cast<Scaling>(registry::choice_option(request, name, {"tensor", "row", "1x128", "128x128"}, "tensor"));
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  const int64_t groups = (rows + kBlock - 1) / kBlock;
  const std::array<int64_t, 2> sizes = scaling == Scaling::kTensor  ? std::array<int64_t, 2>{1, 1}
                                       : scaling == Scaling::kRow   ? std::array<int64_t, 2>{rows, 1}
                                       : scaling == Scaling::k1x128 ? std::array<int64_t, 2>{rows, blocks}
                                                                    : std::array<int64_t, 2>{groups, blocks};
  return contiguous_view(nullptr, DType::kFloat32, sizes, request.device);
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
  if (!registry::flag_option(request, "padded", false)) return;
  for (TensorView* view : {&problem.a, &problem.b, &problem.output}) view->strides[0] += 16 / size_of(view->dtype);
}

// Fewer rows of a and of output.
Product shrink(const Product& problem, int64_t elements) {
  Product small = problem;
  const int64_t m = problem.a.sizes[0];
  const int64_t row_elements = std::max<int64_t>(std::max(problem.a.sizes[1], problem.output.sizes[1]), 1);
  const int64_t rows = std::min(m, std::max<int64_t>(elements / row_elements / kBlock * kBlock, kBlock));
  const Scaling scaling = scaling_of_a(problem);
  small.a.sizes[0] = small.output.sizes[0] = rows;
  if (scaling == Scaling::kRow || scaling == Scaling::k1x128) small.scale_a.sizes[0] = rows;
  if (scaling == Scaling::k128x128) small.scale_a.sizes[0] = (rows + kBlock - 1) / kBlock;
  return small;
}

int64_t flops(const Product& problem) {
  return 2 * problem.a.sizes[0] * problem.b.sizes[0] * problem.a.sizes[1];
}

// Shapes that the scaled product is tested and measured on: [m, n, k], the type being the output's.
std::vector<registry::ProblemRequest> shapes() {
  registry::RequestList add;
  constexpr DType kFp32 = DType::kFloat32, kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  for (const char* scale : {"tensor", "row", "1x128"}) {
    add({1, 1, 1}, kFp32, {{"scale_a", scale}, {"scale_b", scale}});
    add({65, 130, 200}, kFp32, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "fp32"}});
    add({128, 256, 512}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"a", "e5m2"}});
    add({300, 144, 1040}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"b", "e5m2"}, {"bias", "bf16"}});
    add({17, 640, 384}, kFp16, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "fp16"}, {"padded", "1"}});
    add({0, 16, 32}, kBf16, {{"scale_a", scale}, {"scale_b", scale}});
    add({16, 32, 0}, kBf16, {{"scale_a", scale}, {"scale_b", scale}, {"bias", "bf16"}});
  }
  for (const char* scale : {"1x128", "128x128"}) {
    add({200, 300, 400}, kFp32, {{"scale_a", scale}, {"scale_b", "128x128"}, {"bias", "fp32"}});
    add({256, 384, 1024}, kBf16, {{"scale_a", scale}, {"scale_b", "128x128"}});
  }
  add({256, 256, 256}, kBf16, {{"accurate", "0"}});
  add({256, 256, 256}, kBf16, {{"amax", "1"}});
  add({130, 272, 768}, kBf16, {{"accurate", "0"}, {"scale_a", "row"}, {"scale_b", "row"}, {"bias", "bf16"}});
  add({130, 272, 320}, DType::kFloat8E4M3, {{"amax", "1"}, {"bias", "bf16"}});
  add({96, 128, 256}, DType::kFloat8E5M2, {{"scale_a", "row"}, {"scale_b", "row"}});
  return std::move(add.all);
}

}  // namespace

constinit const registry::Operation<Product> kProduct = registry::declared<Product, kFields, flops>(
    {.name = "scaled_matmul",
     .kernels = registry::kernel_list<kSm90, kTile, kCublasLt, kCpu, kReference>,
     .describe = describe,
     .filling = fill,
     .precision = precision,
     .request = {.shape = "m n k", .type_of = "output", .options = "a b scale_a scale_b padded"},
     .arrange = arrange,
     .check = check,
     .shrink = shrink,
     .shapes = shapes});

constexpr auto kDeclarations = registry::join(registry::plain<Product, multiply>("scaled_matmul", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::scaled_matmul
