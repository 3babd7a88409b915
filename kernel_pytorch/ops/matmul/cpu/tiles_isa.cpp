// Products on the lanes of the CPU: packing to fp32, and tiles of 6 rows whose sums stay in registers while a column of
// A is broadcast against a row of B. Narrow types are widened (or rounded to bf16, where that was asked for) as they
// are packed, so that one loop multiplies them all.
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kChainSteps;
using cpu::kTileColumns;
using cpu::kTileRows;
using cpu::kTileVectors;

constexpr int64_t kPackAhead = 32;  // elements of each row of a weight, two lines of fp32

KP_PRIMITIVE Vec rounded(Vec v, bool rounds) {
  return rounds ? cpu::from_bits(cpu::round_to_bfloat16(v) & 0xffff0000u) : v;
}

// Up to kLanes rows of up to kLanes neighbours, transposed: column j of the memory is square[j].
template <class T>
KP_PRIMITIVE void load_transposed(const T* from, int64_t stride, int64_t rows, int64_t columns, bool rounds,
                                  Vec (&square)[kLanes]) {
  if (rows >= kLanes && columns >= kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = rounded(cpu::load(from + i * stride), rounds);
  } else {
    const int64_t lanes = smaller(columns, kLanes);
    for (int i = 0; i < kLanes; ++i) {
      square[i] = i < rows ? rounded(cpu::load_partial(from + i * stride, lanes), rounds) : Vec{};
    }
  }
  cpu::transpose(square);
}

// A tile of A is [k][6]. A vector is stored for each step of k, and what it wrote past the six is overwritten by the
// next; at a tile's end nothing is written past it.
KP_PRIMITIVE void store_step(float* to, Vec values, int64_t steps_left) {
  if (steps_left * kTileRows >= kLanes) {
    cpu::store(to, values);
  } else {
    cpu::store_partial(to, values, steps_left * kTileRows);
  }
}
template <class T>
void pack_a_rows(const PackTask& task, bool rounds) {
  const T* from = static_cast<const T*>(task.from.data) + task.first * task.from.row_stride + task.step;
  for (int64_t row = 0; row < task.count; row += kTileRows) {
    const int64_t rows = smaller(kTileRows, task.count - row);
    float* to = reinterpret_cast<float*>(task.to + row / kTileRows * task.tile_bytes);
    for (int64_t step = 0; step < task.steps; step += kLanes) {
      const T* square_from = from + row * task.from.row_stride + step;
      const int64_t steps = smaller(kLanes, task.steps - step);
      if constexpr (kLanes >= kTileRows) {
        Vec square[kLanes];
        load_transposed(square_from, task.from.row_stride, rows, steps, rounds, square);
        for (int64_t i = 0; i < steps; ++i) {
          store_step(to + (step + i) * kTileRows, square[i], task.steps - step - i);
        }
      } else {
        for (int64_t i = 0; i < kTileRows; ++i) {
          const Vec values =
              i < rows ? rounded(cpu::load_partial(square_from + i * task.from.row_stride, steps), rounds) : Vec{};
          for (int64_t j = 0; j < steps; ++j) to[(step + j) * kTileRows + i] = values[j];
        }
      }
    }
  }
}
template <class T>
void pack_a_columns(const PackTask& task, bool rounds) {
  const T* from = static_cast<const T*>(task.from.data) + task.first + task.step * task.from.column_stride;
  for (int64_t step = 0; step < task.steps; ++step) {
    const T* column = from + step * task.from.column_stride;
    for (int64_t row = 0; row < task.count; row += kTileRows) {
      const int64_t rows = smaller(kTileRows, task.count - row);
      float* to = reinterpret_cast<float*>(task.to + row / kTileRows * task.tile_bytes) + step * kTileRows;
      if (sizeof(T) == sizeof(float) && rows == kTileRows && !rounds) {
        __builtin_memcpy(to, column + row, kTileRows * sizeof(float));
      } else if constexpr (kLanes >= kTileRows) {
        store_step(to, rounded(cpu::load_partial(column + row, rows), rounds), task.steps - step);
      } else {
        const int64_t low = smaller(rows, kLanes);
        cpu::store(to, rounded(cpu::load_partial(column + row, low), rounds));
        const Vec rest = rounded(cpu::load_partial(column + row + low, rows - low), rounds);
        cpu::store_partial(to + kLanes, rest, kTileRows - kLanes);
      }
    }
  }
}

