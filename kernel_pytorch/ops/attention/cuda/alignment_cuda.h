// Where queries stand among the keys, for host and device.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::attention {

// The place of query 0 among the keys of its sequence, where causal_offset is not given. `length` of the keys are real,
// 0 <= length <= keys; those behind them are padding. A cache that is longer than what it holds (length >= queries) is
// aligned at its last real key. Padding behind queries and keys alike moves nothing: the offset is not below that of
// the unpadded sequence, or 0, whichever is less. Without padding it is keys - queries, aligned bottom-right.
template <class Int>
KP_SHARED_CODE constexpr Int aligned_offset(Int queries, Int keys, Int length) {
  const Int unpadded = keys - queries, lowest = unpadded < 0 ? unpadded : 0;
  return length - queries > lowest ? length - queries : lowest;
}

}  // namespace kernel_pytorch::attention
