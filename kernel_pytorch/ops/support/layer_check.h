// What linear layers check: a weight that fits its input, and tensors with the input's leading dimensions, which merge
// into rows.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

inline void check_layer(std::string_view op, const TensorView& x, const TensorView& weight, bool gated) {
  KP_CHECK(weight.rank == 2, op, ": weight has shape ", shape_text(weight.shape()), "; it must be [out, in]");
  KP_CHECK(x.rank >= 1 && x.size(-1) == weight.sizes[1], op, ": x has shape ", shape_text(x.shape()), ", weight has ",
           shape_text(weight.shape()), "; their last sizes must be equal");
  KP_CHECK(!gated || weight.sizes[0] % 2 == 0, op, ": weight has shape ", shape_text(weight.shape()),
           "; a gated layer's rows are pairs");
}

// Leading dimensions are x's: equal numbers of rows are not enough, [1, n] is no [n].
inline void check_rows(std::string_view op, std::string_view name, const TensorView& view, const TensorView& x,
                       int64_t columns) {
  const auto leading = x.shape().first(static_cast<size_t>(x.rank) - 1);
  const bool fits = view.rank == x.rank && view.size(-1) == columns &&
                    std::ranges::equal(view.shape().first(leading.size()), leading);
  if (fits) return;
  std::vector<int64_t> wanted(leading.begin(), leading.end());
  wanted.push_back(columns);
  fail(ErrorCode::kInvalidArgument, op, ": ", name, " has shape ", shape_text(view.shape()), "; it must be ",
       shape_text(wanted));
}

// [rows, columns] of [..., columns]; an absent view stays.
inline void merge_rows(std::string_view op, std::string_view name, TensorView& view) {
  if (!view.is_present() || view.rank == 2) return;
  TensorView* views[] = {&view};
  merge_leading_dimensions(views);
  KP_CHECK(view.rank == 2, op, ": ", name, " is ", view,
           ", whose leading dimensions do not merge into rows; make it contiguous");
}

}  // namespace kernel_pytorch
