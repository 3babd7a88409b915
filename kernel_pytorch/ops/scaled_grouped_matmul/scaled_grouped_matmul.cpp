#include "kernel_pytorch/ops/scaled_grouped_matmul/scaled_grouped_matmul.h"

#include <algorithm>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/grouped_matmul/grouped_matmul.h"
#include "kernel_pytorch/ops/scaled_grouped_matmul/operation.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::scaled_grouped_matmul {
namespace {

constexpr std::string_view kOp = "scaled_grouped_matmul";

struct Checks {
  Device device;

  void check_tensor(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), kOp, ": ", name, " is missing");
    KP_CHECK(view.device == device, kOp, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(rank < 0 || view.rank == rank, kOp, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ",
             rank, " dimensions");
  }
  void check_codes(std::string_view name, const TensorView& view, int rank) const {
    check_tensor(name, view, rank);
    KP_CHECK(view.dtype == DType::kFloat8E4M3 || view.dtype == DType::kFloat8E5M2, kOp, ": ", name, " is ", view.dtype,
             "; it must be e4m3 or e5m2, quantize it first");
    KP_CHECK(view.size(-1) <= 1 || view.stride(-1) == 1, kOp, ": ", name, " has a last stride of ", view.stride(-1),
             "; its last dimension, k, must be dense");
  }
  void check_indices(std::string_view name, const TensorView& view, int64_t count) const {
    check_tensor(name, view, 1);
    KP_CHECK(view.dtype == DType::kInt32 && view.sizes[0] == count && (count <= 1 || view.strides[0] == 1), kOp, ": ",
             name, " is ", view, "; it must be int32, contiguous, with ", count, " elements");
  }

  TensorView scale(std::string_view name, const TensorView& view) const {
    check_tensor(name, view, -1);
    KP_CHECK(view.dtype == DType::kFloat32, kOp, ": ", name, " is ", view.dtype, "; it must be fp32");
    return view;
  }
  // [rows, blocks], of the shapes that the header names.
  TensorView scale_of_a(const Product& problem) const {
    TensorView view = scale("scale_a", problem.scale_a);
    const int64_t rows = problem.a.sizes[0], blocks = blocks_of(problem.a.sizes[1]);
    KP_CHECK(view.rank <= 2 &&
                 (view.element_count() == 1 ||
                  (view.sizes[0] == rows && (view.rank == 1 || view.sizes[1] == 1 || view.sizes[1] == blocks))),
             kOp, ": scale_a has shape ", shape_text(view.shape()), "; for ", rows, " rows of a it must be [], [", rows,
             "] or [", rows, ", ", blocks, "] (1x128 blocks)");
    return with_sizes(view, 2);
  }
  TensorView scale_of_b(const Product& problem) const {
    TensorView view = scale("scale_b", problem.scale_b);
    const int64_t groups = problem.b.sizes[0], n = problem.b.sizes[1], blocks = blocks_of(problem.b.sizes[2]);
    const bool is_one = view.element_count() == 1 && view.rank <= 1;
    const bool has_groups = view.rank >= 1 && view.rank <= 3 && view.sizes[0] == groups;
    const int64_t rows = view.rank < 2 ? 1 : view.sizes[1], steps = view.rank < 3 ? 1 : view.sizes[2];
    const bool has_blocks = (rows == n || rows == blocks_of(n)) && steps == blocks;
    KP_CHECK(is_one || (has_groups && (((rows == n || rows == 1) && steps == 1) || (has_blocks && view.rank == 3))),
             kOp, ": scale_b has shape ", shape_text(view.shape()), "; for ", groups, " matrices of ", n,
             " rows it must be [], [", groups, "], [", groups, ", ", n, "], [", groups, ", ", n, ", ", blocks,
             "] (1x128 blocks) or [", groups, ", ", blocks_of(n), ", ", blocks, "] (128x128)");
    return with_sizes(view, 3);
  }
  // Dimensions that are missing, and those with one element, have stride 0.
  static TensorView with_sizes(TensorView view, int rank) {
    for (int i = 0; i < rank; ++i) {
      if (i >= view.rank) view.sizes[i] = 1;
      if (view.sizes[i] == 1) view.strides[i] = 0;
    }
    view.rank = rank;
    return view;
  }

