#include "kernel_pytorch/ops/support/column_sums.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/support/column_sums_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/support/column_sums.cuh";

DeviceCode code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::add_partial_rows<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// A single partial row of fp32 is the total itself: no scratch memory, no second launch. Kernels store 16 bytes at
// once.
bool is_total(const TensorView& total, int64_t count) {
  return count == 1 && total.dtype == DType::kFloat32 && is_aligned(total, kVectorBytes);
}

// Narrow blocks where wide ones would leave most multiprocessors without work; eight columns are what a load brings.
int block_columns(int64_t columns, const DeviceInfo& device) {
  int width = 32;
  while (width > 8 && 2 * columns < static_cast<int64_t>(width) * device.cuda.multiprocessors) width /= 2;
  return width;
}

}  // namespace

ColumnSums allocate_column_sums(const TensorView& first, const TensorView& second, int64_t columns, int64_t count,
                                Context& context) {
  const size_t bytes = static_cast<size_t>(count * columns) * sizeof(float);
  ColumnSums sums{.partials = {}, .totals = {first, second}, .count = count, .columns = columns};
  for (int i = 0; i < 2; ++i) {
    const TensorView& total = sums.totals[i];
    if (!total.is_present()) continue;
    sums.partials[i] =
        is_total(total, count) ? total.as<float>() : static_cast<float*>(context.scratch->allocate(bytes));
  }
  return sums;
}

void add_column_sums(const ColumnSums& all_sums, Context& context) {
  static const std::string kLabel = "add_partial_rows";
  static KernelTable<std::size(kCudaTypes)> table;
  ColumnSums sums = all_sums;
  for (int i = 0; i < 2; ++i) {
    if (sums.partials[i] == sums.totals[i].data) sums.partials[i] = nullptr;
  }
  if (sums.partials[0] == nullptr && sums.partials[1] == nullptr) return;
  const DType dtype = sums.totals[sums.partials[0] != nullptr ? 0 : 1].dtype;
  KP_INTERNAL_CHECK(sums.partials[1] == nullptr || sums.totals[1].dtype == dtype, "column sums: one total is ", dtype,
                    ", the other ", sums.totals[1].dtype);
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return code_of(dtype); });
  ColumnSumArguments arguments{.partials = {sums.partials[0], sums.partials[1]},
                               .totals = {sums.totals[0].data, sums.totals[1].data},
                               .columns = sums.columns,
                               .count = static_cast<int32_t>(sums.count),
                               .block_columns = block_columns(sums.columns, *context.info)};
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>((sums.columns + arguments.block_columns - 1) / arguments.block_columns);
  shape.grid_y = sums.partials[1] == nullptr ? 1 : 2;
  shape.block_x = kSumThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void zero_column_sums(const TensorView& first, const TensorView& second, Context& context) {
  for (const TensorView* total : {&first, &second}) {
    if (!total->is_present() || total->byte_count() == 0) continue;
    cuda_device::fill_bytes(context.info->device.index, total->data, 0, total->byte_count(), context.stream);
  }
}

std::vector<DeviceCode> column_sums_device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) codes.push_back(code_of(dtype));
  return codes;
}

uint64_t column_sums_source_hash() {
  return jit::source_hash(kSource);
}

}  // namespace kernel_pytorch
