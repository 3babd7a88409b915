// The host side of the CPU kernels: rows over the threads, each in parts that stay in the first cache as floats.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/group_quantize/cpu/rows.h"
#include "kernel_pytorch/ops/group_quantize/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/group_format/check.h"

namespace kernel_pytorch::group_quantize {
namespace {

using group_format::code_bytes;

float tensor_scale_of(const TensorView& tensor_scale) {
  return tensor_scale.is_present() ? *tensor_scale.as<const float>() : 1;
}
template <class T>
T* place_of(const TensorView& view, int64_t index) {
  return view.is_present() ? reinterpret_cast<T*>(view.as<char>() + index * size_of(view.dtype)) : nullptr;
}

// What holds for a part of a row: where its codes, scales and values begin.
template <class Run>
void over_parts(Context& context, int64_t rows, int64_t columns, const Run& run) {
  const int64_t rows_each = std::max<int64_t>(1, kTaskBytes / 4 / std::max<int64_t>(columns, 1));
  parallel_for(context.threads, (rows + rows_each - 1) / rows_each, [&](int64_t task) {
    for (int64_t row = task * rows_each; row < std::min(rows, (task + 1) * rows_each); ++row) {
      for (int64_t first = 0; first < columns; first += kPartColumns) {
        run(row, first, std::min(kPartColumns, columns - first));
      }
    }
  });
}

void run_quantize(const Quantize& problem, int, Context& context) {
  const GroupKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kGroupKernels);
  const bool is_integer = group_format::is_integer(problem.format);
  const int type = cpu_type_index(problem.x.dtype);
  const auto quantize = kernels.quantize[static_cast<int>(problem.format)][problem.seed.is_present()];
  const float tensor_scale = tensor_scale_of(problem.tensor_scale);
  const int64_t columns = problem.x.sizes[1];
  over_parts(context, problem.x.sizes[0], columns, [&](int64_t row, int64_t first, int64_t count) {
    alignas(64) float values[kPartColumns], scales[kPartGroups];
    kernels.load[type](place_of<void>(problem.x, row * problem.x.strides[0] + first), count, values);
    const int64_t group = row * problem.scales.sizes[1] + first / problem.group;
    quantize(
        {.values = values,
         .count = count,
         .group = problem.group,
         .scale_type = group_format::scale_type_of(problem.scales.dtype),
         .tensor_scale = tensor_scale,
         .seed = place_of<const int64_t>(problem.seed, 0),
         .first_element = row * columns + first,
         .codes = place_of<uint8_t>(problem.codes, row * problem.codes.sizes[1] + code_bytes(problem.format, first)),
         .scale_bytes = place_of<uint8_t>(problem.scales, group),
         .scales = scales,
         .zeros = place_of<uint8_t>(problem.zeros, group)});
    if (!is_integer) return;
    const int64_t groups = (count + problem.group - 1) / problem.group;
    kernels.store[type](scales, groups, place_of<void>(problem.scales, group));
  });
}

void run_dequantize(const Dequantize& problem, int, Context& context) {
  const GroupKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kGroupKernels);
  const bool is_integer = group_format::is_integer(problem.format);
  const bool is_e4m3 = problem.output.dtype == DType::kFloat8E4M3;
  const int type = is_e4m3 ? 3 : cpu_type_index(problem.output.dtype);
  const auto dequantize = kernels.dequantize[static_cast<int>(problem.format)];
  const float tensor_scale = tensor_scale_of(problem.tensor_scale);
  over_parts(context, problem.output.sizes[0], problem.output.sizes[1], [&](int64_t row, int64_t first, int64_t count) {
    alignas(64) float values[kPartColumns], scales[kPartGroups];
    const int64_t group = row * problem.scales.sizes[1] + first / problem.group;
    if (is_integer) {
      const int64_t groups = (count + problem.group - 1) / problem.group;
      kernels.load[cpu_type_index(problem.scales.dtype)](place_of<void>(problem.scales, group), groups, scales);
    }
    dequantize({.codes = place_of<const uint8_t>(problem.codes,
                                                 row * problem.codes.sizes[1] + code_bytes(problem.format, first)),
                .count = count,
                .group = problem.group,
                .scale_bytes = place_of<const uint8_t>(problem.scales, group),
                .scales = scales,
                .zeros = place_of<const uint8_t>(problem.zeros, group),
                .tensor_scale = tensor_scale,
                .values = values});
    kernels.store[type](values, count, place_of<void>(problem.output, row * problem.output.strides[0] + first));
  });
}

uint64_t code_version() {
  return hash_text("group_quantize cpu 4");
}

}  // namespace

constinit const registry::Kernel<Quantize> kQuantizeCpu{
    .name = "cpu", .supports = supports_on_cpu<Quantize>, .run = run_quantize, .source_hash = code_version};
constinit const registry::Kernel<Dequantize> kDequantizeCpu{
    .name = "cpu", .supports = supports_on_cpu<Dequantize>, .run = run_dequantize, .source_hash = code_version};

}  // namespace kernel_pytorch::group_quantize
