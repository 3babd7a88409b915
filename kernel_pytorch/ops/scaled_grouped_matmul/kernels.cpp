// The kernels of the scaled grouped product, best first, the reference last, and what the registry asks about its
// problems.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/ops/scaled_grouped_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

void describe(const Product& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(rows_of(problem)));
  key.field("blocked", is_blocked(problem));
  key.field("rows_of_b_scale", rows_of_b_scale(problem));
}

// Hopper's tensor cores keep about 14 bits of a sum of FP8 products.
registry::Precision precision(const Product& problem, std::string_view, DType own) {
  const bool has_short_sums = problem.a.device.kind == DeviceKind::kCuda && own == DType::kFloat32;
  return {own, has_short_sums ? 0x1p-11 : 0};
}

// Uneven groups: some empty, one large, the last tenth of the rows in none where there are many.
void set_trial_inputs(const Product& on_host) {
  const int64_t groups = on_host.b.sizes[0], rows = rows_of(on_host), used = rows > 20 ? rows - rows / 10 : rows;
  std::vector<int64_t> before = {0};
  for (int64_t group = 0; group < groups; ++group) {
    before.push_back(before.back() + (group % 3 == 1 ? 0 : group % 4 == 2 ? 9 : 1 + group % 5));
  }
  for (int64_t group = 0; group < groups; ++group) {
    on_host.offsets.as<int32_t>()[group] =
        static_cast<int32_t>(used * before[group + 1] / std::max<int64_t>(before.back(), 1));
  }
  for (int64_t i = 0; on_host.gather.is_present() && i < rows; ++i) {
    on_host.gather.as<int32_t>()[i] = static_cast<int32_t>(i * 7919 % std::max<int64_t>(on_host.a.sizes[0], 1));
  }
}

// Options besides those of the list: a, b=TYPE, scale_a=tensor|row|1x128, scale_b=tensor|matrix|row|1x128|128x128,
// source=ROWS of a where they are gathered.
void arrange(const registry::ProblemRequest& request, Product& problem) {
  problem.a.dtype = registry::dtype_option(request, "a", DType::kFloat8E4M3);
  problem.b.dtype = registry::dtype_option(request, "b", DType::kFloat8E4M3);
  if (problem.gather.is_present()) {
    problem.a.sizes[0] = registry::integer_option(request, "source", std::max<int64_t>(problem.gather.sizes[0] / 2, 1));
  }
  const int64_t rows = problem.a.sizes[0], k = problem.a.sizes[1], groups = problem.b.sizes[0], n = problem.b.sizes[1];
  const int64_t of_a[][2] = {{1, 1}, {rows, 1}, {rows, blocks_of(k)}};
  const int64_t of_b[][3] = {
      {1, 1, 1}, {groups, 1, 1}, {groups, n, 1}, {groups, n, blocks_of(k)}, {groups, blocks_of(n), blocks_of(k)}};
  const int scaling_a = registry::choice_option(request, "scale_a", {"tensor", "row", "1x128"}, "tensor");
  const int scaling_b =
      registry::choice_option(request, "scale_b", {"tensor", "matrix", "row", "1x128", "128x128"}, "tensor");
  problem.scale_a = contiguous_view(nullptr, DType::kFloat32, of_a[scaling_a], request.device);
  problem.scale_b = contiguous_view(nullptr, DType::kFloat32, of_b[scaling_b], request.device);
  if (scaling_b == 0) problem.scale_b.rank = 1;
}

// Fewer rows; groups and matrices stay.
Product shrink(const Product& problem, int64_t elements) {
  Product small = problem;
  const int64_t rows = std::clamp<int64_t>(elements / std::max<int64_t>(problem.a.sizes[1] * 8, 1),
                                           std::min<int64_t>(rows_of(problem), 64), rows_of(problem));
  small.output.sizes[0] = rows;
  if (problem.gather.is_present()) {
    small.gather.sizes[0] = rows;
  } else {
    small.a.sizes[0] = rows;
    if (small.scale_a.sizes[0] > 1) small.scale_a.sizes[0] = rows;
  }
  return small;
}

int64_t flops(const Product& problem) {
  return 2 * rows_of(problem) * problem.b.sizes[1] * problem.b.sizes[2];
}

// Shapes [rows, n, k, groups], the type being the output's.
constexpr const char* kShapes = R"(
  fp32: 65x130x200x3 scale_a=tensor,row scale_b=tensor,matrix,row bias=fp32; 140x136x272x5 scale_a=1x128 scale_b=1x128,128x128 gather=1
  bf16: 150x144x528x5 scale_a+scale_b=row,1x128 gather=-,1 bias=bf16 b=e5m2; 200x256x256x9 scale_a=1x128 scale_b=128x128 gather=-,1
    256x256x256x4 accurate=0 scale_b=matrix; 5x64x64x40 a=e5m2 scale_a=row scale_b=128x128
  fp16: 1x8x16x1 0x16x32x2; 70x640x384x3 scale_a+scale_b=row bias=fp32
)";

}  // namespace

constinit const registry::Operation<Product> kProduct =
    registry::declared<Product, kFields, flops>({.name = "scaled_grouped_matmul",
                                                 .kernels = registry::kernel_list<kSm90, kCpu, kReference>,
                                                 .describe = describe,
                                                 .precision = precision,
                                                 .set_trial_inputs = set_trial_inputs,
                                                 .request = {.shape = "rows n k groups",
                                                             .type_of = "output",
                                                             .sizes = "source=rows",
                                                             .options = "a b scale_a scale_b"},
                                                 .arrange = arrange,
                                                 .check = check,
                                                 .shrink = shrink,
                                                 .shapes = kShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Product, multiply>("scaled_grouped_matmul", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::scaled_grouped_matmul
