// What the host sides of the CUDA kernels share.
#include "kernel_pytorch/ops/quantized_matmul/cuda/host.h"

#include <algorithm>
#include <bit>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/engines/gemm/tile/host.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::quantized_matmul {
namespace {

constexpr const char* kNeeds16Bit = "takes bf16 and fp16";
constexpr const char* kNoMxfp8 = "does not take mxfp8";
constexpr const char* kNoBitStream = "takes codes of 4 and 8 bits";
constexpr const char* kDepth = "needs rows of codes and of x that begin at multiples of 16 bytes";
constexpr const char* kWindows = "needs rows of scales and zeros that begin at multiples of 4 bytes";
constexpr const char* kLarge = "n or k is 2^30 or more";

}  // namespace

const char* cuda_weight_obstacle(const Product& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.x.dtype, device)) return obstacle;
  if (size_of(problem.x.dtype) != 2) return kNeeds16Bit;
  if (problem.format == Format::kMxfp8) return kNoMxfp8;
  if (group_format::is_bit_stream(problem.format)) return kNoBitStream;
  const int64_t k = problem.x.sizes[1];
  const bool is_aligned = k % (16 * group_format::codes_in_byte(problem.format)) == 0 &&
                          reinterpret_cast<uintptr_t>(problem.codes.data) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(problem.scales.data) % 2 == 0 &&
                          vector_access_obstacle(problem.x) == nullptr;
  if (!is_aligned) return kDepth;
  return std::max(k, problem.codes.sizes[0]) >= int64_t{1} << 30 ? kLarge : nullptr;
}

const char* window_obstacle(const Product& problem) {
  const auto has_words = [](const TensorView& view) {
    return !view.is_present() ||
           (view.sizes[1] * size_of(view.dtype) % 4 == 0 && reinterpret_cast<uintptr_t>(view.data) % 4 == 0);
  };
  return has_words(problem.scales) && has_words(problem.zeros) ? nullptr : kWindows;
}

std::string cuda_format_name(Format format) {
  return concat("kernel_pytorch::group_format::Format(", static_cast<int>(format), ")");
}

Arguments cuda_arguments(const Product& problem) {
  Arguments arguments{};
  arguments.tile.a = {.data = problem.x.data, .batch = 0, .outer = problem.x.strides[0], .inner = 1, .pair = 0};
  arguments.tile.m = static_cast<int32_t>(problem.x.sizes[0]);
  arguments.tile.n = static_cast<int32_t>(problem.codes.sizes[0]);
  arguments.tile.k = static_cast<int32_t>(problem.x.sizes[1]);
  arguments.tile.alpha = 1;
  arguments.tile.kind = problem.activation;
  arguments.tile.bias = product::tile_matrix(problem.bias);
  arguments.tile.output = product::tile_matrix(problem.output);
  arguments.weight = {.codes = problem.codes.as<const uint8_t>(),
                      .code_stride = problem.codes.sizes[1],
                      .scales = problem.scales.data,
                      .zeros = problem.zeros.as<const uint8_t>(),
                      .tensor_scale = problem.tensor_scale.as<const float>(),
                      .group = static_cast<int32_t>(problem.group),
                      .groups = static_cast<int32_t>(problem.scales.sizes[1]),
                      .group_shift = std::countr_zero(static_cast<uint64_t>(problem.group)),
                      .scale_piece = 4,
                      .zero_piece = 4};
  return arguments;
}

// Pieces of as many bytes as the address, rows and blocks of k are multiples of.
void set_pieces(const Product& problem, int64_t stage_columns, WeightArguments* weight) {
  const int64_t groups = stage_columns / problem.group;  // 0: less than one
  const auto piece = [&](const TensorView& view) {
    const int64_t bytes = size_of(view.dtype);
    const auto starts = static_cast<uint64_t>(view.sizes[1] * bytes) | static_cast<uint64_t>(groups * bytes) |
                        reinterpret_cast<uint64_t>(view.data) | (groups == 0 ? 4u : 16u);
    return 1 << std::clamp(std::countr_zero(starts), 2, 4);
  };
  weight->scale_piece = piece(problem.scales);
  if (problem.zeros.is_present()) weight->zero_piece = piece(problem.zeros);
}

WalkArguments walk_of(int64_t tiles, int64_t steps, int64_t most_blocks) {
  const int64_t each = divide_up(tiles * steps, most_blocks);
  return {.tiles = static_cast<int32_t>(tiles),
          .steps = static_cast<int32_t>(steps),
          .steps_each = static_cast<int32_t>(each),
          .most = static_cast<int32_t>(divide_up(steps, each) + 1)};
}

TensorView codes_view(const Product& problem) {
  return contiguous_view(problem.codes.data, DType::kInt8, {1, problem.codes.sizes[0], problem.codes.sizes[1]},
                         problem.codes.device);
}

}  // namespace kernel_pytorch::quantized_matmul
