#include "kernel_pytorch/ops/support/packed_offsets.h"

#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/rehearsal.h"

namespace kernel_pytorch {
namespace {

template <class Int>
void check_values(const PackedOffsets& packed, const Int* offsets) {
  const int64_t sequences = packed.offsets.sizes[0] - 1;
  KP_CHECK(!packed.begins_with_zero || offsets[0] == 0, packed.op, ": ", packed.name, " begins with ", offsets[0],
           "; it must begin with 0");
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t begin = offsets[i], end = offsets[i + 1];
    KP_CHECK(begin >= 0 && begin <= end && end <= packed.tokens, packed.op, ": ", packed.name, " ", i, " and ", i + 1,
             " are ", begin, " and ", end, ", ", packed.tensor, " has ", packed.tokens,
             " tokens; they must ascend from 0 to at most that");
    KP_CHECK(!packed.longest.has_value() || end - begin <= *packed.longest, packed.op, ": sequence ", i, " of ",
             packed.name, " has ", end - begin, " tokens, ", packed.longest_name, " is ", packed.longest.value_or(0),
             "; give the length of the longest sequence, or more");
  }
}

template <class Int>
void check_on(const PackedOffsets& packed, const Context& context) {
  const TensorView& offsets = packed.offsets;
  if (Rehearsal::is_running()) return;
  if (context.device().kind == DeviceKind::kCpu) return check_values(packed, offsets.as<const Int>());
  if (!options().check_values || cuda_device::is_capturing(context.stream)) return;
  std::vector<Int> values(static_cast<size_t>(offsets.element_count()));
  const int device = context.device().index;
  cuda_device::copy_to_host(device, values.data(), offsets.data, values.size() * sizeof(Int), context.stream);
  cuda_device::synchronize(device, context.stream);
  check_values(packed, values.data());
}

}  // namespace

void check_offset_values(const PackedOffsets& packed, const Context& context) {
  if (packed.offsets.dtype == DType::kInt64) return check_on<int64_t>(packed, context);
  check_on<int32_t>(packed, context);
}

}  // namespace kernel_pytorch
