#include "kernel_pytorch/ops/rope/rope.h"

#include <utility>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/support/argument_check.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::rope {
namespace {

void insert_batch(TensorView& view) {
  for (int i = view.rank; i > 0; --i) view.sizes[i] = view.sizes[i - 1], view.strides[i] = view.strides[i - 1];
  view.sizes[0] = 1;
  view.strides[0] = 0;
  ++view.rank;
}

// As [batch, sequence, heads, head_dim].
void bring_into_order(std::string_view name, TensorView& view, bool heads_first) {
  if (!view.is_present()) return;
  KP_CHECK(view.rank == 3 || view.rank == 4, "rope: ", name, " has shape ", shape_text(view.shape()), "; it must be ",
           heads_first ? "[batch, heads, sequence, head_dim]" : "[batch, sequence, heads, head_dim]",
           ", with or without the batch");
  if (view.rank == 3) insert_batch(view);
  if (!heads_first) return;
  std::swap(view.sizes[1], view.sizes[2]);
  std::swap(view.strides[1], view.strides[2]);
}

Arguments in_order(const Arguments& given) {
  Arguments arguments = given;
  bring_into_order("query", arguments.query, given.heads_first);
  bring_into_order("key", arguments.key, given.heads_first);
  bring_into_order("query_output", arguments.query_output, given.heads_first);
  bring_into_order("key_output", arguments.key_output, given.heads_first);
  TensorView& positions = arguments.positions;
  if (positions.is_present() && positions.rank == 1) insert_batch(positions);
  if (positions.is_present() && positions.rank == 2 && positions.sizes[0] == 1) {
    positions.sizes[0] = arguments.query.sizes[0];
    positions.strides[0] = 0;
  }
  return arguments;
}

void check_heads(const ArgumentCheck& check, std::string_view name, const TensorView& view) {
  const TensorView& query = check.main;
  check.check_device(name, view);
  KP_CHECK(view.dtype == query.dtype, "rope: ", name, " is ", view.dtype, ", query is ", query.dtype,
           "; convert one of them");
  KP_CHECK(view.sizes[0] == query.sizes[0] && view.sizes[1] == query.sizes[1] && view.sizes[3] == query.sizes[3],
           "rope: ", name, " has shape ", shape_text(view.shape()), ", query has ", shape_text(query.shape()),
           "; they may differ in heads alone");
}

void check_output(const ArgumentCheck& check, std::string_view name, const TensorView& output,
                  const TensorView& input) {
  KP_CHECK(output.is_present() == input.is_present(), "rope: ", name, " is ", output.is_present() ? "given" : "missing",
           "; it goes with its input");
  if (!output.is_present()) return;
  check.check_device(name, output);
  KP_CHECK(output.dtype == input.dtype && std::ranges::equal(output.shape(), input.shape()), "rope: ", name, " is ",
           output, ", its input is ", input, "; they must have one shape and type");
  KP_CHECK(output.sizes[3] <= 1 || output.strides[3] == 1, "rope: ", name, " has column stride ", output.strides[3],
           "; it must be 1");
}

// The columns that are rotated, from what the caller said and the width of the table.
int64_t rotary_dim_of(const Arguments& arguments) {
  const int64_t head_dim = arguments.query.is_present() ? arguments.query.size(3) : 0;
  const TensorView& table = arguments.cos.is_present() ? arguments.cos : arguments.inverse_frequencies;
  const int64_t width = table.rank >= 1 ? table.size(-1) : 0;
  int64_t rotary_dim = arguments.rotary_dim;
  if (rotary_dim == 0) {
    rotary_dim = width;
    if (width != head_dim && (2 * width <= head_dim || !arguments.cos.is_present())) rotary_dim = 2 * width;
  }
  return rotary_dim;
}

// Makes a [rows, width] table one of every batch.
void check_table(const ArgumentCheck& check, std::string_view name, TensorView& table, const Problem& problem,
                 bool has_positions) {
  check.check_device(name, table);
  KP_CHECK(table.dtype == check.main.dtype || (table.dtype == DType::kFloat32 && check.main.dtype != DType::kFloat64),
           "rope: ", name, " is ", table.dtype, ", query is ", check.main.dtype, "; it must be ",
           type_or_wider(check.main.dtype));
  KP_CHECK(table.rank == 2 || table.rank == 3, "rope: ", name, " has shape ", shape_text(table.shape()),
           "; it must be [rows, width] or [batch, sequence, width]");
  KP_CHECK(table.size(-1) == problem.pairs() || table.size(-1) == problem.rotary_dim, "rope: ", name, " has shape ",
           shape_text(table.shape()), ", rotary_dim is ", problem.rotary_dim,
           "; its last dimension must be that or half");
  if (table.rank == 3) {
    KP_CHECK(!has_positions, "rope: positions with a ", name, " of shape ", shape_text(table.shape()),
             "; positions choose rows of a [rows, width] table");
    KP_CHECK((table.size(0) == problem.batch() || table.size(0) == 1) && table.size(1) == problem.sequence(),
             "rope: ", name, " has shape ", shape_text(table.shape()), ", query has ",
             shape_text(problem.query.shape()), "; batch and sequence must agree");
    if (table.size(0) == 1) table.strides[0] = 0;
    table.sizes[0] = problem.batch();
    return;
  }
  KP_CHECK(has_positions || table.size(0) >= problem.sequence(), "rope: ", name, " has ", table.size(0),
           " rows, the sequence is ", problem.sequence(), " long; it must have a row for each position");
  table = {.data = table.data,
           .dtype = table.dtype,
           .device = table.device,
           .rank = 3,
           .sizes = {problem.batch(), table.sizes[0], table.sizes[1]},
           .strides = {0, table.strides[0], table.strides[1]}};
}

void check_positions(const ArgumentCheck& check, const TensorView& positions, const Problem& problem) {
  check.check_device("positions", positions);
  KP_CHECK(positions.dtype == DType::kInt64 || positions.dtype == DType::kInt32, "rope: positions is ", positions.dtype,
           "; it must be int64 or int32");
  KP_CHECK(positions.rank == 2 && positions.size(0) == problem.batch() && positions.size(1) == problem.sequence(),
           "rope: positions has shape ", shape_text(positions.shape()), ", query has ",
           shape_text(problem.query.shape()), "; it must be [batch, sequence] (expand it first)");
}

bool same_view(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.strides == b.strides && a.rank == b.rank;
}

void check_sources(const ArgumentCheck& check, Problem& problem) {
  const Problem arguments = problem;
  const bool has_positions = arguments.positions.is_present();
  const TensorView& frequencies = arguments.inverse_frequencies;
  KP_CHECK(arguments.cos.is_present() == arguments.sin.is_present(), "rope: cos is ",
           arguments.cos.is_present() ? "given" : "absent", ", sin is ",
           arguments.sin.is_present() ? "given" : "absent", "; they go together");
  KP_CHECK(arguments.cos.is_present() != frequencies.is_present(),
           "rope: it takes cos and sin, or inverse_frequencies; give one of them");
  if (arguments.cos.is_present()) {
    check_table(check, "cos", problem.cos, problem, has_positions);
    check_table(check, "sin", problem.sin, problem, has_positions);
    KP_CHECK(problem.cos.dtype == problem.sin.dtype && problem.cos.sizes == problem.sin.sizes, "rope: cos is ",
             arguments.cos, ", sin is ", arguments.sin, "; they must have one shape and type");
  } else {
    check.check_device("inverse_frequencies", frequencies);
    const DType wanted = check.main.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    KP_CHECK(frequencies.dtype == wanted && frequencies.rank == 1 && frequencies.size(0) == problem.pairs() &&
                 (problem.pairs() == 1 || frequencies.stride(0) == 1),
             "rope: inverse_frequencies is ", frequencies, ", rotary_dim is ", problem.rotary_dim, "; it must be ",
             wanted, ", contiguous, of half that length");
  }
  if (has_positions) check_positions(check, arguments.positions, problem);
}

}  // namespace

