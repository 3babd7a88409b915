#include "kernel_pytorch/ops/matmul/cuda/row_sums.h"

#include <algorithm>
#include <string>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/matmul/cuda/row_sums_cuda.h"
#include "kernel_pytorch/ops/support/column_sums.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr const char* kRowSumSource = "kernel_pytorch/ops/matmul/cuda/row_sums.cuh";
constexpr int64_t kBlocksEach = 8;    // a multiprocessor, where rows lie side by side
constexpr int64_t kLeastSlice = 128;  // of k

DeviceCode row_sum_code(DType dtype, bool along) {
  return {.source = kRowSumSource,
          .entry = concat("kernel_pytorch::matmul::row_sums_", along ? "along" : "across", "<",
                          element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// The sums of one batch, [m].
TensorView totals_of(const Product& problem, int64_t batch) {
  TensorView totals = problem.row_sums;
  totals.data = static_cast<char*>(totals.data) + batch * totals.strides[0] * size_of(totals.dtype);
  totals.rank = 1;
  totals.sizes[0] = problem.row_sums.sizes[1];
  totals.strides[0] = 1;
  return totals;
}

}  // namespace

void sum_rows(const Product& problem, Context& context) {
  static const std::string kLabel = "matmul row sums";
  static KernelTable<4> kernels;
  const Sizes sizes = sizes_of(problem);
  const DType dtype = problem.a.dtype;
  const bool along = is_row_major(problem.a);
  CUkern_st* kernel =
      kernels.get((dtype == DType::kFloat16) * 2 + along, context, [&] { return row_sum_code(dtype, along); });
  const int64_t widths = divide_up(sizes.m, kRowSumWidth);
  const int64_t wanted = divide_up(kBlocksEach * std::max(context.info->cuda.multiprocessors, 1), widths);
  const int64_t slices = std::clamp<int64_t>(wanted, 1, divide_up(sizes.k, kLeastSlice));
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const TensorView totals = totals_of(problem, batch);
    RowSumArguments arguments = {
        .a = static_cast<const char*>(problem.a.data) + batch * problem.a.strides[0] * size_of(dtype),
        .stride = problem.a.strides[along ? 1 : 2],
        .partials = nullptr,
        .totals = totals.data,
        .m = static_cast<int32_t>(sizes.m),
        .k = static_cast<int32_t>(sizes.k),
        .slice = static_cast<int32_t>(divide_up(sizes.k, slices)),
        .float_totals = totals.dtype == DType::kFloat32};
    void* pointers[] = {&arguments};
    cuda_device::LaunchShape shape;
    shape.block_x = kRowSumThreads;
    if (along) {
      shape.grid_x = static_cast<unsigned>(divide_up(sizes.m, kRowSumThreads / 32));
      cuda_device::launch(context, kernel, shape, pointers, kLabel);
      continue;
    }
    const ColumnSums sums = allocate_column_sums(totals, {}, sizes.m, slices, context);
    arguments.partials = sums.partials[0];
    shape.grid_x = static_cast<unsigned>(widths);
    shape.grid_y = static_cast<unsigned>(slices);
    cuda_device::launch(context, kernel, shape, pointers, kLabel);
    add_column_sums(sums, context);
  }
}

std::vector<DeviceCode> row_sums_device_code() {
  std::vector<DeviceCode> codes = column_sums_device_code();
  for (const bool along : {false, true}) codes.push_back(row_sum_code(DType::kBFloat16, along));
  return codes;
}

namespace {

registry::Support supports(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.a.dtype, device)) return registry::Support::no(obstacle);
  const Sizes sizes = sizes_of(problem);
  if (sizes.n != 0 || !problem.row_sums.is_present()) return registry::Support::no("for sums of rows alone");
  if (size_of(problem.a.dtype) != 2) return registry::Support::no("takes bf16 and fp16");
  if (sizes.batch == 0 || sizes.m == 0 || sizes.k == 0) return registry::Support::no("there is nothing to sum");
  return has_aligned_lines(problem.a) ? registry::Support::yes()
                                      : registry::Support::no("rows of a do not begin at multiples of 16 bytes");
}

void run(const Product& problem, int, Context& context) {
  sum_rows(problem, context);
}

uint64_t source_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kRowSumSource));
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

}  // namespace

constinit const registry::Kernel<Product> kRowSums{.name = "cuda_row_sums",
                                                   .origin = registry::Origin::kOurs,
                                                   .supports = supports,
                                                   .run = run,
                                                   .source_hash = source_hash,
                                                   .device_code = row_sums_device_code};

}  // namespace kernel_pytorch::matmul
