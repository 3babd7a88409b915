// The host side of the CPU kernels: tiles over the threads.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/gradient_code/cpu/tiles.h"
#include "kernel_pytorch/ops/gradient_code/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::gradient_code {
namespace {

constexpr int64_t kTaskTiles = 128;

template <class Run>
void over_tiles(Context& context, int64_t tiles, const Run& run) {
  parallel_for(context.threads, (tiles + kTaskTiles - 1) / kTaskTiles, [&](int64_t task) {
    for (int64_t tile = task * kTaskTiles; tile < std::min(tiles, (task + 1) * kTaskTiles); ++tile) run(tile);
  });
}

template <class T>
T* place_of(const TensorView& view, int64_t index) {
  return view.is_present() ? reinterpret_cast<T*>(view.as<char>() + index * size_of(view.dtype)) : nullptr;
}

// All tiles of the message are written, also those beyond the numbers.
void run_encode(const Encode& problem, int, Context& context) {
  const CodeKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kCodeKernels);
  const auto encode = kernels.encode[cpu_type_index(problem.x.dtype)][static_cast<int>(problem.code)];
  const int64_t count = problem.x.sizes[0], tiles_of_row = columns_of(problem.scales, problem.code) / kTile;
  const int64_t code_bytes = kTile * bits_of(problem.code) / 8, blocks = kTile / block_elements(problem.code);
  over_tiles(context, problem.codes.sizes[0] * tiles_of_row, [&](int64_t tile) {
    const int64_t row = tile / tiles_of_row, column = tile % tiles_of_row;
    const int64_t first = std::min(tile * kTile, count);
    encode({.x = place_of<const void>(problem.x, first),
            .error = place_of<float>(problem.error, first),
            .count = std::min<int64_t>(count - first, kTile),
            .codes = place_of<uint8_t>(problem.codes, row * problem.codes.strides[0] + column * code_bytes),
            .scales = place_of<float>(problem.scales, row * problem.scales.strides[0] + column * blocks),
            .carries = problem.carries,
            .gain = static_cast<float>(problem.gain)});
  });
}

void run_decode(const Decode& problem, int, Context& context) {
  const CodeKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kCodeKernels);
  const auto decode = kernels.decode[cpu_type_index(problem.output.dtype)][static_cast<int>(problem.code)];
  const int64_t count = problem.output.sizes[0], tiles_of_row = columns_of(problem.scales, problem.code) / kTile;
  const int64_t code_bytes = kTile * bits_of(problem.code) / 8, blocks = kTile / block_elements(problem.code);
  over_tiles(context, tiles_of(count), [&](int64_t tile) {
    const int64_t row = tile / tiles_of_row, column = tile % tiles_of_row;  // of a mean row 0
    decode({.codes = place_of<const uint8_t>(problem.codes, row * problem.codes.strides[0] + column * code_bytes),
            .scales = place_of<const float>(problem.scales, row * problem.scales.strides[0] + column * blocks),
            .code_stride = problem.codes.strides[0],
            .scale_stride = problem.scales.strides[0],
            .rows = problem.mean ? problem.codes.sizes[0] : 1,
            .output = place_of<void>(problem.output, tile * kTile),
            .count = std::min<int64_t>(count - tile * kTile, kTile),
            .is_mean = problem.mean,
            .adds = problem.adds});
  });
}

uint64_t code_version() {
  return hash_text("gradient_code cpu 1");
}

}  // namespace

constinit const registry::Kernel<Encode> kEncodeCpu{
    .name = "cpu", .supports = supports_on_cpu<Encode>, .run = run_encode, .source_hash = code_version};
constinit const registry::Kernel<Decode> kDecodeCpu{
    .name = "cpu", .supports = supports_on_cpu<Decode>, .run = run_decode, .source_hash = code_version};

}  // namespace kernel_pytorch::gradient_code
