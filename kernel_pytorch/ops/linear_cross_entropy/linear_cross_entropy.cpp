#include "kernel_pytorch/ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/ops/matmul/matmul.h"
#include "kernel_pytorch/ops/mean_pooling/mean_pooling.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::linear_cross_entropy {
namespace {

constexpr int64_t kTileRows = 128;  // of a GPU's product

TensorView transposed(TensorView view) {
  std::swap(view.sizes[0], view.sizes[1]);
  std::swap(view.strides[0], view.strides[1]);
  return view;
}

TensorView rows_from(TensorView view, int64_t first, int64_t count) {
  view.data = static_cast<char*>(view.data) + first * view.strides[0] * size_of(view.dtype);
  view.sizes[0] = count;
  return view;
}

TensorView scratch(Context& context, DType dtype, std::initializer_list<int64_t> sizes) {
  TensorView view = contiguous_view(nullptr, dtype, sizes, context.device());
  view.data = context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(view.byte_count(), 1)));
  return view;
}

// Scratch memory of one step after the other: what a product took, the next one may have.
class ReusedScratch final : public Scratch {
 public:
  explicit ReusedScratch(Scratch& parent) : parent_(parent) {}
  void* allocate(size_t bytes) override {
    for (Block& block : blocks_) {
      if (block.is_used || block.bytes < bytes) continue;
      block.is_used = true;
      return block.data;
    }
    blocks_.push_back({parent_.allocate(bytes), bytes, true});
    return blocks_.back().data;
  }
  void enter_call() override { ++depth_; }
  void leave_call() noexcept override {
    if (--depth_ > 0) return;
    for (Block& block : blocks_) block.is_used = false;
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
    bool is_used;
  };
  Scratch& parent_;
  std::vector<Block> blocks_;
  int depth_ = 0;
};

// As [rows, size]; a row alone is one of them.
void merge_rows(TensorView& view) {
  if (!view.is_present()) return;
  if (view.rank == 1) {
    view = {.data = view.data,
            .dtype = view.dtype,
            .device = view.device,
            .rank = 2,
            .sizes = {1, view.sizes[0]},
            .strides = {view.sizes[0], view.strides[0]}};
  }
  TensorView* views[] = {&view};
  merge_leading_dimensions(views);
}

void check(const Forward& arguments) {
  constexpr std::string_view kOp = "linear_cross_entropy";
  const TensorView &hidden = arguments.hidden, &weight = arguments.weight;
  KP_CHECK(hidden.rank == 2 && weight.rank == 2 && hidden.sizes[1] == weight.sizes[1], kOp, ": hidden is ", hidden,
           ", weight is ", weight, "; they must be [rows, size] and [classes, size]");
  KP_CHECK(arguments.target.rank == 1 && arguments.target.sizes[0] == hidden.sizes[0], kOp, ": target is ",
           arguments.target, "; it must have one element for each of the ", hidden.sizes[0], " rows of hidden");
  KP_CHECK(hidden.sizes[0] > 0, kOp, ": hidden has no rows, of which there is no mean");
  KP_CHECK(arguments.chunk_bytes > 0, kOp, ": chunk_bytes is ", arguments.chunk_bytes, "; it must be positive");
}

}  // namespace

int64_t rows_per_chunk(int64_t rows, int64_t classes, DType dtype, int64_t chunk_bytes) {
  const int64_t most = std::max<int64_t>(chunk_bytes / std::max<int64_t>(classes * size_of(dtype), 1), 1);
  if (rows <= most) return rows;
  const int64_t whole = most >= kTileRows ? most / kTileRows * kTileRows : most;
  const int64_t each = (rows + (rows + whole - 1) / whole - 1) / ((rows + whole - 1) / whole);
  return std::min(whole, most >= kTileRows ? (each + kTileRows - 1) / kTileRows * kTileRows : each);
}

void forward(const Forward& given, Context& caller) {
  Forward arguments = given;
  KP_CHECK(given.hidden.rank >= 1, "linear_cross_entropy: hidden has no dimensions; it is [..., size]");
  merge_rows(arguments.hidden);
  merge_rows(arguments.grad_hidden);
  check(arguments);
  const ScratchScope scope(caller.scratch);
  ReusedScratch reused(*caller.scratch);
  Context context = caller;
  context.scratch = &reused;
  const TensorView& weight = arguments.weight;
  const int64_t rows = arguments.hidden.sizes[0], classes = weight.sizes[0];
  const DType type = arguments.hidden.dtype, wide = type == DType::kFloat64 ? type : DType::kFloat32;
  const bool wants_gradient = arguments.grad_hidden.is_present() || arguments.grad_weight.is_present();
  const int64_t chunk = rows_per_chunk(rows, classes, type, arguments.chunk_bytes);
  const TensorView losses = scratch(caller, wide, {rows}), all_logits = scratch(caller, type, {chunk, classes});
  const double share =
      1.0 / static_cast<double>(rows);  // in the products, so that 16-bit gradients of logits do not vanish
  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = std::min(chunk, rows - row);
    const TensorView hidden = rows_from(arguments.hidden, row, count), logits = rows_from(all_logits, 0, count);
    matmul::multiply({.a = hidden, .b = transposed(weight), .output = logits}, context);
    cross_entropy::forward({.logits = logits,
                            .target = rows_from(arguments.target, row, count),
                            .weight = arguments.class_weight,
                            .options = arguments.options,
                            .reduction = cross_entropy::Reduction::kNone,
                            .loss = rows_from(losses, row, count),
                            .grad_logits = wants_gradient ? logits : TensorView{}},
                           context);
    if (arguments.grad_hidden.is_present()) {
      matmul::multiply(
          {.a = logits, .b = weight, .alpha = share, .output = rows_from(arguments.grad_hidden, row, count)}, context);
    }
    if (!arguments.grad_weight.is_present()) continue;
    matmul::multiply({.a = transposed(logits),
                      .b = hidden,
                      .alpha = share,
                      .residual = row == 0 ? TensorView{} : arguments.grad_weight,
                      .output = arguments.grad_weight},
                     context);
  }
  TensorView as_batch = losses;
  as_batch.rank = 3;
  as_batch.sizes = {1, rows, 1};
  as_batch.strides = {rows, 1, 1};
  const TensorView mean = contiguous_view(arguments.loss.data, wide, {1, 1}, arguments.loss.device);
  mean_pooling::forward({.x = as_batch, .output = mean}, context);
}

constexpr auto kDeclarations = registry::join(
    registry::plain<Forward, forward>("linear_cross_entropy", kForwardFields, {.without = "grad_hidden grad_weight"}),
    registry::plain<Forward, forward>("linear_cross_entropy_forward", kForwardFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations};

}  // namespace kernel_pytorch::linear_cross_entropy
