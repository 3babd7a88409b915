// Packs keys and values for the products: rows to fp32 panels, straight or transposed, zeros behind the last; and adds
// up panels of gradients to rows. With the table of the level's kernels.
#include "kernel_pytorch/ops/attention/cpu/tiles.h"

namespace kernel_pytorch::attention::KP_ISA_NAMESPACE {
namespace {

// A square of kLanes rows and columns.
template <class T>
KP_PRIMITIVE void transpose_square(const T* from, int64_t row_stride, int64_t rows, int64_t columns, float* to,
                                   int64_t stride) {
  Vec square[kLanes];
  if (rows >= kLanes && columns >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = cpu::load(from + i * row_stride);
  } else {
    const int64_t lanes = smaller(columns, kLanes);
    for (int i = 0; i < kLanes; ++i) square[i] = i < rows ? cpu::load_partial(from + i * row_stride, lanes) : Vec{};
  }
  cpu::transpose(square);
  for (int i = 0; i < smaller(columns, kLanes); ++i) cpu::store(to + i * stride, square[i]);
}

template <class T>
void transpose_rows(const PackTask& task) {
  const T* from = static_cast<const T*>(task.rows.data);
  for (int64_t row = task.begin; row < task.end; row += kLanes) {
    float* panel = task.to + row / kTileColumns * task.size * kTileColumns + row % kTileColumns;
    for (int64_t column = 0; column < task.size; column += kLanes) {
      transpose_square(from + row * task.rows.row_stride + column, task.rows.row_stride, task.end - row,
                       task.size - column, panel + column * kTileColumns, kTileColumns);
    }
  }
  // The last panel is whole, so that products need not ask.
  for (int64_t row = round_up(task.end, kLanes); row < round_up(task.end, kTileColumns); row += kLanes) {
    float* panel = task.to + row / kTileColumns * task.size * kTileColumns + row % kTileColumns;
    for (int64_t i = 0; i < task.size; ++i) cpu::store(panel + i * kTileColumns, Vec{});
  }
}

}  // namespace

void pack_transposed(const PackTask& task) {
  with_type(task.dtype, [&](auto type) { transpose_rows<decltype(type)>(task); });
}

void pack_rows(const PackTask& task) {
  with_type(task.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t column = 0; column < task.size; column += kTileColumns) {
      const HeadRows rows{static_cast<const T*>(task.rows.data) + column, task.rows.row_stride};
      float* panel = task.to + column * task.padded_rows + task.begin * kTileColumns;
      copy_rows<T>(rows, task.begin, task.end - task.begin, task.end - task.begin,
                   smaller(kTileColumns, task.size - column), 1.0f, panel, kTileColumns);
    }
  });
}

static void write_gradient(const GradientTask& task) {
  with_type(task.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t row = task.begin; row < task.end; ++row) {
      T* to = static_cast<T*>(task.to) + row * task.row_stride;
      const int64_t parts = row < task.rows_that_count ? task.part_count : 0;
      cpu::for_columns<float>(task.size, [&](int64_t j, auto lanes) {
        const int64_t panel = round_down(j, kTileColumns);
        const float* from = task.parts + panel * task.part_rows + row * kTileColumns + j - panel;
        Vec sum{};
        for (int64_t part = 0; part < parts; ++part) sum += cpu::load(from + part * task.part_stride);
        sum *= task.factor;
        if (task.accumulate) sum += cpu::load(to + j, lanes);
        cpu::store(to + j, sum, lanes);
      });
    }
  });
}

static int64_t transposed_floats(int64_t size) {
  return size;
}
static int64_t row_floats(int64_t size) {
  return round_up(size, kTileColumns);
}

extern const TileKernels kTileKernels = {
    .query_tile = kQueryTile,
    .backward_query_tile = kQueryTile,
    .key_alignment = kTileColumns,
    .transposed_floats = transposed_floats,
    .row_floats = row_floats,
    .gradient_floats = row_floats,
    .pack_transposed = pack_transposed,
    .pack_rows = pack_rows,
    .forward_buffer_floats = forward_buffer_floats,
    .forward = forward,
    .backward_buffer_floats = backward_buffer_floats,
    .backward = backward,
    .write_gradient = write_gradient,
};

}  // namespace kernel_pytorch::attention::KP_ISA_NAMESPACE
