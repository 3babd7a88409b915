// Products of fp32 rows as they lie: tiles of 6 rows of A, each number broadcast from where it is, against panels of B
// that the caller packed into the second cache. All of k is one visit: sums leave a tile once, finished.
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

using cpu::kChainSteps;
using cpu::kTileColumns;
using cpu::kTileRows;

// Prefetches between the products, one line at a time: bursts would stall them.
struct Ahead {
  const float* rows;                       // of A that follow
  const char *output, *residual;           // of this tile
  int64_t output_stride, residual_stride;  // in bytes
};

// totals += column `step` of six rows times row `step` of a panel. Two bases reach six rows with scaled strides.
template <int kVectors>
KP_PRIMITIVE void multiply_step(const float* a, const float* late, int64_t stride, const float* b, int step,
                                Vec (&totals)[kTileRows][kVectors]) {
  Vec values[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) values[j] = cpu::load(b + step * kTileColumns + j * kLanes);
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i) {
    const Vec factor = cpu::broadcast(i < 3 ? a[i * stride + step] : late[(i - 3) * stride + step]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) totals[i][j] += factor * values[j];
  }
}

// A whole tile's simple epilogue without an activation.
struct Finish {
  float alpha, beta;
  const float *bias, *residual;  // null: absent
  float* output;
  int64_t output_stride, residual_stride;  // in floats
};

// From registers to the output.
template <int kVectors>
KP_PRIMITIVE void finish_sums(Vec (&totals)[kTileRows][kVectors], const float* sums, bool add, const Finish& finish) {
  Vec bias[kVectors] = {};
  if (finish.bias != nullptr) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) bias[j] = cpu::load(finish.bias + j * kLanes);
  }
  if (add) {
#pragma GCC unroll 6
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) totals[i][j] += cpu::load(sums + i * kTileColumns + j * kLanes);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vec v = totals[i][j] * finish.alpha + bias[j];
      if (finish.residual != nullptr) {
        v += finish.beta * cpu::load(finish.residual + i * finish.residual_stride + j * kLanes);
      }
      cpu::store(finish.output + i * finish.output_stride + j * kLanes, v);
    }
  }
}

// sums [6][kTileColumns] (+)= 6 rows times a panel, of which kVectors count; with `finish` they are the output instead.
// Four steps at a time: where another thread shares the core, instructions that are no products cost as much as
// products.
template <int kVectors>
[[gnu::noinline]] void multiply_rows_tile(const float* a, int64_t stride, const float* b, int64_t steps, float* sums,
                                          bool add, const Ahead& ahead, const Finish* finish) {
  Vec totals[kTileRows][kVectors] = {};
  const float* late = a + 3 * stride;
  const float* rows = ahead.rows;
  constexpr int64_t kLineSteps = kChainSteps / (kTileRows * 4);
  int64_t step = 0;
  for (; step + 4 <= steps; step += 4) {
    cpu::prefetch_far(rows);
    rows += 16;
    if (step % kLineSteps == 0 && step < kChainSteps) {
      const int64_t line = step / kLineSteps;  // of four in a row
      cpu::prefetch_for_write(ahead.output + line / 4 * ahead.output_stride + line % 4 * 64);
      cpu::prefetch_near(ahead.residual + line / 4 * ahead.residual_stride + line % 4 * 64);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) multiply_step<kVectors>(a, late, stride, b, i, totals);
    a += 4;
    late += 4;
    b += 4 * kTileColumns;
  }
  for (; step < steps; ++step) {
    multiply_step<kVectors>(a, late, stride, b, 0, totals);
    ++a;
    ++late;
    b += kTileColumns;
  }
  finish == nullptr ? cpu::store_tile(totals, sums, kTileColumns, add) : finish_sums(totals, sums, add, *finish);
}

