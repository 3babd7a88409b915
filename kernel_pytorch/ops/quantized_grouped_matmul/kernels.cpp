// The kernels of grouped products with weights in few bits, best first, the reference last, and what the registry asks.
#include <algorithm>

#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

int64_t flops(const Product& problem) {
  return 2 * problem.output.sizes[0] * columns_of(problem) * problem.x.sizes[1];
}

void describe(const Product& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(problem.output.sizes[0]));
}

// Where a product is decoded into memory on a GPU, tensor_scale is rounded into the weight.
registry::Precision precision(const Product& problem, std::string_view, DType own) {
  const bool rounds_twice = problem.x.device.kind == DeviceKind::kCuda && problem.tensor_scale.is_present();
  return {own, rounds_twice ? 0x1p-7 : 0};
}

// Uneven groups: some empty, one large, the last tenth of the rows in none where there are many.
void set_trial_inputs(const Product& on_host) {
  const int64_t groups = groups_of(on_host), rows = on_host.output.sizes[0], used = rows > 20 ? rows - rows / 10 : rows;
  std::vector<int64_t> before = {0};
  for (int64_t group = 0; group < groups; ++group) {
    before.push_back(before.back() + (group % 3 == 1 ? 0 : group % 4 == 2 ? 9 : 1 + group % 5));
  }
  for (int64_t group = 0; group < groups; ++group) {
    on_host.offsets.as<int32_t>()[group] =
        static_cast<int32_t>(used * before[group + 1] / std::max<int64_t>(before.back(), 1));
  }
  for (int64_t i = 0; on_host.gather.is_present() && i < rows; ++i) {
    on_host.gather.as<int32_t>()[i] = static_cast<int32_t>(i * 7919 % std::max<int64_t>(on_host.x.sizes[0], 1));
  }
}

// A request's shape is [rows, n, k, groups]. Options besides those of the list: zeros, tensor_scale, bias, gather=0|1,
// source=ROWS of x where they are gathered.
Product make_product(const registry::ProblemRequest& request) {
  Product problem;
  std::vector<std::string_view> known = registry::option_names(kFields);
  known.insert(known.end(), {"zeros", "tensor_scale", "bias", "gather", "source"});
  registry::check_options(request, known);
  registry::make_options(kFields, request, &problem);
  KP_CHECK(request.shape.size() == 4, "quantized_grouped_matmul: the shape is ", shape_text(request.shape),
           "; it must be [rows, n, k, groups]");
  KP_CHECK(problem.group > 0, "quantized_grouped_matmul: group is ", problem.group,
           "; it must be a group of the format");
  const int64_t rows = request.shape[0], n = request.shape[1], k = request.shape[2], groups = request.shape[3];
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  const int64_t scales = (k + problem.group - 1) / problem.group;
  const bool gathers = registry::flag_option(request, "gather", false);
  const int64_t source = gathers ? registry::integer_option(request, "source", std::max<int64_t>(rows / 2, 1)) : rows;
  problem.rows = rows;
  problem.x = tensor(request.dtype, {source, k});
  problem.codes = tensor(DType::kInt8, {groups * n, group_format::code_bytes(problem.format, k)});
  problem.scales = tensor(group_quantize::scale_type_of(problem.format, request.dtype), {groups * n, scales});
  problem.offsets = tensor(DType::kInt32, {groups});
  if (registry::flag_option(request, "zeros", false)) problem.zeros = tensor(DType::kInt8, {groups * n, scales});
  if (registry::flag_option(request, "tensor_scale", false)) problem.tensor_scale = tensor(DType::kFloat32, {1});
  if (gathers) problem.gather = tensor(DType::kInt32, {rows});
  if (registry::flag_option(request, "bias", false)) problem.bias = tensor(request.dtype, {groups, n});
  problem.output = tensor(request.dtype, {rows, n});
  return problem;
}

// Fewer rows; groups and weights stay.
Product shrink(const Product& problem, int64_t elements) {
  Product small = problem;
  const int64_t rows = problem.output.sizes[0], columns = std::max<int64_t>(problem.x.sizes[1] * 8, 1);
  const int64_t kept = std::clamp<int64_t>(elements / columns, std::min<int64_t>(rows, 64), rows);
  (problem.gather.is_present() ? small.gather : small.x).sizes[0] = kept;
  small.output.sizes[0] = kept;
  return small;
}

// Shapes that are tested and measured: [rows, n, k, groups].
constexpr const char* kShapes = R"(
    bf16 fp16: 70x96x256x5 format=nvfp4 group=16 tensor_scale=1 bias=1 activation=silu; 67x37x96x3 format=mxfp4,mxfp8 group=32 gather=1
    40x72x160x4 format=int2,int3,int4,int5,int6,int8 group=32 zeros=1 gather=1 bias=1
    bf16: 150x136x200x2 format=int4 group=128; 33x24x77x3 format=int3 group=64; 33x24x77x3 format=nvfp4 group=16; 5x64x64x40 format=int4 group=64
    9x20x2880x2 format=mxfp4 group=32
    fp32: 40x33x100x3 format=nvfp4 group=16 tensor_scale=1; 30x20x70x3 format=int2,int3,int8 group=32 zeros=0,1 gather=1
    0x8x32x2 format=int4 group=32; 4x8x0x2 format=int4 group=32 bias=1
)";

}  // namespace

constinit const registry::Operation<Product> kProduct = registry::declared<Product, kFields, flops>(
    {.name = "quantized_grouped_matmul",
     .kernels = registry::kernel_list<kCudaMma, kCpu, kComposed, kReference>,
     .describe = describe,
     .precision = precision,
     .set_trial_inputs = set_trial_inputs,
     .make = make_product,
     .check = check,
     .shrink = shrink,
     .shapes = kShapes});

constexpr auto kDeclarations = registry::differentiable<Product, multiply>("quantized_grouped_matmul",
                                                                           "quantized_grouped_matmul_forward", kFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kProduct>};

}  // namespace kernel_pytorch::quantized_grouped_matmul