// A panel of B is [k][kTileColumns]. Rows are read in order, for as many panels as a task has.
template <class T>
void pack_b_rows(const PackTask& task, bool rounds) {
  const T* from = static_cast<const T*>(task.from.data) + task.first + task.step * task.from.row_stride;
  for (int64_t step = 0; step < task.steps; ++step) {
    const T* row = from + step * task.from.row_stride;
    for (int64_t column = 0; column < task.count; column += kTileColumns) {
      const int64_t columns = smaller(kTileColumns, task.count - column);
      float* packed = reinterpret_cast<float*>(task.to + column / kTileColumns * task.tile_bytes) + step * kTileColumns;
      if (columns == kTileColumns) {
#pragma GCC unroll 4
        for (int j = 0; j < kTileVectors; ++j) {
          cpu::store(packed + j * kLanes, rounded(cpu::load(row + column + j * kLanes), rounds));
        }
      } else {
        for (int64_t j = 0; j < kTileColumns; j += kLanes) {
          const int64_t lanes = columns <= j ? 0 : smaller(kLanes, columns - j);
          cpu::store(packed + j, lanes == 0 ? Vec{} : rounded(cpu::load_partial(row + column + j, lanes), rounds));
        }
      }
    }
  }
}
// A whole square of columns, which are rows in memory: straight from registers to the panel.
template <class T, bool kRounds>
KP_PRIMITIVE void pack_square(const T* from, int64_t stride, float* to) {
  Vec square[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    square[i] = rounded(cpu::load(from + i * stride), kRounds);
    cpu::prefetch_near(from + i * stride + kPackAhead);
  }
  cpu::transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) cpu::store(to + i * kTileColumns, square[i]);
}
template <class T, bool kRounds>
void pack_b_columns(const PackTask& task) {
  const int64_t stride = task.from.column_stride;
  const T* from = static_cast<const T*>(task.from.data) + task.first * stride + task.step;
  const int64_t padded = (task.count + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int64_t column = 0; column < padded; column += kLanes) {
    float* to = reinterpret_cast<float*>(task.to + column / kTileColumns * task.tile_bytes) + column % kTileColumns;
    const int64_t columns = task.count - column;
    int64_t step = 0;
    for (; columns >= kLanes && step + kLanes <= task.steps; step += kLanes) {
      pack_square<T, kRounds>(from + column * stride + step, stride, to + step * kTileColumns);
    }
    for (; step < task.steps; step += kLanes) {
      Vec square[kLanes] = {};
      const int64_t steps = smaller(kLanes, task.steps - step);
      if (columns > 0) load_transposed(from + column * stride + step, stride, columns, steps, kRounds, square);
      for (int64_t i = 0; i < steps; ++i) cpu::store(to + (step + i) * kTileColumns, square[i]);
    }
  }
}

void pack_a(const PackTask& task) {
  const bool rounds = task.precision == Precision::kBf16;
  with_type(task.from.dtype, [&](auto type) {
    using T = decltype(type);
    task.from.column_stride == 1 ? pack_a_rows<T>(task, rounds) : pack_a_columns<T>(task, rounds);
  });
}
void pack_b(const PackTask& task) {
  const bool rounds = task.precision == Precision::kBf16;
  with_type(task.from.dtype, [&](auto type) {
    using T = decltype(type);
    if (task.from.column_stride == 1) {
      pack_b_rows<T>(task, rounds);
    } else {
      rounds ? pack_b_columns<T, true>(task) : pack_b_columns<T, false>(task);
    }
  });
}

