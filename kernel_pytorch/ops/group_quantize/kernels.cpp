// The kernels of quantising by groups and back, best first, references last, and the shapes they are tested on.
#include "kernel_pytorch/ops/group_quantize/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::group_quantize {
namespace {

// A request's shape and type are the output's; options besides those of the list: zeros, tensor_scale=0|1, scales=TYPE
// of integers.
Dequantize make_dequantize(const registry::ProblemRequest& request) {
  Dequantize problem;
  std::vector<std::string_view> known = registry::option_names(kDequantizeFields);
  known.insert(known.end(), {"zeros", "tensor_scale", "scales"});
  registry::check_options(request, known);
  registry::make_options(kDequantizeFields, request, &problem);
  KP_CHECK(request.shape.size() == 2, "group_dequantize: the shape is ", shape_text(request.shape),
           "; it must be [rows, columns]");
  KP_CHECK(problem.group > 0, "group_dequantize: group is ", problem.group, "; it must be a group of the format");
  const int64_t rows = request.shape[0], columns = request.shape[1];
  const auto matrix = [&](DType dtype, int64_t width) {
    return contiguous_view(nullptr, dtype, {rows, width}, request.device);
  };
  const int64_t groups = (columns + problem.group - 1) / problem.group;
  problem.columns = columns;
  problem.codes = matrix(DType::kInt8, group_format::code_bytes(problem.format, columns));
  problem.scales =
      matrix(scale_type_of(problem.format, registry::dtype_option(request, "scales", DType::kBFloat16)), groups);
  if (registry::flag_option(request, "zeros", false)) problem.zeros = matrix(DType::kInt8, groups);
  if (registry::flag_option(request, "tensor_scale", false)) {
    problem.tensor_scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
  problem.output = matrix(request.dtype, columns);
  return problem;
}

// Option besides those of the list: tensor_scale=0|1.
void arrange_quantize(const registry::ProblemRequest& request, Quantize& problem) {
  problem.scales.dtype = scale_type_of(problem.format, problem.x.dtype);
  const int64_t rows = problem.x.sizes[0];
  problem.bytes = group_format::code_bytes(problem.format, problem.x.sizes[1]);
  problem.codes = contiguous_view(nullptr, DType::kInt8, {rows, problem.bytes}, request.device);
  if (registry::flag_option(request, "tensor_scale", false)) {
    problem.tensor_scale = contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  }
}

constexpr const char* kQuantizeShapes = R"(
    fp32 bf16 fp16: 3x64 format=nvfp4 group=16 tensor_scale=0,1; 65x200 format=nvfp4 group=16 seed=0,1
    5x130 format=mxfp4,mxfp8 group=32 seed=0,1; 64x512 format=mxfp4,mxfp8 group=32
    9x256 format=int4,int8 group=32,64,128 zeros=0,1; 33x330 format=int4,int8 group=64 zeros=0,1 seed=0,1
    1x1 format=int4 group=128; 0x64 format=mxfp4 group=32; 4x0 format=mxfp4 group=32
    9x256 format=int2,int3,int5,int6 group=32,128 zeros=0,1; 33x333 format=int2,int3,int5,int6 group=64 zeros=0,1 seed=0,1
)";
constexpr const char* kDequantizeShapes = R"(
    fp32 bf16 fp16: 3x64 format=nvfp4 group=16 tensor_scale=0,1; 65x200 format=nvfp4 group=16
    5x130 format=mxfp4,mxfp8 group=32; 64x512 format=mxfp4,mxfp8 group=32
    9x256 format=int4,int8 group=32,64,128 zeros=0,1; 33x330 format=int4,int8 group=64 zeros=0,1 scales=fp32
    1x1 format=int4 group=128; 0x64 format=mxfp4 group=32; 4x0 format=mxfp4 group=32
    9x256 format=int2,int3,int5,int6 group=32,128 zeros=0,1; 33x333 format=int2,int3,int5,int6 group=64 zeros=0,1
    e4m3: 64x512 format=mxfp4,mxfp8 group=32; 5x130 format=mxfp4 group=32; 3x64 format=nvfp4 group=16 tensor_scale=1
)";

}  // namespace

constinit const registry::Operation<Quantize> kQuantize = registry::declared<Quantize, kQuantizeFields>(
    {.name = "group_quantize",
     .kernels = registry::kernel_list<kQuantizeCuda, kQuantizeCpu, kQuantizeReference>,
     .request = {.options = "tensor_scale"},
     .arrange = arrange_quantize,
     .check = registry::check_only<Quantize, check>,
     .flops_per_element = 8,
     .shapes = kQuantizeShapes});

constinit const registry::Operation<Dequantize> kDequantize = registry::declared<Dequantize, kDequantizeFields>(
    {.name = "group_dequantize",
     .kernels = registry::kernel_list<kDequantizeCuda, kDequantizeCpu, kDequantizeReference>,
     .make = make_dequantize,
     .check = registry::check_only<Dequantize, check>,
     .flops_per_element = 2,
     .shapes = kDequantizeShapes});

constexpr auto kDeclarations =
    registry::join(registry::plain<Quantize, quantize>("group_quantize", kQuantizeFields),
                   registry::plain<Dequantize, dequantize>("group_dequantize", kDequantizeFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kQuantize, kDequantize>};

}  // namespace kernel_pytorch::group_quantize
