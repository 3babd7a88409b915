#include "kernel_pytorch/ops/sample/sample.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/sample/operation.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::sample {
namespace {

void check_device(std::string_view name, const TensorView& view, Device device) {
  KP_CHECK(view.device == device, "sample: ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
}

void check_row(std::string_view name, const TensorView& view, const Draw& problem, Device device) {
  check_device(name, view, device);
  KP_CHECK(view.rank == 1 && view.sizes[0] == problem.logits.sizes[0] && is_contiguous(view), "sample: ", name,
           " has shape ", shape_text(view.shape()), ", logits have ", shape_text(problem.logits.shape()),
           "; give one number for each row, contiguous");
}
void check_numbers(std::string_view name, const TensorView& view, DType dtype, const Draw& problem, Device device) {
  if (!view.is_present()) return;
  KP_CHECK(view.dtype == dtype, "sample: ", name, " is ", view.dtype, "; it must be ", dtype);
  check_row(name, view, problem, device);
}
void check_whole(std::string_view name, const TensorView& view, const Draw& problem, Device device) {
  if (!view.is_present()) return;
  KP_CHECK(view.dtype == DType::kInt64 || view.dtype == DType::kInt32, "sample: ", name, " is ", view.dtype,
           "; it must be int64 or int32");
  check_row(name, view, problem, device);
}
uint64_t whole_at(const TensorView& view, int64_t row) {
  return static_cast<uint64_t>(index_at(view.data, view.dtype == DType::kInt64, row));
}

}  // namespace

void check(const Draw& problem, Device device) {
  const TensorView& logits = problem.logits;
  KP_CHECK(logits.is_present(), "sample: logits is missing");
  check_device("logits", logits, device);
  KP_CHECK(logits.dtype == DType::kFloat32 || logits.dtype == DType::kBFloat16 || logits.dtype == DType::kFloat16,
           "sample: logits is ", logits.dtype, "; convert it to fp32, bf16 or fp16");
  KP_CHECK(logits.rank == 2, "sample: logits has shape ", shape_text(logits.shape()),
           "; it must be [rows, vocabulary]");
  KP_CHECK(logits.sizes[1] <= 1 || logits.strides[1] == 1, "sample: logits has strides ",
           shape_text({logits.strides.data(), 2}), "; its rows must be dense");
  KP_CHECK(logits.sizes[1] <= kMostTokens, "sample: the vocabulary has ", logits.sizes[1], " tokens, at most ",
           kMostTokens, " are supported");
  check_numbers("temperature", problem.temperature, DType::kFloat32, problem, device);
  check_numbers("top_k", problem.top_k, DType::kInt32, problem, device);
  check_numbers("top_p", problem.top_p, DType::kFloat32, problem, device);
  check_numbers("min_p", problem.min_p, DType::kFloat32, problem, device);
  check_whole("seeds", problem.seeds, problem, device);
  check_whole("positions", problem.positions, problem, device);
  KP_CHECK(problem.tokens.is_present(), "sample: tokens is missing");
  check_numbers("tokens", problem.tokens, DType::kInt32, problem, device);
}

RowNumbers numbers_of(const Draw& problem, int64_t row) {
  RowNumbers numbers;
  if (problem.temperature.is_present()) numbers.temperature = problem.temperature.as<const float>()[row];
  if (problem.top_k.is_present()) numbers.top_k = problem.top_k.as<const int32_t>()[row];
  if (problem.top_p.is_present()) numbers.top_p = problem.top_p.as<const float>()[row];
  if (problem.min_p.is_present()) numbers.min_p = problem.min_p.as<const float>()[row];
  if (problem.seeds.is_present()) numbers.seed = whole_at(problem.seeds, row);
  if (problem.positions.is_present()) numbers.position = whole_at(problem.positions, row);
  return numbers;
}

void draw(const Draw& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kDraw, arguments, context);
}

}  // namespace kernel_pytorch::sample
