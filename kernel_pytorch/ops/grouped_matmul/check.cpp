// What the grouped products ask of their arguments.
#include <algorithm>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/grouped_matmul/operation.h"

namespace kernel_pytorch::grouped_matmul {
namespace {

struct GroupCheck {
  std::string_view op;
  Device device;

  void check_tensor(std::string_view name, const TensorView& view, int rank) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.rank == rank, op, ": ", name, " has shape ", shape_text(view.shape()), "; it must have ", rank,
             " dimensions");
  }
  void check_type(std::string_view name, const TensorView& view) const {
    const bool is_known = view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 ||
                          view.dtype == DType::kFloat16 ||
                          (view.dtype == DType::kFloat64 && device.kind == DeviceKind::kCpu);
    KP_CHECK(is_known, op, ": ", name, " is ", view.dtype, "; convert it to fp32, bf16, fp16, or on the CPU fp64");
  }
  // Of the leader's type, or a wider fp32.
  void check_type_of(std::string_view name, const TensorView& view, const TensorView& leader, bool may_widen) const {
    const bool widens = may_widen && view.dtype == DType::kFloat32 && leader.dtype != DType::kFloat64;
    KP_CHECK(view.dtype == leader.dtype || widens, op, ": ", name, " is ", view.dtype, ", the operands are ",
             leader.dtype, "; it must be ", leader.dtype, may_widen ? " or fp32" : "");
  }
  void check_dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.sizes[1] <= 1 || view.element_count() == 0 || view.strides[1] == 1, op, ": ", name,
             " has a last stride of ", view.strides[1], "; make it contiguous");
  }
  void check_sizes(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    KP_CHECK(std::ranges::equal(view.shape(), sizes), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({sizes.begin(), sizes.size()}));
  }
  void check_row(std::string_view name, const TensorView& view, DType dtype, int64_t count) const {
    check_tensor(name, view, 1);
    KP_CHECK(view.dtype == dtype, op, ": ", name, " is ", view.dtype, "; convert it to ", dtype);
    check_sizes(name, view, {count});
    KP_CHECK(count <= 1 || view.strides[0] == 1, op, ": ", name, " has stride ", view.strides[0],
             "; make it contiguous");
  }
  // How many rows there are: the gather's, or the tensor's own.
  int64_t check_gather(const TensorView& gather, const TensorView& rows) const {
    if (!gather.is_present()) return rows.sizes[0];
    check_row("gather", gather, DType::kInt32, gather.rank == 1 ? gather.sizes[0] : 0);
    return gather.sizes[0];
  }
  void check_count(int64_t rows, int64_t groups) const {
    KP_CHECK(rows < std::numeric_limits<int32_t>::max(), op, ": there are ", rows,
             " rows; at most 2^31 - 2 are supported");
    KP_CHECK(groups <= kMostGroups, op, ": there are ", groups, " groups; at most ", kMostGroups, " are supported");
  }
};

// Strides of sizes of 1 as a dense tensor has them, in the order that the others have; whether one of the two is 1.
bool set_matrix_strides(TensorView& view) {
  int64_t &row = view.strides[1], &column = view.strides[2];
  if (view.element_count() == 0) {
    row = view.sizes[2], column = 1;
  } else if (view.sizes[2] <= 1 && view.sizes[1] <= 1) {
    row = column = 1;
  } else if (view.sizes[2] <= 1) {
    column = row == 1 ? view.sizes[1] : 1;
  } else if (view.sizes[1] <= 1) {
    row = column == 1 ? view.sizes[2] : 1;
  }
  return row == 1 || column == 1;
}
void set_row_strides(TensorView& view) {
  if (!view.is_present()) return;
  if (view.sizes[1] <= 1 || view.element_count() == 0) view.strides[1] = 1;
  if (view.sizes[0] <= 1) view.strides[0] = view.sizes[1];
}

}  // namespace

void check(Product& problem, Device device) {
  const GroupCheck check{"grouped_matmul", device};
  check.check_tensor("a", problem.a, 2);
  check.check_tensor("b", problem.b, 3);
  check.check_type("a", problem.a);
  check.check_type_of("b", problem.b, problem.a, false);
  check.check_dense("a", problem.a);
  const int64_t groups = problem.b.sizes[0], k = problem.b.sizes[1], n = problem.b.sizes[2];
  KP_CHECK(problem.a.sizes[1] == k, check.op, ": a has shape ", shape_text(problem.a.shape()), ", b has ",
           shape_text(problem.b.shape()), "; b must be [groups, ", problem.a.sizes[1], ", n]");
  check.check_row("offsets", problem.offsets, DType::kInt32, groups);
  const int64_t rows = check.check_gather(problem.gather, problem.a);
  check.check_count(rows, groups);
  const bool is_gated = problem.form != Form::kPlain;
  KP_CHECK(!is_gated || n % 2 == 0, check.op, ": b has ", n, " columns; gates and ups need an even number");
  KP_CHECK(problem.limit >= 0, check.op, ": limit is ", problem.limit, "; it must be positive, or 0 for none");
  KP_CHECK(problem.limit == 0 || (is_gated && problem.activation == Kind::kSilu), check.op, ": limit is ",
           problem.limit, "; only a gate with activation silu has one");
  if (problem.bias.is_present()) {
    check.check_tensor("bias", problem.bias, 2);
    check.check_type_of("bias", problem.bias, problem.a, true);
    check.check_sizes("bias", problem.bias, {groups, n});
    check.check_dense("bias", problem.bias);
  }
  check.check_tensor("output", problem.output, 2);
  check.check_type_of("output", problem.output, problem.a, true);
  check.check_sizes("output", problem.output, {rows, is_gated ? n / 2 : n});
  check.check_dense("output", problem.output);
  if (problem.preactivation.is_present()) {
    check.check_tensor("preactivation", problem.preactivation, 2);
    check.check_type_of("preactivation", problem.preactivation, problem.output, false);
    check.check_sizes("preactivation", problem.preactivation, {rows, n});
    check.check_dense("preactivation", problem.preactivation);
  }
  KP_CHECK(set_matrix_strides(problem.b), check.op, ": b has strides ", shape_text({problem.b.strides.data(), 3}),
           "; one of the last two must be 1, make it contiguous");
  for (TensorView* view : {&problem.a, &problem.bias, &problem.output, &problem.preactivation}) set_row_strides(*view);
}

void check(WeightGradient& problem, Device device) {
  const GroupCheck check{"grouped_matmul_weight", device};
  check.check_tensor("a", problem.a, 2);
  check.check_tensor("b", problem.b, 2);
  check.check_type("a", problem.a);
  check.check_type_of("b", problem.b, problem.a, false);
  check.check_dense("a", problem.a);
  check.check_dense("b", problem.b);
  KP_CHECK(!problem.gather_a.is_present() || !problem.gather_b.is_present(), check.op,
           ": both operands have a gather; gather one of them beforehand");
  const int64_t rows = check.check_gather(problem.gather_a, problem.a);
  const int64_t others = check.check_gather(problem.gather_b, problem.b);
  KP_CHECK(rows == others, check.op, ": a has ", rows, " rows, b has ", others, "; they must have as many");
  check.check_tensor("output", problem.output, 3);
  const int64_t groups = problem.output.sizes[0];
  check.check_row("offsets", problem.offsets, DType::kInt32, groups);
  check.check_count(rows, groups);
  check.check_type_of("output", problem.output, problem.a, true);
  check.check_sizes("output", problem.output, {groups, problem.a.sizes[1], problem.b.sizes[1]});
  KP_CHECK(set_matrix_strides(problem.output), check.op, ": output has strides ",
           shape_text({problem.output.strides.data(), 3}), "; one of the last two must be 1");
  set_row_strides(problem.a);
  set_row_strides(problem.b);
}

void check(Sums& problem, Device device) {
  const GroupCheck check{"group_sums", device};
  check.check_tensor("x", problem.x, 2);
  check.check_type("x", problem.x);
  check.check_dense("x", problem.x);
  const int64_t rows = check.check_gather(problem.gather, problem.x);
  check.check_tensor("output", problem.output, 2);
  const int64_t groups = problem.output.sizes[0];
  check.check_row("offsets", problem.offsets, DType::kInt32, groups);
  check.check_count(rows, groups);
  if (problem.factors.is_present()) {
    check.check_row("factors", problem.factors, statistic_type(problem.x.dtype), rows);
  }
  check.check_type_of("output", problem.output, problem.x, true);
  check.check_sizes("output", problem.output, {groups, problem.x.sizes[1]});
  KP_CHECK(is_contiguous(problem.output), check.op, ": output must be contiguous");
  set_row_strides(problem.x);
}

}  // namespace kernel_pytorch::grouped_matmul