  void check_output(const Product& problem, int64_t rows) const {
    const TensorView& output = problem.output;
    check_tensor("output", output, 2);
    const int64_t n = problem.b.sizes[1];
    KP_CHECK(output.sizes[0] == rows && output.sizes[1] == n, kOp, ": output has shape ", shape_text(output.shape()),
             "; it must be [", rows, ", ", n, "]");
    KP_CHECK(output.sizes[1] <= 1 || output.strides[1] == 1, kOp, ": output has a last stride of ", output.strides[1],
             "; make it contiguous");
    const DType type = output.dtype;
    KP_CHECK(type == DType::kFloat32 || type == DType::kBFloat16 || type == DType::kFloat16, kOp, ": output is ", type,
             "; it must be fp32, bf16 or fp16");
  }
  void check_bias(const Product& problem) const {
    const TensorView& bias = problem.bias;
    if (!bias.is_present()) return;
    check_tensor("bias", bias, 2);
    KP_CHECK(bias.dtype == DType::kFloat32 || bias.dtype == problem.output.dtype, kOp, ": bias is ", bias.dtype,
             ", the output ", problem.output.dtype, "; bias must have that type or be fp32");
    const int64_t groups = problem.b.sizes[0], n = problem.b.sizes[1];
    KP_CHECK(bias.sizes[0] == groups && bias.sizes[1] == n && is_contiguous(bias), kOp, ": bias is ", bias,
             "; it must be contiguous and [", groups, ", ", n, "]");
  }
};

// What the host may read: offsets that ascend, gathers inside a.
void check_values(const Product& problem, const Context& context) {
  const int64_t rows = rows_of(problem);
  if (context.device().kind != DeviceKind::kCpu) {
    check_offset_values(
        {.op = kOp, .name = "offsets", .offsets = problem.offsets, .tensor = "the rows", .tokens = rows}, context);
    return;
  }
  if (Rehearsal::is_running()) return;
  int32_t before = 0;
  for (int64_t group = 0; group < problem.offsets.sizes[0]; ++group) {
    const int32_t end = problem.offsets.as<const int32_t>()[group];
    KP_CHECK(end >= before && end <= rows, kOp, ": offsets[", group, "] is ", end, " after ", before,
             ", and there are ", rows, " rows; offsets are where groups end, ascending");
    before = end;
  }
  for (int64_t row = 0; problem.gather.is_present() && row < before; ++row) {
    const int32_t line = problem.gather.as<const int32_t>()[row];
    KP_CHECK(line >= 0 && line < problem.a.sizes[0], kOp, ": gather[", row, "] is ", line, ", a has ",
             problem.a.sizes[0], " rows; it must be one of them");
  }
}

}  // namespace

void check(Product& problem, Device device) {
  const Checks checks{device};
  checks.check_codes("a", problem.a, 2);
  checks.check_codes("b", problem.b, 3);
  const int64_t groups = problem.b.sizes[0], k = problem.b.sizes[2];
  KP_CHECK(problem.a.sizes[1] == k && k > 0, kOp, ": a has shape ", shape_text(problem.a.shape()), ", b has ",
           shape_text(problem.b.shape()), "; their last dimensions, k, must be equal and positive");
  KP_CHECK(groups >= 1 && groups <= grouped_matmul::kMostGroups, kOp, ": there are ", groups,
           " groups; it must be 1 to ", grouped_matmul::kMostGroups);
  checks.check_indices("offsets", problem.offsets, groups);
  const bool gathers = problem.gather.is_present();
  const int64_t rows = gathers && problem.gather.rank == 1 ? problem.gather.sizes[0] : problem.a.sizes[0];
  if (gathers) checks.check_indices("gather", problem.gather, rows);
  KP_CHECK(rows < std::numeric_limits<int32_t>::max(), kOp, ": there are ", rows,
           " rows; at most 2^31 - 2 are supported");
  checks.check_output(problem, rows);
  checks.check_bias(problem);
  problem.scale_a = checks.scale_of_a(problem);
  problem.scale_b = checks.scale_of_b(problem);
}

void multiply(const Product& arguments, Context& context) {
  Product problem = arguments;
  check(problem, context.device());
  check_values(problem, context);
  if (problem.output.element_count() == 0) return;
  registry::run_best(kProduct, problem, context);
}

}  // namespace kernel_pytorch::scaled_grouped_matmul