void check(Problem& problem, Device device) {
  const ArgumentCheck check{"rope", "query", problem.query, device};
  check.check_main();
  check_heads(check, "query", problem.query);
  if (problem.key.is_present()) check_heads(check, "key", problem.key);
  const int64_t rotary_dim = problem.rotary_dim, head_dim = problem.head_dim();
  KP_CHECK(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim, "rope: rotary_dim is ", rotary_dim,
           ", head_dim is ", head_dim, "; it must be even, positive and at most that");
  check_sources(check, problem);
  if (problem.in_place) return;
  check_output(check, "query_output", problem.query_output, problem.query);
  check_output(check, "key_output", problem.key_output, problem.key);
}

void rotate(const Arguments& given, Context& context) {
  const Arguments arguments = in_order(given);
  Problem problem{.rotary_dim = rotary_dim_of(arguments),
                  .interleaved = arguments.interleaved,
                  .inverse = arguments.inverse,
                  .in_place = false,
                  .scale = arguments.scale,
                  .query = arguments.query,
                  .key = arguments.key,
                  .cos = arguments.cos,
                  .sin = arguments.sin,
                  .inverse_frequencies = arguments.inverse_frequencies,
                  .positions = arguments.positions,
                  .query_output = arguments.query_output,
                  .key_output = arguments.key_output};
  check(problem, context.device());
  // An empty tensor may share its null address with its output, so that the other one decides.
  const bool has_key = arguments.key.is_present() && arguments.key.element_count() > 0;
  const bool has_query = arguments.query.element_count() > 0;
  const bool is_key_in_place = has_key && same_view(arguments.key, arguments.key_output);
  problem.in_place = has_query ? same_view(arguments.query, arguments.query_output) : is_key_in_place;
  KP_CHECK(!has_key || is_key_in_place == problem.in_place,
           "rope: one output is its input and the other is not; both must be in place or neither");
  if (problem.in_place) problem.query_output = problem.key_output = {};
  registry::run_best(kRotate, problem, context);
}

void rotate_back(const Arguments& arguments, Context& context) {
  Arguments back = arguments;
  back.inverse = true;
  rotate(back, context);
}

}  // namespace kernel_pytorch::rope
