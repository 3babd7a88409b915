#include "kernel_pytorch/ops/mean_pooling/mean_pooling.h"

#include <algorithm>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/ops/support/packed_offsets.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::mean_pooling {
namespace {

struct Checks {
  std::string_view op;
  Device device;

  void check(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    const bool is_known = view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 ||
                          view.dtype == DType::kFloat16 || view.dtype == DType::kFloat64;
    KP_CHECK(is_known, op, ": ", name, " is ", view.dtype, "; convert it to fp32, bf16, fp16 or fp64");
    KP_CHECK(view.dtype != DType::kFloat64 || device.kind == DeviceKind::kCpu, op, ": ", name, " is fp64 on ", device,
             "; fp64 is supported on the CPU only, convert it to fp32");
  }

  void check_offsets(const TensorView& offsets, int64_t chunk_size) const {
    if (!offsets.is_present()) return;
    KP_CHECK(chunk_size == 0, op, ": offsets are for whole sequences; chunks take a batch");
    KP_CHECK(offsets.device == device, op, ": offsets are on ", offsets.device, ", the call runs on ", device,
             "; move them there");
    KP_CHECK(offsets.dtype == DType::kInt32 || offsets.dtype == DType::kInt64, op, ": offsets are ", offsets.dtype,
             "; convert them to int32 or int64");
    KP_CHECK(offsets.rank == 1 && offsets.sizes[0] >= 1 && is_contiguous(offsets), op, ": offsets are ", offsets,
             "; they must be contiguous, with one dimension, sequences + 1 long");
  }
  // x as [batch, tokens, inner, columns].
  TensorView normal_form(std::string_view name, const TensorView& x, bool has_batch) const {
    const int leading = has_batch ? 2 : 1;
    KP_CHECK(x.rank > leading, op, ": ", name, " has shape ", shape_text(x.shape()), "; it must be [",
             has_batch ? "batch, " : "", "tokens, ..., columns]");
    TensorView form = x;
    form.rank = 4;
    form.sizes = {has_batch ? x.sizes[0] : 1, x.sizes[leading - 1], 1, x.size(-1)};
    form.strides = {has_batch ? x.strides[0] : 0, x.strides[leading - 1], 0, x.stride(-1)};
    for (int i = x.rank - 2; i >= leading; --i) {
      const bool merges_columns = form.sizes[2] == 1 && x.strides[i] == form.sizes[3] * form.strides[3];
      const bool merges_inner = form.sizes[2] > 1 && x.strides[i] == form.sizes[2] * form.strides[2];
      KP_CHECK(x.sizes[i] == 1 || x.element_count() == 0 || form.sizes[2] == 1 || merges_inner, op, ": ", name,
               " has strides ", shape_text({x.strides.data(), static_cast<size_t>(x.rank)}), " for shape ",
               shape_text(x.shape()), "; the dimensions between tokens and columns do not merge, make it contiguous");
      if (merges_columns) {
        form.sizes[3] *= x.sizes[i];
      } else {
        if (form.sizes[2] == 1) form.strides[2] = x.strides[i];
        form.sizes[2] *= x.sizes[i];
      }
    }
    return form;
  }

  // One mean for each of the rows, contiguous; its shape otherwise is the caller's business.
  TensorView rows_form(std::string_view name, const TensorView& rows, const TensorView& x, const Sizes& sizes) const {
    check(name, rows);
    KP_CHECK(rows.dtype == x.dtype, op, ": ", name, " is ", rows.dtype, ", x is ", x.dtype, "; convert one of them");
    KP_CHECK(rows.element_count() == sizes.rows() * sizes.columns && is_contiguous(rows), op, ": ", name, " is ", rows,
             "; it must be contiguous, with ", sizes.batch * sizes.means, " means of ", sizes.inner * sizes.columns,
             " elements");
    return contiguous_view(rows.data, rows.dtype, {sizes.batch, sizes.means, sizes.inner, sizes.columns}, rows.device);
  }
};

// Offsets cut whole sequences, so the op is mean_pool.
void check_offset_range(const TensorView& offsets, const TensorView& x, const Context& context) {
  if (!offsets.is_present()) return;
  check_offset_values({.op = "mean_pool", .name = "offsets", .offsets = offsets, .tensor = "x", .tokens = x.sizes[1]},
                      context);
}

void check_chunk_size(int64_t chunk_size) {
  KP_CHECK(chunk_size > 0, "chunk_mean_pool: chunk_size is ", chunk_size, "; it must be at least 1");
}

Checks checks_of(int64_t chunk_size, Device device) {
  const Checks checks{chunk_size > 0 ? "chunk_mean_pool" : "mean_pool", device};
  KP_CHECK(chunk_size >= 0, "chunk_mean_pool: chunk_size is ", chunk_size, "; it must be at least 1");
  return checks;
}

}  // namespace

Range range_of(const Sizes& sizes, const TensorView& offsets, int64_t mean) {
  if (!offsets.is_present()) return {mean * sizes.chunk, std::min((mean + 1) * sizes.chunk, sizes.tokens)};
  const auto at = [&](int64_t i) { return index_at(offsets.data, offsets.dtype == DType::kInt64, i); };
  return {at(mean), at(mean + 1)};
}

void check(Forward& problem, Device device) {
  const Forward arguments = problem;
  const Checks checks = checks_of(arguments.chunk_size, device);
  checks.check("x", arguments.x);
  checks.check_offsets(arguments.offsets, arguments.chunk_size);
  problem.x = checks.normal_form("x", arguments.x, !arguments.offsets.is_present());
  const Sizes sizes(problem.x, problem.offsets, problem.chunk_size);
  problem.output = checks.rows_form("output", arguments.output, arguments.x, sizes);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  check_offset_range(problem.offsets, problem.x, context);
  registry::run_best(arguments.chunk_size > 0 ? kChunkForward : kForward, problem, context);
}

void check(Backward& problem, Device device) {
  const Backward arguments = problem;
  const Checks checks = checks_of(arguments.chunk_size, device);
  checks.check("grad_input", arguments.grad_input);
  checks.check_offsets(arguments.offsets, arguments.chunk_size);
  KP_CHECK(is_contiguous(arguments.grad_input), checks.op, ": grad_input is ", arguments.grad_input,
           "; it must be contiguous");
  problem.grad_input = checks.normal_form("grad_input", arguments.grad_input, !arguments.offsets.is_present());
  const Sizes sizes(problem.grad_input, problem.offsets, problem.chunk_size);
  problem.grad_output = checks.rows_form("grad_output", arguments.grad_output, arguments.grad_input, sizes);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  check_offset_range(problem.offsets, problem.grad_input, context);
  registry::run_best(arguments.chunk_size > 0 ? kChunkBackward : kBackward, problem, context);
}

void check_chunks(Forward& problem, Device device) {
  check_chunk_size(problem.chunk_size);
  check(problem, device);
}

void check_chunks(Backward& problem, Device device) {
  check_chunk_size(problem.chunk_size);
  check(problem, device);
}

void chunk_forward(const Forward& arguments, Context& context) {
  check_chunk_size(arguments.chunk_size);
  forward(arguments, context);
}

void chunk_backward(const Backward& arguments, Context& context) {
  check_chunk_size(arguments.chunk_size);
  backward(arguments, context);
}

}  // namespace kernel_pytorch::mean_pooling