KP_PRIMITIVE void multiply_rows_tile(int64_t columns, const float* a, int64_t stride, const float* b, int64_t steps,
                                     float* sums, bool add, const Ahead& ahead, const Finish* finish) {
  cpu::with_vectors((columns + kLanes - 1) / kLanes, [&]<int kVectors>() {
    multiply_rows_tile<kVectors>(a, stride, b, steps, sums, add, ahead, finish);
  });
}

// The last tile's rows, with zeros for those it lacks.
const float* pad_rows(const RowsTask& task, const float* a, int64_t rows) {
  for (int64_t i = 0; i < kTileRows; ++i) {
    float* to = task.padded + i * task.steps;
    if (i < rows) __builtin_memcpy(to, a + i * task.row_stride, static_cast<size_t>(task.steps) * sizeof(float));
    if (i >= rows) __builtin_memset(to, 0, static_cast<size_t>(task.steps) * sizeof(float));
  }
  return task.padded;
}

Finish finish_of(const Epilogue& epilogue, int64_t row, int64_t column) {
  const auto at = [&](const Rows& rows) {
    return rows.data == nullptr ? nullptr : reinterpret_cast<float*>(place(rows, row, column));
  };
  const auto* bias = static_cast<const float*>(epilogue.bias);
  return {.alpha = epilogue.alpha,
          .beta = epilogue.beta,
          .bias = bias == nullptr ? nullptr : bias + column,
          .residual = at(epilogue.residual),
          .output = at(epilogue.output),
          .output_stride = epilogue.output.stride,
          .residual_stride = epilogue.residual.stride};
}

// Steps of a chain: about kChainSteps, and all chains as long as each other.
int64_t chain_of(int64_t steps) {
  const int64_t chains = (steps + kChainSteps / 2) / kChainSteps;
  return chains <= 1 ? (steps == 0 ? 1 : steps) : ((steps + chains - 1) / chains + 3) / 4 * 4;
}

}  // namespace

void multiply_rows(const RowsTask& task) {
  alignas(64) float sums[kTileRows * kTileColumns];
  const Rows &output = task.epilogue.output, &given = task.epilogue.residual;
  const Rows& residual = given.data == nullptr ? output : given;
  const int64_t panels = (task.columns + kTileColumns - 1) / kTileColumns;
  const int64_t chain = chain_of(task.steps);
  const bool finishes_directly = is_simple(task.epilogue) && task.epilogue.activation == Kind::kIdentity;
  for (int64_t row = 0; row < task.rows; row += kTileRows) {
    const int64_t rows = smaller(kTileRows, task.rows - row);
    const bool is_whole = rows == kTileRows;
    const float* a = task.a + row * task.row_stride;
    const float* next = a + (is_whole ? kTileRows * task.row_stride : 0);
    if (!is_whole) a = pad_rows(task, a, rows);
    const int64_t stride = is_whole ? task.row_stride : task.steps;
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t column = panel * kTileColumns, columns = smaller(kTileColumns, task.columns - column);
      const float* b = task.panels + column * task.steps;
      const int64_t first = output_column(task.epilogue.form, column);
      const bool is_direct = is_whole && columns == kTileColumns && finishes_directly;
      const Finish finish = is_direct ? finish_of(task.epilogue, row, column) : Finish{};
      for (int64_t step = 0; step < task.steps || step == 0; step += chain) {
        const Ahead ahead{next + (panel * task.steps + step) * kTileRows / panels, place(output, row, first),
                          place(residual, row, first), output.stride * bytes_of(output.dtype),
                          residual.stride * bytes_of(residual.dtype)};
        multiply_rows_tile(columns, a + step, stride, b + step * kTileColumns, smaller(chain, task.steps - step), sums,
                           step > 0, ahead, is_direct && step + chain >= task.steps ? &finish : nullptr);
      }
      if (is_direct) continue;
      finish_tile(task.epilogue, sums, kTileColumns, row, rows, column, columns);
    }
  }
}

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE
