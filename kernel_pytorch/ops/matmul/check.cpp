// The checks of a product, and its normal form: three dimensions everywhere, strides that kernels can rely on.
#include <algorithm>
#include <array>
#include <span>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/matmul/operation.h"

namespace kernel_pytorch::matmul {
namespace {

void check_device(std::string_view name, const TensorView& view, Device device) {
  KP_CHECK(view.device == device, "matmul: ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
}

void check_type(std::string_view name, const TensorView& view, DType first, DType second) {
  KP_CHECK(view.dtype == first || view.dtype == second, "matmul: ", name, " is ", view.dtype, "; convert it to ", first,
           first == second ? "" : " or ", first == second ? std::string_view() : name_of(second));
}

// [batch, rows, columns], the leading dimensions merged; [rows, columns] is [1, rows, columns]. They are a's.
void lift(std::string_view name, TensorView& view, std::span<const int64_t> leading) {
  const auto rank = leading.size() + 2;
  KP_CHECK(view.rank == static_cast<int>(rank), "matmul: ", name, " has shape ", shape_text(view.shape()),
           "; it must have ", rank, " dimensions, as a");
  KP_CHECK(std::ranges::equal(view.shape().first(leading.size()), leading), "matmul: ", name, " has shape ",
           shape_text(view.shape()), "; its leading sizes must be a's, ", shape_text(leading), " (expand it first)");
  if (rank == 3) return;
  KP_CHECK(merge_front(view, 2), "matmul: ", name, " is ", view,
           ", whose leading dimensions do not merge into one; make it contiguous");
}

void check_shape(std::string_view name, const TensorView& view, const std::array<int64_t, 3>& wanted) {
  KP_CHECK(view.sizes[0] == wanted[0] && view.sizes[1] == wanted[1] && view.sizes[2] == wanted[2], "matmul: ", name,
           " has shape ", shape_text(view.shape()), "; it must be ", shape_text(wanted));
}

// Dimensions of size 1 get the stride of a dense tensor, so that kernels need no special case; the strides of a
// matrix's two dimensions stay different.
void normalize_strides(TensorView& view) {
  if (view.sizes[2] <= 1) view.strides[2] = 1;
  if (view.sizes[1] <= 1) view.strides[1] = view.strides[2] == 1 ? view.sizes[2] : 1;
  if (view.sizes[0] <= 1) view.strides[0] = view.sizes[1] * view.sizes[2];
}

void normalize_operand(std::string_view name, TensorView& view) {
  normalize_strides(view);
  KP_CHECK(view.element_count() == 0 || view.strides[2] == 1 || view.strides[1] == 1, "matmul: ", name, " has strides ",
           shape_text({view.strides.data(), 3}), "; of the last two one must be 1: make it contiguous");
  if (view.element_count() == 0) view.strides[2] = 1;
}

void normalize_rows(std::string_view name, TensorView& view, bool is_written) {
  normalize_strides(view);
  KP_CHECK(view.element_count() == 0 || view.strides[2] == 1, "matmul: ", name, " has strides ",
           shape_text({view.strides.data(), 3}), "; the last must be 1: make it contiguous");
  KP_CHECK(!is_written || view.element_count() == 0 || (view.strides[0] != 0 && view.strides[1] != 0), "matmul: ", name,
           " has strides ", shape_text({view.strides.data(), 3}), "; what is written cannot be expanded");
}

void check_operands(Product& problem, Device device, std::span<const int64_t> leading) {
  TensorView &a = problem.a, &b = problem.b;
  KP_CHECK(a.is_present() && b.is_present() && problem.output.is_present(), "matmul: a, b or output is missing");
  for (const auto& [name, view] : {std::pair{"a", &a}, std::pair{"b", &b}, std::pair{"output", &problem.output}}) {
    check_device(name, *view, device);
  }
  KP_CHECK(a.dtype == DType::kFloat32 || a.dtype == DType::kBFloat16 || a.dtype == DType::kFloat16 ||
               a.dtype == DType::kFloat64,
           "matmul: a is ", a.dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(a.dtype == b.dtype, "matmul: a is ", a.dtype, ", b is ", b.dtype, "; convert one of them");
  lift("b", b, leading);
  lift("output", problem.output, leading);
  lift("a", a, leading);
  KP_CHECK(a.sizes[2] == b.sizes[1], "matmul: a has shape ", shape_text(a.shape()), ", b has ", shape_text(b.shape()),
           "; a's last size and b's last but one must be equal");
  check_shape("b", b, {a.sizes[0], a.sizes[2], b.sizes[2]});
  KP_CHECK(problem.form != Form::kGated || b.sizes[2] % 2 == 0, "matmul: b has ", b.sizes[2],
           " columns; a gated product takes pairs");
  check_shape("output", problem.output, {a.sizes[0], a.sizes[1], output_columns_of(problem.form, b.sizes[2])});
  normalize_operand("a", a);
  normalize_operand("b", b);
  normalize_rows("output", problem.output, true);
}

void check_up(Product& problem, Device device, std::span<const int64_t> leading) {
  TensorView& up = problem.up;
  KP_CHECK(up.is_present() == (problem.form == Form::kGatedTwice), "matmul: up is ",
           up.is_present() ? "given" : "missing", "; it belongs to the form gated_twice");
  if (!up.is_present()) return;
  check_device("up", up, device);
  check_type("up", up, problem.b.dtype, problem.b.dtype);
  lift("up", up, leading);
  check_shape("up", up, {problem.b.sizes[0], problem.b.sizes[1], problem.b.sizes[2]});
  normalize_operand("up", up);
  KP_CHECK(!problem.bias.is_present() && !problem.preactivation.is_present() && !problem.row_sums.is_present(),
           "matmul: the form gated_twice takes no bias, preactivation or row_sums");
}

void check_precision(const Product& problem, Device device) {
  if (problem.precision == Precision::kFull) return;
  KP_CHECK(problem.a.dtype == DType::kFloat32, "matmul: precision is for fp32, a is ", problem.a.dtype,
           "; use precision \"full\"");
  KP_CHECK(problem.precision != Precision::kTf32 || device.kind == DeviceKind::kCuda,
           "matmul: precision \"tf32\" is a GPU's, the call runs on ", device,
           "; use \"full\", \"bf16\" or \"bf16x3\"");
}

// [batch, rows, columns] of the given shape; the last stride 1.
void check_rows(std::string_view name, TensorView& view, Device device, bool is_written,
                const std::array<int64_t, 3>& wanted, std::span<const int64_t> leading) {
  check_device(name, view, device);
  lift(name, view, leading);
  check_shape(name, view, wanted);
  normalize_rows(name, view, is_written);
}

void check_bias(const TensorView& bias, int64_t n, DType wide, DType output, Device device) {
  check_device("bias", bias, device);
  check_type("bias", bias, output, wide);
  KP_CHECK(bias.rank == 1 && bias.sizes[0] == n && (n <= 1 || bias.strides[0] == 1), "matmul: bias is ", bias,
           "; it must be contiguous with one element for each of the ", n, " columns of b");
}

void check_row_sums(TensorView& sums, const Product& problem, DType wide, Device device) {
  check_device("row_sums", sums, device);
  check_type("row_sums", sums, problem.a.dtype, wide);
  const int64_t batch = problem.a.sizes[0], m = problem.a.sizes[1];
  KP_CHECK(is_contiguous(sums) && sums.element_count() == batch * m, "matmul: row_sums is ", sums,
           "; it must be contiguous with one element for each of the ", batch * m, " rows of a");
  sums = contiguous_view(sums.data, sums.dtype, {batch, m}, sums.device);
}

}  // namespace

void check(Product& problem, Device device) {
  const TensorView a = problem.a;
  KP_CHECK(a.rank >= 2 && a.rank == problem.b.rank, "matmul: a has shape ", shape_text(a.shape()), ", b has ",
           shape_text(problem.b.shape()), "; they must have equally many dimensions, at least two");
  const auto leading = a.shape().first(static_cast<size_t>(a.rank) - 2);
  check_operands(problem, device, leading);
  check_up(problem, device, leading);
  check_precision(problem, device);
  const DType type = problem.a.dtype, wide = type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const DType output = problem.output.dtype;
  check_type("output", problem.output, type, wide);
  const int64_t batch = problem.a.sizes[0], m = problem.a.sizes[1], n = problem.b.sizes[2];
  const std::array<int64_t, 3> output_shape = {batch, m, problem.output.sizes[2]};
  KP_CHECK(problem.saved.is_present() == is_gradient(problem.form), "matmul: saved is ",
           problem.saved.is_present() ? "given" : "missing", "; it belongs to the forms of gradients");
  if (problem.bias.is_present()) check_bias(problem.bias, n, wide, output, device);
  if (problem.saved.is_present()) {
    check_rows("saved", problem.saved, device, false, output_shape, leading);
    check_type("saved", problem.saved, output, wide);
  }
  if (problem.residual.is_present()) {
    check_rows("residual", problem.residual, device, false, output_shape, leading);
    check_type("residual", problem.residual, output, wide);
  }
  if (problem.preactivation.is_present()) {
    check_rows("preactivation", problem.preactivation, device, true, {batch, m, n}, leading);
    check_type("preactivation", problem.preactivation, output, output);
  }
  if (problem.row_sums.is_present()) check_row_sums(problem.row_sums, problem, wide, device);
  if (problem.beta == 0) problem.residual = {};
  if (!problem.residual.is_present()) problem.beta = 1;
}

}  // namespace kernel_pytorch::matmul
