// The references: one group of four after another.
#include <algorithm>
#include <bit>
#include <cstring>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/sparse_compress/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sparse_compress {
namespace {

// The order of magnitudes, NaN last.
uint32_t magnitude_at(const TensorView& x, int64_t row, int64_t column) {
  const auto value = static_cast<float>(load_element(x.data, x.dtype, row * x.strides[0] + column));
  return std::bit_cast<uint32_t>(value) & 0x7fffffffu;
}

void copy_element(const TensorView& to, int64_t to_place, const TensorView& from, int64_t from_place) {
  const auto bytes = static_cast<int64_t>(size_of(from.dtype));
  std::memcpy(to.as<char>() + to_place * bytes, from.as<const char>() + from_place * bytes, static_cast<size_t>(bytes));
}

void run_compress(const Compress& problem, int, Context& context) {
  const int64_t rows = problem.x.sizes[0], columns = problem.x.sizes[1], words = problem.metadata.sizes[0] * 2;
  auto* metadata = problem.metadata.as<uint32_t>();
  parallel_for(context.threads, rows, [&](int64_t row) {
    for (int64_t word = 0; word < words; ++word) {
      uint32_t bits = 0;
      for (int64_t group = 0; group < kWordColumns / kGroup; ++group) {
        const int64_t first = word * kWordColumns + group * kGroup;
        uint32_t kept[2] = {0, 1};
        if (first < columns) {
          int count = 0;
          for (int64_t i = 0; i < kGroup; ++i) {
            const uint32_t own = magnitude_at(problem.x, row, first + i);
            int larger = 0;
            for (int64_t j = 0; j < kGroup; ++j) {
              const uint32_t other = magnitude_at(problem.x, row, first + j);
              larger += other > own || (other == own && j < i);
            }
            if (larger < 2) kept[count++] = static_cast<uint32_t>(i);
          }
          for (int64_t i = 0; i < 2; ++i) {
            copy_element(problem.values, row * columns / 2 + first / 2 + i, problem.x,
                         row * problem.x.strides[0] + first + kept[i]);
          }
        }
        bits |= (kept[0] | kept[1] << 2) << (4 * group);
      }
      metadata[(word / 2 * rows + row) * 2 + word % 2] = bits;
    }
  });
}

void run_decompress(const Decompress& problem, int, Context& context) {
  const int64_t rows = problem.output.sizes[0], columns = problem.output.sizes[1];
  const auto bytes = static_cast<int64_t>(size_of(problem.output.dtype));
  const auto* metadata = problem.metadata.as<const uint32_t>();
  parallel_for(context.threads, rows, [&](int64_t row) {
    std::memset(problem.output.as<char>() + row * problem.output.strides[0] * bytes, 0,
                static_cast<size_t>(columns * bytes));
    for (int64_t first = 0; first < columns; first += kGroup) {
      const uint32_t word = metadata[(first / kBlockColumns * rows + row) * 2 + first % kBlockColumns / kWordColumns];
      const uint32_t places = word >> (first % kWordColumns);
      for (int64_t i = 0; i < 2; ++i) {
        copy_element(problem.output, row * problem.output.strides[0] + first + (places >> 2 * i & 3), problem.values,
                     row * columns / 2 + first / 2 + i);
      }
    }
  });
}

uint64_t code_version() {
  return hash_text("sparse_compress reference 1");
}

}  // namespace

constinit const registry::Kernel<Compress> kCompressReference{
    .name = "reference", .supports = supports_on_cpu<Compress>, .run = run_compress, .source_hash = code_version};
constinit const registry::Kernel<Decompress> kDecompressReference{
    .name = "reference", .supports = supports_on_cpu<Decompress>, .run = run_decompress, .source_hash = code_version};

}  // namespace kernel_pytorch::sparse_compress
