#include "kernel_pytorch/ops/norm_rope/norm_rope.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/norm_rope/operation.h"
#include "kernel_pytorch/ops/rms_norm/rms_norm.h"
#include "kernel_pytorch/ops/rope/rope.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/registry/choose.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::norm_rope {
namespace {

constexpr std::string_view kName = "norm_rope";

template <class Problem>
void check_table(const ArgumentCheck& check, std::string_view name, const TensorView& table, const Problem& problem) {
  KP_CHECK(table.is_present(), kName, ": ", name, " is missing");
  check.check_device(name, table);
  KP_CHECK(table.dtype == check.main.dtype || (table.dtype == DType::kFloat32 && check.main.dtype != DType::kFloat64),
           kName, ": ", name, " is ", table.dtype, ", x is ", check.main.dtype, "; it must be ",
           type_or_wider(check.main.dtype));
  const int64_t batch = problem.x.sizes[0], sequence = problem.x.sizes[sequence_dimension(problem)];
  const bool by_batch = table.rank == 3 && (table.sizes[0] == batch || table.sizes[0] == 1);
  const bool has_rows = table.rank >= 2 && (by_batch ? table.size(-2) == sequence : table.size(-2) >= sequence);
  KP_CHECK((table.rank == 2 || by_batch) && has_rows &&
               (table.size(-1) == problem.rotary_dim || 2 * table.size(-1) == problem.rotary_dim),
           kName, ": ", name, " has shape ", shape_text(table.shape()), "; with a sequence of ", sequence,
           " and rotary_dim ", problem.rotary_dim,
           " it must be [rows, width] or [batch or 1, sequence, width], the width being that or half of it");
}

template <class Problem>
void check_common(Problem& problem, Device device) {
  const ArgumentCheck check{kName, "x", problem.x, device};
  check.check_main();
  KP_CHECK(problem.x.rank == 4, kName, ": x has shape ", shape_text(problem.x.shape()), "; it must be ",
           problem.heads_first ? "[batch, heads, sequence, head_dim]" : "[batch, sequence, heads, head_dim]");
  const int64_t head_dim = problem.x.sizes[3];
  if (problem.rotary_dim == 0) problem.rotary_dim = head_dim;
  KP_CHECK(problem.rotary_dim >= 0 && problem.rotary_dim % 2 == 0 && problem.rotary_dim <= head_dim, kName,
           ": rotary_dim is ", problem.rotary_dim, ", head_dim is ", head_dim,
           "; it must be even, positive and at most that");
  KP_CHECK(problem.eps >= 0, kName, ": eps is ", problem.eps, "; it must not be negative");
  check.check_columns("weight", problem.weight);
  check_table(check, "cos", problem.cos, problem);
  check_table(check, "sin", problem.sin, problem);
  KP_CHECK(problem.cos.dtype == problem.sin.dtype && problem.cos.size(-1) == problem.sin.size(-1), kName, ": cos is ",
           problem.cos, ", sin is ", problem.sin, "; they must have one width and type");
}

TensorView scratch_like(const TensorView& like, Context& context) {
  TensorView view = contiguous_view(nullptr, like.dtype, like.shape(), context.device());
  view.data = context.scratch->allocate(static_cast<size_t>(view.byte_count()));
  return view;
}

template <class Problem>
rope::Arguments rotation(const Problem& problem, const TensorView& from, const TensorView& to, bool inverse) {
  return {.query = from,
          .cos = problem.cos,
          .sin = problem.sin,
          .rotary_dim = problem.rotary_dim,
          .heads_first = problem.heads_first,
          .inverse = inverse,
          .query_output = to};
}

}  // namespace

void check(Forward& problem, Device device) {
  check_common(problem, device);
  const ArgumentCheck check{kName, "x", problem.x, device};
  KP_CHECK(problem.output.is_present(), kName, ": output is missing");
  check.check_output("output", problem.output);
}

void check(Backward& problem, Device device) {
  check_common(problem, device);
  const ArgumentCheck check{kName, "x", problem.x, device};
  KP_CHECK(problem.grad_output.is_present(), kName, ": grad_output is missing");
  check.check_like("grad_output", problem.grad_output);
  check.check_output("grad_x", problem.grad_x);
  check.check_columns("grad_weight", problem.grad_weight);
  check.check_same_type("grad_weight", problem.grad_weight, "weight", problem.weight);
}

void compose(const Forward& problem, Context& context) {
  rms_norm::forward({.x = problem.x,
                     .weight = problem.weight,
                     .eps = problem.eps,
                     .weight_offset = problem.weight_offset,
                     .output = problem.output},
                    context);
  if (problem.rotary_dim > 0) rope::rotate(rotation(problem, problem.output, problem.output, false), context);
}

void compose(const Backward& problem, Context& context) {
  TensorView gradient = problem.grad_output;
  if (problem.rotary_dim > 0) {
    gradient = scratch_like(problem.x, context);
    rope::rotate(rotation(problem, problem.grad_output, gradient, true), context);
  }
  const DType statistic = problem.x.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const int64_t rows = rows_of(problem.x);
  TensorView rstd = contiguous_view(nullptr, statistic, {rows}, context.device());
  rstd.data = context.scratch->allocate(static_cast<size_t>(rstd.byte_count()));
  rms_norm::forward({.x = problem.x, .eps = problem.eps, .output = scratch_like(problem.x, context), .rstd = rstd},
                    context);
  rms_norm::backward({.grad_output = gradient,
                      .value = problem.x,
                      .weight = problem.weight,
                      .rstd = rstd,
                      .weight_offset = problem.weight_offset,
                      .grad_input = problem.grad_x,
                      .grad_weight = problem.grad_weight},
                     context);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("norm_rope", "norm_rope_forward", kForwardFields),
                   registry::plain<Backward, backward>("norm_rope_backward", kBackwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward>};

}  // namespace kernel_pytorch::norm_rope
