// The kernels of the scaled product, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/scaled_matmul/shapes.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::scaled_matmul {
namespace {

std::span<const registry::Kernel<Product>> kernels() {
  static const registry::Kernel<Product> kKernels[] = {kSm90, kTile, kCublasLt, kCpu, kReference};
  return kKernels;
}

void describe(const Product& problem, tuning::KeyBuilder& key) {
  key.field("m", tuning::bucket(problem.a.sizes[0]));
  key.field("n", problem.b.sizes[0]);
  key.field("k", problem.a.sizes[1]);
  key.field("a", problem.a.dtype);
  key.field("b", problem.b.dtype);
  key.field("output", problem.output.dtype);
  key.field("scale_a", static_cast<int64_t>(scaling_of_a(problem)));
  key.field("scale_b", static_cast<int64_t>(scaling_of_b(problem)));
  key.field("bias", problem.bias);
  key.field("output_scale", problem.output_scale);
  key.field("amax", problem.amax);
  key.field("accurate", problem.accurate);
}

void visit(Product& problem, registry::TensorVisitor visitor, void* state) {
  const registry::PresentTensors visit_present{visitor, state};
  visit_present("a", registry::Role::kInput, problem.a);
  visit_present("b", registry::Role::kInput, problem.b);
  visit_present("scale_a", registry::Role::kInput, problem.scale_a);
  visit_present("scale_b", registry::Role::kInput, problem.scale_b);
  visit_present("bias", registry::Role::kInput, problem.bias);
  visit_present("output_scale", registry::Role::kInput, problem.output_scale);
  visit_present("output", registry::Role::kOutput, problem.output);
  visit_present("amax", registry::Role::kUpdated, problem.amax);
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

// padded=1: rows of a, b and output lie 16 bytes further apart than they are long.
TensorView make_matrix(const registry::ProblemRequest& request, DType dtype, int64_t rows, int64_t columns) {
  TensorView view = contiguous_view(nullptr, dtype, {rows, columns}, request.device);
  if (registry::flag_option(request, "padded", false)) view.strides[0] += 16 / size_of(dtype);
  return view;
}

Product make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"a", "b", "scale_a", "scale_b", "bias", "accurate", "amax", "padded"});
  KP_CHECK(request.shape.size() == 3, "scaled_matmul: the shape is ", shape_text(request.shape),
           "; it must be [m, n, k]");
  const int64_t m = request.shape[0], n = request.shape[1], k = request.shape[2];
  Product problem;
  problem.a = make_matrix(request, registry::dtype_option(request, "a", DType::kFloat8E4M3), m, k);
  problem.b = make_matrix(request, registry::dtype_option(request, "b", DType::kFloat8E4M3), n, k);
  problem.scale_a = make_scale(request, "scale_a", m, k);
  problem.scale_b = make_scale(request, "scale_b", n, k);
  problem.accurate = registry::flag_option(request, "accurate", true);
  problem.output = make_matrix(request, request.dtype, m, n);
  const bool has_bias = std::ranges::any_of(request.options, [](const auto& option) { return option.first == "bias"; });
  if (has_bias) {
    problem.bias =
        contiguous_view(nullptr, registry::dtype_option(request, "bias", DType::kFloat32), {n}, request.device);
  }
  if (size_of(request.dtype) == 1) {
    problem.output_scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
  if (registry::flag_option(request, "amax", false)) {
    problem.amax = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
  return problem;
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

registry::Cost cost(const Product& problem) {
  return {.bytes = registry::tensor_bytes(problem, visit),
          .flops = 2 * problem.a.sizes[0] * problem.b.sizes[0] * problem.a.sizes[1]};
}

}  // namespace

constinit const registry::Operation<Product> kProduct{.name = "scaled_matmul",
                                                      .kernels = kernels,
                                                      .describe = describe,
                                                      .visit_tensors = visit,
                                                      .filling = fill,
                                                      .precision = precision,
                                                      .make = make,
                                                      .shrink = shrink,
                                                      .cost = cost,
                                                      .shapes = shapes};

extern const registry::OpEntry kEntry;
constinit const registry::OpEntry kEntry{.operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::scaled_matmul
