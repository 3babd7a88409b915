#include "kernel_pytorch/ops/embedding/embedding.h"

#include <algorithm>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::embedding {
namespace {

void check_device(std::string_view name, const TensorView& view, Device device) {
  KP_CHECK(view.is_present(), "embedding: ", name, " is missing");
  KP_CHECK(view.device == device, "embedding: ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
}

void check_table(std::string_view name, const TensorView& table, Device device) {
  check_device(name, table, device);
  KP_CHECK(table.rank == 2, "embedding: ", name, " has shape ", shape_text(table.shape()),
           "; it must be [rows, columns]");
  const bool is_known = table.dtype == DType::kFloat32 || table.dtype == DType::kBFloat16 ||
                        table.dtype == DType::kFloat16 || table.dtype == DType::kFloat64;
  KP_CHECK(is_known, "embedding: ", name, " is ", table.dtype, "; convert it to fp32, bf16, fp16 or fp64");
  KP_CHECK(table.dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, "embedding: ", name, " is fp64 on ",
           device, "; fp64 is supported on the CPU only, convert it to fp32");
}

// The rows that stand for indices: [indices' shape, columns of the table].
void check_rows(std::string_view name, const TensorView& rows, const TensorView& indices, std::string_view table_name,
                const TensorView& table, Device device) {
  check_device(name, rows, device);
  KP_CHECK(rows.dtype == table.dtype, "embedding: ", name, " is ", rows.dtype, ", ", table_name, " is ", table.dtype,
           "; convert one of them");
  const bool fits = rows.rank == indices.rank + 1 && columns_of(rows) == columns_of(table) &&
                    std::equal(indices.shape().begin(), indices.shape().end(), rows.sizes.begin());
  KP_CHECK(fits, "embedding: ", name, " has shape ", shape_text(rows.shape()), ", indices have ",
           shape_text(indices.shape()), " and ", table_name, " ", shape_text(table.shape()),
           "; it must have the indices' shape, then the columns");
}

void check_indices(const TensorView& indices, Device device) {
  check_device("indices", indices, device);
  KP_CHECK(indices.dtype == DType::kInt32 || indices.dtype == DType::kInt64, "embedding: indices are ", indices.dtype,
           "; convert them to int64 or int32");
  KP_CHECK(is_contiguous(indices), "embedding: indices have strides ",
           shape_text({indices.strides.data(), static_cast<size_t>(indices.rank)}), "; make them contiguous");
  KP_CHECK(indices.element_count() < int64_t{1} << 31, "embedding: there are ", indices.element_count(),
           " indices; at most 2^31 - 1 are supported, split them");
}

void check_contiguous(std::string_view name, const TensorView& view) {
  KP_CHECK(is_contiguous(view), "embedding: ", name, " has strides ",
           shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; it must be contiguous");
}

TensorView as_list(const TensorView& indices) {
  return contiguous_view(indices.data, indices.dtype, {indices.element_count()}, indices.device);
}

}  // namespace

int64_t checked_index(const TensorView& indices, int64_t position, int64_t rows) {
  const int64_t index = index_at(indices.data, indices.dtype == DType::kInt64, position);
  KP_CHECK(index >= 0 && index < rows, "embedding: index ", index, " at position ", position, ", the table has ", rows,
           " rows; indices must be at least 0 and below that");
  return index;
}

void check(Forward& arguments, Device device) {
  check_indices(arguments.indices, device);
  check_table("weight", arguments.weight, device);
  check_rows("output", arguments.output, arguments.indices, "weight", arguments.weight, device);
  check_contiguous("output", arguments.output);
  arguments.indices = as_list(arguments.indices);
  arguments.output = contiguous_view(arguments.output.data, arguments.output.dtype,
                                     {arguments.indices.element_count(), columns_of(arguments.weight)}, device);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void check(Backward& arguments, Device device) {
  check_indices(arguments.indices, device);
  check_table("grad_weight", arguments.grad_weight, device);
  check_contiguous("grad_weight", arguments.grad_weight);
  check_rows("grad_output", arguments.grad_output, arguments.indices, "grad_weight", arguments.grad_weight, device);
  const int64_t rows = arguments.grad_weight.sizes[0], padding = arguments.padding_index;
  KP_CHECK(padding >= -1 && padding < std::max<int64_t>(rows, 1), "embedding: padding_index is ", padding,
           ", the table has ", rows, " rows; it must be a row, or -1 for none");
  arguments.indices = as_list(arguments.indices);
  TensorView* views[] = {&arguments.grad_output};
  merge_leading_dimensions(views);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::embedding
