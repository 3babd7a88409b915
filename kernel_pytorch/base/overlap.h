// Whether views share memory, exactly: slices that interleave (the queries and keys of one packed tensor) do not.
// What writes into an argument asks, since a kernel may read what another thread has written already.
//
// Contiguous views cost a comparison. Otherwise the strides are searched for two indices of one address. The search is
// bounded: strides that only as_strided creates may count as overlapping although they do not.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch {

// Whether two elements of the view have one address, as in an expanded tensor.
KP_EXPORT bool overlaps_itself(const TensorView& view);

// Whether an element of one and an element of the other share a byte. Absent and empty views share nothing.
KP_EXPORT bool overlap(const TensorView& first, const TensorView& second);

}  // namespace kernel_pytorch
