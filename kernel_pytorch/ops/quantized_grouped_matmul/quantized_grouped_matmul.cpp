#include "kernel_pytorch/ops/quantized_grouped_matmul/quantized_grouped_matmul.h"

#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"
#include "kernel_pytorch/ops/quantized_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/group_format/check.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::quantized_grouped_matmul {
namespace {

constexpr std::string_view kName = "quantized_grouped_matmul";

void check_indices(const GroupFormatCheck& check, std::string_view name, const TensorView& view) {
  check.check_device(name, view);
  KP_CHECK(view.dtype == DType::kInt32 && view.rank == 1 && is_contiguous(view), kName, ": ", name, " is ", view,
           "; it must be contiguous int32 with one dimension");
}

// Offsets and gathers that the host may read; a GPU's offsets only with KERNEL_PYTORCH_CHECK=1.
void check_values(const Product& problem, const Context& context) {
  const int64_t rows = problem.output.sizes[0];
  if (context.device().kind != DeviceKind::kCpu) {
    check_offset_values(
        {.op = kName, .name = "offsets", .offsets = problem.offsets, .tensor = "the rows", .tokens = rows}, context);
    return;
  }
  if (Rehearsal::is_running()) return;
  int32_t before = 0;
  for (int64_t group = 0; group < groups_of(problem); ++group) {
    const int32_t end = problem.offsets.as<const int32_t>()[group];
    KP_CHECK(end >= before && end <= rows, kName, ": offsets[", group, "] is ", end, " after ", before,
             ", and there are ", rows, " rows; offsets are where groups end, ascending");
    before = end;
  }
  for (int64_t row = 0; problem.gather.is_present() && row < before; ++row) {
    const int32_t line = problem.gather.as<const int32_t>()[row];
    KP_CHECK(line >= 0 && line < problem.x.sizes[0], kName, ": gather[", row, "] is ", line, ", x has ",
             problem.x.sizes[0], " rows; it must be one of them");
  }
}

}  // namespace

void check(Product& problem, Device device) {
  const GroupFormatCheck check{kName, device, problem.format, problem.group};
  check.check_float_matrix("x", problem.x);
  check.check_float_matrix("output", problem.output);
  check_indices(check, "offsets", problem.offsets);
  const int64_t groups = groups_of(problem), k = problem.x.sizes[1];
  KP_CHECK(groups <= grouped_matmul::kMostGroups, kName, ": there are ", groups, " groups; at most ",
           grouped_matmul::kMostGroups, " are supported");
  KP_CHECK(problem.codes.is_present() && problem.codes.rank == 2, kName, ": codes are ", problem.codes,
           "; they must be a matrix with groups * n rows");
  const int64_t lines = problem.codes.sizes[0];
  KP_CHECK(groups > 0 ? lines % groups == 0 : lines == 0, kName, ": codes have ", lines, " rows, and there are ",
           groups, " groups; each has as many rows");
  const int64_t n = groups > 0 ? lines / groups : columns_of(problem);
  if (problem.gather.is_present()) check_indices(check, "gather", problem.gather);
  const int64_t rows = problem.gather.is_present() ? problem.gather.sizes[0] : problem.x.sizes[0];
  KP_CHECK(rows < std::numeric_limits<int32_t>::max(), kName, ": there are ", rows,
           " rows; at most 2^31 - 2 are supported");
  KP_CHECK(problem.output.sizes[0] == rows && problem.output.sizes[1] == n && problem.output.dtype == problem.x.dtype,
           kName, ": output is ", problem.output, "; it must be ", problem.x.dtype, " [", rows, ", ", n, "]");
  check.check_matrix(problem.codes, problem.scales, problem.zeros, problem.tensor_scale, lines, k);
  KP_CHECK(!group_format::is_integer(problem.format) || problem.scales.dtype == problem.x.dtype, kName, ": scales are ",
           problem.scales.dtype, ", x is ", problem.x.dtype, "; convert one of them");
  for (TensorView* view : {&problem.x, &problem.output}) {  // of one row, or of none
    if (view->sizes[1] <= 1 || view->element_count() == 0) view->strides[1] = 1;
    if (view->sizes[0] <= 1) view->strides[0] = view->sizes[1];
  }
  const TensorView& bias = problem.bias;
  if (!bias.is_present()) return;
  check.check_device("bias", bias);
  KP_CHECK((bias.dtype == problem.x.dtype || bias.dtype == DType::kFloat32) && bias.rank == 2 &&
               bias.sizes[0] == groups && bias.sizes[1] == n && is_contiguous(bias),
           kName, ": bias is ", bias, "; it must be contiguous, ", problem.x.dtype, " or fp32, [", groups, ", ", n,
           "]");
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  check_values(problem, context);
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::quantized_grouped_matmul
