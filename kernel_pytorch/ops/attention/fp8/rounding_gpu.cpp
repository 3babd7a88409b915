// Rounds operands on the GPU: one launch for all three.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/attention/fp8/rounding.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::attention::fp8 {
namespace {

constexpr int kRoundThreads = 256;
constexpr int kLanes[] = {8, 16};  // that have a row: columns up to 128, up to 256

DeviceCode code_of(DType dtype, int lanes) {
  return {
      .source = "kernel_pytorch/ops/attention/fp8/round.cuh",
      .entry = concat("kernel_pytorch::attention::fp8::round_operands<", element_type_name(dtype), ", ", lanes, ">"),
      .minimum_capability = 89,
      .architecture_specific = false};
}

RoundedTensor tensor_of(const Rounding& rounding, int64_t first_block) {
  const TensorView& source = rounding.source;
  const auto columns = static_cast<int>(source.sizes[3]);
  return {.source = source.data,
          .batch = source.strides[0],
          .head = source.strides[1],
          .row = source.strides[2],
          .heads = static_cast<int32_t>(source.sizes[1]),
          .rows = static_cast<int32_t>(source.sizes[2]),
          .columns = columns,
          .blocks = static_cast<int32_t>(divide_up(source.sizes[2], kBlockRows)),
          .first_block = static_cast<int32_t>(first_block),
          .rotated = rounding.rotates ? rotated_columns(columns) : 0,
          .target_columns = static_cast<int32_t>(rounding.target_columns),
          .kind = rounding.kind,
          .has_vectors = columns * size_of(source.dtype) % 16 == 0 && has_aligned_rows(source),
          .target = rounding.target.data,
          .scales = rounding.scales,
          .norms = rounding.norms};
}

}  // namespace

void launch_rounding(const Rounding (&tensors)[3], Context& context) {
  static const std::string kLabel = "attention_fp8 rounding";
  static KernelTable<std::size(kCudaTypes) * std::size(kLanes)> table;
  RoundArguments arguments{};
  int64_t blocks = 0, columns = 0;
  for (int i = 0; i < 3; ++i) {
    const TensorView& source = tensors[i].source;
    arguments.tensors[i] = tensor_of(tensors[i], blocks);
    blocks += source.sizes[0] * source.sizes[1] * divide_up(source.sizes[2], kBlockRows);
    columns = std::max({columns, source.sizes[3], tensors[i].target_columns});
  }
  KP_CHECK(blocks < int64_t{1} << 31, "attention_fp8: there are ", blocks,
           " blocks of 128 rows; at most 2^31 - 1 are supported, split the batch");
  if (blocks == 0) return;
  const DType dtype = tensors[0].source.dtype;
  const int wide = columns > 128 ? 1 : 0;
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype) * 2 + wide, context, [&] { return code_of(dtype, kLanes[wide]); });
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kRoundThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

RoundedOperands round_on_gpu(const Forward& problem, Context& context) {
  const int64_t size = size_of_rounded(problem);
  const auto values_of = [&](const TensorView& source, int64_t columns, bool rotates) {
    Rounding rounding{.source = source, .target_columns = columns, .rotates = rotates};
    rounding.target = contiguous_view(nullptr, source.dtype,
                                      {source.sizes[0], source.sizes[1], source.sizes[2], columns}, source.device);
    rounding.target.data = context.scratch->allocate(static_cast<size_t>(rounding.target.byte_count()));
    return rounding;
  };
  const Rounding tensors[3] = {values_of(problem.query, size, problem.rotate),
                               values_of(problem.key, size, problem.rotate),
                               values_of(problem.value, problem.value.sizes[3], false)};
  launch_rounding(tensors, context);
  return {.query = tensors[0].target, .key = tensors[1].target, .value = tensors[2].target};
}

std::vector<DeviceCode> rounding_code() {
  std::vector<DeviceCode> codes;
  for (const DType dtype : kCudaTypes) {
    for (const int lanes : kLanes) codes.push_back(code_of(dtype, lanes));
  }
  return codes;
}

}  // namespace kernel_pytorch::attention::fp8
