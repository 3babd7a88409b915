// What append knows about the rotation of keys: how wide it is, what is refused, and which row of the tables a token
// takes.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::paged_attention {
namespace {

// As rope has it: all columns, twice the tables' width where that fits, or the width.
int64_t rotary_dim_of(const Append& problem) {
  if (problem.rotary_dim != 0) return problem.rotary_dim;
  const int64_t width = problem.cos.size(-1), size = problem.key.size(-1);
  return width != size && 2 * width <= size ? 2 * width : width;
}

void check_table(const Append& problem, std::string_view name, const TensorView& table, Device device) {
  KP_CHECK(table.device == device, "append_kv: ", name, " is on ", table.device, ", the call runs on ", device,
           "; move all tensors to one device");
  KP_CHECK(table.dtype == problem.key.dtype || table.dtype == DType::kFloat32, "append_kv: ", name, " is ", table.dtype,
           ", key is ", problem.key.dtype, "; it must be ", type_or_wider(problem.key.dtype));
  KP_CHECK(table.rank == 2, "append_kv: ", name, " has shape ", shape_text(table.shape()),
           "; it must be [rows, rotary_dim] or [rows, rotary_dim / 2]");
}

}  // namespace

Rotation rotation_of(const Append& problem) {
  if (!problem.cos.is_present()) return {};
  const int64_t rotary_dim = rotary_dim_of(problem);
  return {rotary_dim / 2, problem.interleaved && problem.cos.size(-1) == rotary_dim ? 2 : 1};
}

void check_rotation(const Append& problem, Device device) {
  const auto given = [](const TensorView& view) { return view.is_present() ? "given" : "absent"; };
  KP_CHECK(problem.cos.is_present() == problem.sin.is_present(), "append_kv: cos is ", given(problem.cos), ", sin is ",
           given(problem.sin), "; they go together");
  if (!problem.cos.is_present()) {
    KP_CHECK(!problem.positions.is_present(), "append_kv: positions without cos and sin; they choose rows of these");
    return;
  }
  check_table(problem, "cos", problem.cos, device);
  check_table(problem, "sin", problem.sin, device);
  KP_CHECK(problem.cos.dtype == problem.sin.dtype && std::ranges::equal(problem.cos.shape(), problem.sin.shape()),
           "append_kv: cos is ", problem.cos, ", sin is ", problem.sin, "; they must have one shape and type");
  const int64_t rotary_dim = rotary_dim_of(problem), width = problem.cos.size(-1), tokens = problem.key.sizes[0];
  KP_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= problem.key.sizes[2], "append_kv: rotary_dim is ",
           rotary_dim, ", key has size ", problem.key.sizes[2], "; it must be even, positive and at most that");
  KP_CHECK(width == rotary_dim || 2 * width == rotary_dim, "append_kv: cos has shape ", shape_text(problem.cos.shape()),
           ", rotary_dim is ", rotary_dim, "; its last dimension must be that or half");
  if (!problem.positions.is_present()) {
    KP_CHECK(problem.cos.size(0) >= tokens, "append_kv: cos has ", problem.cos.size(0), " rows, key has ", tokens,
             " tokens; it must have a row for each, or positions must choose them");
    return;
  }
  const TensorView& positions = problem.positions;
  KP_CHECK(positions.device == device, "append_kv: positions are on ", positions.device, ", the call runs on ", device,
           "; move all tensors to one device");
  KP_CHECK(positions.dtype == DType::kInt32 || positions.dtype == DType::kInt64, "append_kv: positions are ",
           positions.dtype, "; convert them to int64 or int32");
  KP_CHECK(positions.rank == 1 && positions.sizes[0] == tokens && is_contiguous(positions),
           "append_kv: positions have shape ", shape_text(positions.shape()), ", key has ", tokens,
           " tokens; they must be [tokens] and contiguous");
}

int64_t checked_row(const Append& problem, int64_t token) {
  if (!problem.positions.is_present()) return token;
  const int64_t row = index_at(problem.positions.data, problem.positions.dtype == DType::kInt64, token);
  KP_CHECK(row >= 0 && row < problem.cos.size(0), "append_kv: positions[", token, "] is ", row, ", cos has ",
           problem.cos.size(0), " rows; it must be one of them");
  return row;
}

}  // namespace kernel_pytorch::paged_attention
