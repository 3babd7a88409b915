#include "kernel_pytorch/ops/gradient_code/gradient_code.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/gradient_code/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::gradient_code {
namespace {

void check_device(std::string_view op, std::string_view name, const TensorView& view, Device device) {
  KP_CHECK(view.is_present(), op, ": ", name, " is missing");
  KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
}

void check_numbers(std::string_view op, std::string_view name, const TensorView& view, Device device) {
  check_device(op, name, view, device);
  KP_CHECK(view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 || view.dtype == DType::kFloat16, op, ": ",
           name, " is ", view.dtype, "; convert it to fp32, bf16 or fp16");
  KP_CHECK(view.rank == 1 && is_contiguous(view), op, ": ", name, " has shape ", shape_text(view.shape()),
           "; it must be one contiguous row of numbers, flatten it");
}

void check_rows(std::string_view op, std::string_view name, const TensorView& view, DType dtype, Device device) {
  check_device(op, name, view, device);
  KP_CHECK(view.dtype == dtype, op, ": ", name, " is ", view.dtype, "; it must be ", dtype);
  KP_CHECK(view.rank == 2 && (view.sizes[1] <= 1 || view.strides[1] == 1), op, ": ", name, " has shape ",
           shape_text(view.shape()), "; it must be a matrix whose rows are dense");
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  const bool has_words = address % 4 == 0 && (view.sizes[0] <= 1 || view.strides[0] * size_of(dtype) % 4 == 0);
  KP_CHECK(has_words || view.element_count() == 0, op, ": rows of ", name,
           " begin at odd addresses; they must be multiples of 4 bytes");
}

void check_message(std::string_view op, const TensorView& codes, const TensorView& scales, Code code, int64_t count,
                   bool has_one_row, Device device) {
  check_rows(op, "codes", codes, DType::kInt8, device);
  check_rows(op, "scales", scales, DType::kFloat32, device);
  const int64_t rows = codes.sizes[0], columns = codes.sizes[1] * 8 / bits_of(code);
  KP_CHECK(columns % kTile == 0, op, ": codes have ", columns, " columns; they must be a multiple of ", kTile);
  KP_CHECK(scales.sizes[0] == rows && columns_of(scales, code) == columns, op, ": scales are ",
           shape_text(scales.shape()), ", codes are ", shape_text(codes.shape()), "; a row of ", columns,
           " columns has ", columns / block_elements(code), " scales");
  const int64_t room = has_one_row ? columns : rows * columns;
  KP_CHECK(count <= room, op, ": ", count, " numbers, the message has room for ", room, "; give it more columns");
}

}  // namespace

void check(const Encode& problem, Device device) {
  check_numbers("gradient_encode", "x", problem.x, device);
  if (problem.error.is_present()) {
    check_numbers("gradient_encode", "error", problem.error, device);
    KP_CHECK(problem.error.dtype == DType::kFloat32 && problem.error.sizes[0] == problem.x.sizes[0],
             "gradient_encode: error is ", problem.error, ", x is ", problem.x,
             "; the error must be fp32 and as long as x");
  }
  check_message("gradient_encode", problem.codes, problem.scales, problem.code, problem.x.sizes[0], false, device);
}

void check(const Decode& problem, Device device) {
  check_numbers("gradient_decode", "output", problem.output, device);
  check_message("gradient_decode", problem.codes, problem.scales, problem.code, problem.output.sizes[0], problem.mean,
                device);
  KP_CHECK(!problem.mean || problem.codes.sizes[0] > 0, "gradient_decode: the mean of no rows; give at least one");
}

void encode(const Encode& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kEncode, arguments, context);
}

void decode(const Decode& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kDecode, arguments, context);
}

}  // namespace kernel_pytorch::gradient_code
