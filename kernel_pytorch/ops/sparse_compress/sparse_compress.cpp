#include "kernel_pytorch/ops/sparse_compress/sparse_compress.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/sparse_compress/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::sparse_compress {
namespace {

void check_matrix(std::string_view op, std::string_view name, const TensorView& view, Device device) {
  const bool is_small =
      view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 || view.dtype == DType::kFloat16;
  KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
           "; move one of them");
  KP_CHECK(is_small && view.rank == 2 && (view.strides[1] == 1 || view.sizes[1] <= 1 || view.element_count() == 0), op,
           ": ", name, " is ", view, "; it must be a matrix of fp32, bf16 or fp16 with dense columns");
  KP_CHECK(view.sizes[1] % kGroup == 0, op, ": ", name, " has ", view.sizes[1],
           " columns; two of each four are kept, so it must be a multiple of 4");
}

}  // namespace

void check_compressed(std::string_view op, const TensorView& values, const TensorView& metadata, int64_t rows,
                      int64_t columns, Device device) {
  for (const TensorView* view : {&values, &metadata}) {
    KP_CHECK(view->device == device, op, ": ", view == &values ? "values" : "metadata", " are on ", view->device,
             ", the call runs on ", device, "; move one of them");
  }
  KP_CHECK(values.rank == 2 && values.sizes[0] == rows && values.sizes[1] * 2 == columns && is_contiguous(values), op,
           ": values are ", values, "; they must be contiguous, [", rows, ", ", columns / 2, "]");
  const int64_t blocks = (columns + kBlockColumns - 1) / kBlockColumns;
  KP_CHECK(metadata.dtype == DType::kInt32 && metadata.rank == 3 && metadata.sizes[0] == blocks &&
               metadata.sizes[1] == rows && metadata.sizes[2] == 2 && is_contiguous(metadata),
           op, ": metadata is ", metadata, "; it must be contiguous int32[", blocks, ", ", rows, ", 2]");
}

void check(const Compress& problem, Device device) {
  check_matrix("sparse_compress", "x", problem.x, device);
  check_compressed("sparse_compress", problem.values, problem.metadata, problem.x.sizes[0], problem.x.sizes[1], device);
  KP_CHECK(problem.values.dtype == problem.x.dtype, "sparse_compress: values are ", problem.values.dtype, ", x is ",
           problem.x.dtype, "; they must have one type");
}

void check(const Decompress& problem, Device device) {
  check_matrix("sparse_decompress", "output", problem.output, device);
  check_compressed("sparse_decompress", problem.values, problem.metadata, problem.output.sizes[0],
                   problem.output.sizes[1], device);
  KP_CHECK(problem.values.dtype == problem.output.dtype, "sparse_decompress: values are ", problem.values.dtype,
           ", output is ", problem.output.dtype, "; they must have one type");
}

void compress(const Compress& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kCompress, arguments, context);
}

void decompress(const Decompress& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kDecompress, arguments, context);
}

}  // namespace kernel_pytorch::sparse_compress