// sums [6][kTileColumns] (+)= a tile times a panel, of which kVectors count, for at most kChainSteps of k.
template <int kVectors>
[[gnu::noinline]] void multiply_tile(const float* a, const float* b, int64_t steps, float* sums, bool add) {
  Vec totals[kTileRows][kVectors] = {};
  constexpr int64_t kAhead = 64;  // steps of A, also into the next tile
  for (int64_t step = 0; step < steps; ++step) {
    Vec values[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) values[j] = cpu::load(b + j * kLanes);
    if ((step & 1) == 0) cpu::prefetch_near(a + kAhead * kTileRows);
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
      const Vec factor = cpu::broadcast(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) totals[i][j] += factor * values[j];
    }
    a += kTileRows;
    b += kTileColumns;
  }
  cpu::store_tile(totals, sums, kTileColumns, add);
}

KP_PRIMITIVE void multiply_tile(int64_t columns, const float* a, const float* b, int64_t steps, float* sums, bool add) {
  cpu::with_vectors((columns + kLanes - 1) / kLanes, [&]<int kVectors>() {
    for (int64_t step = 0; step < steps || step == 0; step += kChainSteps) {
      multiply_tile<kVectors>(a + step * kTileRows, b + step * kTileColumns, smaller(kChainSteps, steps - step), sums,
                              add || step > 0);
    }
  });
}

void multiply_at(const BlockTask& task, int64_t row, int64_t column, float* sums) {
  const int64_t columns = smaller(kTileColumns, task.columns - column);
  multiply_tile(columns, reinterpret_cast<const float*>(task.a + row / kTileRows * task.a_tile_bytes),
                reinterpret_cast<const float*>(task.b + column / kTileColumns * task.b_panel_bytes), task.steps, sums,
                task.add);
  if (task.is_last) {
    finish_tile(task.epilogue, sums, kTileColumns, row, smaller(kTileRows, task.rows - row), column, columns);
  }
}

// Panel by panel, so that a panel of B stays in the caches; the last block tile by tile, for long rows of the output.
void multiply(const BlockTask& task) {
  const int64_t panels = (task.columns + kTileColumns - 1) / kTileColumns, stride = task.sums_tile_floats;
  if (task.is_last) {
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      for (int64_t panel = 0; panel < panels; ++panel) {
        multiply_at(task, row, panel * kTileColumns, task.sums + (row / kTileRows * panels + panel) * stride);
      }
    }
    if (task.epilogue.streams) cpu::stream_fence();
    return;
  }
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t row = 0; row < task.rows; row += kTileRows) {
      float* sums = task.sums + (row / kTileRows * panels + panel) * stride;
      if (task.add) {
        for (int line = 0; line < kTileRows * kTileVectors; ++line) {
          cpu::prefetch_near(sums + panels * stride + line * kLanes);
        }
      }
      multiply_at(task, row, panel * kTileColumns, sums);
    }
  }
}

}  // namespace

extern const ProductKernels kProductKernels;
constinit const ProductKernels kProductKernels{
    .tile_rows = kTileRows, .panel_columns = kTileColumns, .pack_a = pack_a, .pack_b = pack_b, .multiply = multiply};

void finish_rows(const FinishTask& task) {
  finish_tile(task.epilogue, task.sums, task.sums_stride, 0, task.rows, 0, task.columns);
}

void write_pair_gradient(const PairTask& task) {
  EpilogueRow row;
  for (int64_t i = 0; i < task.rows; ++i) {
    for (int64_t column = 0; column < task.columns; column += kEpilogueColumns) {
      const int64_t count = smaller(kEpilogueColumns, task.columns - column);
      widen_row(place(task.grad_output, i, column), task.grad_output.dtype, count, row.v);
      widen_row(place(task.saved, i, 2 * column), task.saved.dtype, 2 * count, row.saved);
      gradient_of_pairs(row, task.activation, row.v, count);
      narrow_row(row.result, 2 * count, place(task.grad_input, i, 2 * column), task.grad_input.dtype);
    }
  }
}

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE
