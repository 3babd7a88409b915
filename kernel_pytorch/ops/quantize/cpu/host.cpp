// The host side of the CPU kernel: a task is a tile of 128 x 128. Scales of the tensor and of rows need a visit of
// their own first, whose maxima are kept by tile and joined after it, so that threads do not show.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/quantize/cpu/rows.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::quantize {
namespace {

constexpr const char* kHasProducer = "takes x as it is; what is made of it first is composed's";

registry::Support supports(const Quantize& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  if (has_producer(problem)) return registry::Support::no(kHasProducer);
  return registry::Support::unless(strided_obstacle({&problem.x}));
}

// Eight rows of eight bytes become eight columns: halves, quarters and single bytes change places.
void transpose_bytes(uint64_t (&rows)[8]) {
  const auto exchange = [&](int first, int second, int shift, uint64_t mask) {
    const uint64_t different = ((rows[first] >> shift) ^ rows[second]) & mask;
    rows[second] ^= different;
    rows[first] ^= different << shift;
  };
  for (int i = 0; i < 4; ++i) exchange(i, i + 4, 32, 0x00000000ffffffff);
  for (int i : {0, 1, 4, 5}) exchange(i, i + 2, 16, 0x0000ffff0000ffff);
  for (int i : {0, 2, 4, 6}) exchange(i, i + 1, 8, 0x00ff00ff00ff00ff);
}

struct Tile {
  int64_t row, column, rows, columns;
};

// One tile's codes, [kTile, kTile].
using TileCodes = uint8_t[kTile * kTile];

void raise(std::atomic<uint32_t>& target, uint32_t bits) {
  uint32_t seen = target.load(std::memory_order_relaxed);
  while (seen < bits && !target.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

class Run {
 public:
  Run(const Quantize& problem, Context& context)
      : problem_(problem),
        context_(context),
        kernels_(KP_AT_CPU_LEVEL(context.info->cpu.isa, kRowKernels)[problem.x.dtype == DType::kFloat32    ? 0
                                                                     : problem.x.dtype == DType::kBFloat16 ? 1
                                                                                                           : 2]),
        rows_(problem.x.sizes[0]),
        columns_(problem.x.sizes[1]),
        row_tiles_((rows_ + kTile - 1) / kTile),
        column_tiles_((columns_ + kTile - 1) / kTile),
        rule_(rule_of(problem)),
        format_(format_of(problem)),
        is_e5m2_(code_type_of(problem) == DType::kFloat8E5M2) {}

  void run() {
    const bool measures_first = !problem_.scale.is_present() && (problem_.granularity == Granularity::kTensor ||
                                                                 problem_.granularity == Granularity::kRow);
    if (measures_first) measure_all();
    parallel_for(context_.threads, row_tiles_ * column_tiles_, [&](int64_t task) {
      const Tile tile = tile_of(task);
      float row_inverses[kTile], column_inverses[kTile];
      find_inverses(tile, measures_first, row_inverses, column_inverses);
      cast_tile(tile, row_inverses, column_inverses);
    });
    if (problem_.amax.is_present()) {
      auto& amax = *problem_.amax.as<float>();
      amax = std::max(amax, from_bits(amax_.load()));
    }
    if (problem_.found_nonfinite.is_present() && found_nonfinite_.load()) *problem_.found_nonfinite.as<float>() = 1;
  }

  // The scales of an empty tensor are 1.
  void fill_scales_of_nothing() const {
    for (const TensorView* scales : {&problem_.scales, &problem_.transposed_scales}) {
      if (!scales->is_present()) continue;
      for (int64_t i = 0; i < scales->sizes[0]; ++i) {
        for (int64_t j = 0; j < scales->sizes[1]; ++j) set_scale(*scales, i, j, 1);
      }
    }
  }

 private:
  Tile tile_of(int64_t task) const {
    const int64_t row = task / column_tiles_ * kTile, column = task % column_tiles_ * kTile;
    return {row, column, std::min<int64_t>(kTile, rows_ - row), std::min<int64_t>(kTile, columns_ - column)};
  }
  const char* row_of(const Tile& tile, int64_t i) const {
    const TensorView& x = problem_.x;
    return x.as<const char>() + ((tile.row + i) * x.strides[0] + tile.column) * size_of(x.dtype);
  }
  static void set_scale(const TensorView& scales, int64_t row, int64_t block, float scale) {
    scales.as<float>()[row * scales.strides[0] + block * scales.strides[1]] = scale;
  }

  uint32_t measure_tile(const Tile& tile, uint32_t* row_bits, uint32_t* column_bits) {
    bool found = false;
    uint32_t largest = 0;
    std::fill_n(column_bits, kTile, 0u);
    for (int64_t i = 0; i < tile.rows; ++i) {
      row_bits[i] = kernels_.measure(row_of(tile, i), tile.columns, column_bits, &found);
      largest = std::max(largest, row_bits[i]);
    }
    if (found) found_nonfinite_.store(true, std::memory_order_relaxed);
    raise(amax_, largest);
    return largest;
  }

  // The scales that no tile knows alone.
  void measure_all() {
    const bool by_row = problem_.granularity == Granularity::kRow;
    auto* row_parts = allocate_bits(column_tiles_ * rows_);
    auto* column_parts = allocate_bits(row_tiles_ * columns_);
    parallel_for(context_.threads, row_tiles_ * column_tiles_, [&](int64_t task) {
      const Tile tile = tile_of(task);
      uint32_t row_bits[kTile], column_bits[kTile];
      measure_tile(tile, row_bits, column_bits);
      if (!by_row) return;
      std::copy_n(row_bits, tile.rows, row_parts + tile.column / kTile * rows_ + tile.row);
      std::copy_n(column_bits, tile.columns, column_parts + tile.row / kTile * columns_ + tile.column);
    });
    if (!by_row) {
      set_scale(problem_.scales, 0, 0, scale_of(from_bits(amax_.load()), rule_));
      return;
    }
    join(row_parts, column_tiles_, rows_, problem_.scales);
    if (problem_.transposed_scales.is_present()) {
      join(column_parts, row_tiles_, columns_, problem_.transposed_scales);
    }
  }
  uint32_t* allocate_bits(int64_t count) {
    return static_cast<uint32_t*>(context_.scratch->allocate(static_cast<size_t>(count) * sizeof(uint32_t)));
  }
  void join(const uint32_t* parts, int64_t count, int64_t length, const TensorView& scales) const {
    for (int64_t i = 0; i < length; ++i) {
      uint32_t bits = 0;
      for (int64_t part = 0; part < count; ++part) bits = std::max(bits, parts[part * length + i]);
      set_scale(scales, i, 0, scale_of(from_bits(bits), rule_));
    }
  }

  // One over the scale of each row and of each column of a tile; scales that a tile knows alone are written.
  void find_inverses(const Tile& tile, bool is_measured, float* row_inverses, float* column_inverses) {
    uint32_t row_bits[kTile], column_bits[kTile], largest = 0;
    const bool is_blocked =
        problem_.granularity == Granularity::k1x128 || problem_.granularity == Granularity::k128x128;
    const bool wants_more = problem_.amax.is_present() || problem_.found_nonfinite.is_present();
    if (!is_measured && (is_blocked || wants_more)) largest = measure_tile(tile, row_bits, column_bits);
    const int64_t row_tile = tile.row / kTile, column_tile = tile.column / kTile;
    switch (problem_.granularity) {
      case Granularity::kTensor: {
        const TensorView& scale = problem_.scale.is_present() ? problem_.scale : problem_.scales;
        fill(row_inverses, column_inverses, *scale.as<const float>());
        return;
      }
      case Granularity::k128x128: {
        const float scale = scale_of(from_bits(largest), rule_);
        set_scale(problem_.scales, row_tile, column_tile, scale);
        fill(row_inverses, column_inverses, scale);
        return;
      }
      case Granularity::kRow:
        read_inverses(problem_.scales, tile.row, tile.rows, row_inverses);
        read_inverses(problem_.transposed_scales, tile.column, tile.columns, column_inverses);
        return;
      case Granularity::k1x128:
        write_scales(problem_.scales, tile.row, tile.rows, column_tile, row_bits, row_inverses);
        if (problem_.square_transpose && problem_.transposed_scales.is_present()) {
          const float scale = scale_of(from_bits(largest), rule_);
          set_scale(problem_.transposed_scales, column_tile, row_tile, scale);
          std::fill_n(column_inverses, kTile, 1.0f / scale);
          return;
        }
        write_scales(problem_.transposed_scales, tile.column, tile.columns, row_tile, column_bits, column_inverses);
        return;
    }
  }
  static void fill(float* row_inverses, float* column_inverses, float scale) {
    std::fill_n(row_inverses, kTile, 1.0f / scale);
    std::fill_n(column_inverses, kTile, 1.0f / scale);
  }
  static void read_inverses(const TensorView& scales, int64_t first, int64_t count, float* inverses) {
    if (!scales.is_present()) return;
    for (int64_t i = 0; i < count; ++i) inverses[i] = 1.0f / scales.as<const float>()[(first + i) * scales.strides[0]];
  }
  void write_scales(const TensorView& scales, int64_t first, int64_t count, int64_t block, const uint32_t* bits,
                    float* inverses) const {
    if (!scales.is_present()) return;
    for (int64_t i = 0; i < count; ++i) {
      const float scale = scale_of(from_bits(bits[i]), rule_);
      set_scale(scales, first + i, block, scale);
      inverses[i] = 1.0f / scale;
    }
  }

  // By one inverse, or by those of the columns.
  void cast_row(const Tile& tile, int64_t i, float inverse, const float* inverses, uint8_t* codes) const {
    if (!problem_.seed.is_present()) {
      return kernels_.cast[is_e5m2_](row_of(tile, i), tile.columns, inverse, inverses, codes);
    }
    const auto* seed = problem_.seed.as<const int64_t>();
    for (int64_t j = 0; j < tile.columns; ++j) {
      const auto value = static_cast<float>(load_element(row_of(tile, i), problem_.x.dtype, j));
      const auto place = static_cast<uint64_t>((tile.row + i) * columns_ + tile.column + j);
      const PhiloxBlock block =
          philox(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]), place / kPhiloxElements);
      codes[j] = static_cast<uint8_t>(stochastic_code(value * (inverses == nullptr ? inverse : inverses[j]),
                                                      block.bits(static_cast<int>(place % kPhiloxElements)),
                                                      format_.mantissa_bits, format_.bias, format_.largest_code));
    }
  }

  void cast_tile(const Tile& tile, const float* row_inverses, const float* column_inverses) const {
    const bool has_own = has_transposed_scales(problem_.granularity);
    TileCodes codes;
    for (int64_t i = 0; i < tile.rows; ++i) {
      uint8_t* row = codes + i * kTile;
      if (problem_.codes.is_present()) {
        const TensorView& target = problem_.codes;
        cast_row(tile, i, row_inverses[i], nullptr, row);
        std::memcpy(target.as<uint8_t>() + (tile.row + i) * target.strides[0] + tile.column, row,
                    static_cast<size_t>(tile.columns));
      }
      if (problem_.transposed.is_present() && (has_own || !problem_.codes.is_present())) {
        cast_row(tile, i, row_inverses[i], has_own ? column_inverses : nullptr, row);
      }
    }
    if (problem_.transposed.is_present()) store_transposed(tile, codes);
  }

  void store_transposed(const Tile& tile, const TileCodes& codes) const {
    const TensorView& target = problem_.transposed;
    for (int64_t j = 0; j < tile.columns; j += 8) {
      for (int64_t i = 0; i < tile.rows; i += 8) {
        uint64_t square[8] = {};
        const int64_t rows = std::min<int64_t>(8, tile.rows - i), columns = std::min<int64_t>(8, tile.columns - j);
        for (int64_t k = 0; k < rows; ++k) {
          std::memcpy(&square[k], codes + (i + k) * kTile + j, static_cast<size_t>(columns));
        }
        transpose_bytes(square);
        for (int64_t k = 0; k < columns; ++k) {
          std::memcpy(target.as<uint8_t>() + (tile.column + j + k) * target.strides[0] + tile.row + i, &square[k],
                      static_cast<size_t>(rows));
        }
      }
    }
  }

  const Quantize& problem_;
  Context& context_;
  const RowKernels& kernels_;
  const int64_t rows_, columns_, row_tiles_, column_tiles_;
  const ScaleRule rule_;
  const Format format_;
  const bool is_e5m2_;
  std::atomic<uint32_t> amax_ = 0;
  std::atomic<bool> found_nonfinite_ = false;
};

void run(const Quantize& problem, int, Context& context) {
  Run run(problem, context);
  if (problem.x.element_count() == 0) return run.fill_scales_of_nothing();
  run.run();
}

uint64_t code_version() {
  return hash_text("quantize cpu 2");
}

}  // namespace

constinit const registry::Kernel<Quantize> kCpu{
    .name = "cpu_tiles", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::quantize
