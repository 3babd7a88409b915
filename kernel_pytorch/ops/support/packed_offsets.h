// The offsets of packed sequences (cu_seqlens): their values, checked if the host may read them.
#pragma once

#include <optional>
#include <string_view>

#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch {

struct PackedOffsets {
  std::string_view op, name;         // "attention", "cu_seqlens_q"
  const TensorView& offsets;         // int32 or int64 [sequences + 1], contiguous
  std::string_view tensor;           // which they cut: "query"
  int64_t tokens = 0;                // of it
  bool begins_with_zero = false;     // every token up to the last offset belongs to a sequence
  std::optional<int64_t> longest{};  // no sequence may have more tokens
  std::string_view longest_name{};   // "max_seqlen_q"
};

// Offsets ascend from 0 to at most `tokens`. On the CPU they are read at every call; on a GPU only with
// KERNEL_PYTORCH_CHECK=1, since reading them waits for the device, and never while the stream is captured.
void check_offset_values(const PackedOffsets& packed, const Context& context);

}  // namespace kernel_pytorch
