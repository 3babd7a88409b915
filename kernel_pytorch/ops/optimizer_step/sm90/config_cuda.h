// Numbers of the sm90 step, and how a chunk lies in a stage of shared memory, for host and device.
#pragma once

#include "kernel_pytorch/ops/optimizer_step/cuda/arguments_cuda.h"

namespace kernel_pytorch::optimizer_step::sm90 {

struct Config {
  int units = 1;        // of a thread in a chunk
  int stages = 4;       // chunks of a block in shared memory
  int blocks = 3;       // resident per multiprocessor
  bool sweeps = false;  // blocks take turns along the list, instead of a stretch each
};

// Offsets and sizes in bytes; what a step does not have is empty.
struct ChunkLayout {
  int elements = 0;
  int parameter = 0, gradient = 0, weight_bits = 0, first = 0, second = 0, first_scale = 0, second_scale = 0;
  int read_bytes = 0;
  int bytes = 0;
};
constexpr ChunkLayout chunk_layout(Storage storage, WeightBits weight_bits, int parameter_bytes, int state_bytes,
                                   bool has_second, int units) {
  ChunkLayout layout;
  layout.elements = kThreads * units * unit_elements(storage, parameter_bytes, state_bytes);
  const auto take = [&](int& offset, int bytes) {
    offset = layout.bytes;
    layout.bytes += (bytes + 127) / 128 * 128;
    layout.read_bytes += bytes;
  };
  const int n = layout.elements;
  take(layout.parameter, n * parameter_bytes);
  if (weight_bits == WeightBits::kMaster) layout.read_bytes = 0;  // the parameter is only written
  take(layout.gradient, n * parameter_bytes);
  if (weight_bits != WeightBits::kNone) take(layout.weight_bits, weight_bits == WeightBits::kMaster ? 4 * n : n);
  take(layout.first, n * state_bytes);
  if (has_second) take(layout.second, n * state_bytes);
  if (storage != Storage::kPlain) {
    const int scale_bytes = n / group_elements(storage) * 4;
    take(layout.first_scale, scale_bytes);
    if (has_second) take(layout.second_scale, scale_bytes);
  }
  return layout;
}

// Of a block: its ring, and what else it keeps, rounded up.
constexpr int shared_bytes(const ChunkLayout& layout, Storage storage, const Config& config) {
  const int tables =
      storage == Storage::kDynamic ? static_cast<int>(sizeof(DynamicMap<true>) + sizeof(DynamicMap<false>)) : 1024;
  return layout.bytes * config.stages + 128 * config.stages + tables + 256;
}

}  // namespace kernel_pytorch::optimizer_step::sm90
