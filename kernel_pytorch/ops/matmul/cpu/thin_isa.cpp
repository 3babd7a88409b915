// Few rows times many columns, where reading the columns is all that counts: nothing is packed. Columns that lie in
// memory one after the other (a weight of a linear layer) are dot products, four columns and up to four rows at a time;
// rows of columns (a product without a transposition) are added up in sums that stay in the first cache.
#include "kernel_pytorch/ops/matmul/cpu/epilogue_isa.h"

namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE {
namespace {

KP_PRIMITIVE Vec rounded_if(Vec v, bool rounds) {
  return rounds ? cpu::from_bits(cpu::round_to_bfloat16(v) & 0xffff0000u) : v;
}

// kRows rows of `few` against kColumns columns.
template <class T, int kRows, int kColumns>
[[gnu::noinline]] void dot(const float* few, int64_t steps, const T* many, int64_t stride, float* sums,
                           int64_t sums_stride, bool rounds) {
  Vec totals[kRows][kColumns] = {};
  const auto add = [&](int64_t step, const auto& load_few, const auto& load_many) {
    Vec values[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) values[j] = rounded_if(load_many(many + j * stride + step), rounds);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec row = load_few(few + i * steps + step);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) totals[i][j] += row * values[j];
    }
  };
  // Chains of so many sums, whatever the number of lanes: errors grow with the root of a chain.
  constexpr int64_t kBlock = 256 * kLanes;
  const auto finish = [&](bool adds) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kColumns; ++j) {
        float& sum = sums[i * sums_stride + j];
        sum = (adds ? sum : 0.0f) + cpu::horizontal_sum(totals[i][j]);
        totals[i][j] = Vec{};
      }
    }
  };
  int64_t step = 0;
  for (int64_t end = kBlock; end < steps; end += kBlock) {
    for (; step < end; step += kLanes) {
      add(
          step, [](const float* p) { return cpu::load(p); }, [](const T* p) { return cpu::load(p); });
    }
    finish(end > kBlock);
  }
  for (; step + kLanes <= steps; step += kLanes) {
    add(
        step, [](const float* p) { return cpu::load(p); }, [](const T* p) { return cpu::load(p); });
  }
  if (step < steps) {
    const int64_t rest = steps - step;
    add(
        step, [&](const float* p) { return cpu::load_partial(p, rest); },
        [&](const T* p) { return cpu::load_partial(p, rest); });
  }
  finish(steps > kBlock);
}

template <class T, int kColumns>
void dot_rows(const ThinTask& task, const T* many, float* sums) {
  const int64_t stride = task.many.column_stride;
  int64_t row = 0;
  for (; row + 4 <= task.count; row += 4) {
    dot<T, 4, kColumns>(task.few + row * task.steps, task.steps, many, stride, sums + row * task.sums_stride,
                        task.sums_stride, task.rounds);
  }
  for (; row + 2 <= task.count; row += 2) {
    dot<T, 2, kColumns>(task.few + row * task.steps, task.steps, many, stride, sums + row * task.sums_stride,
                        task.sums_stride, task.rounds);
  }
  if (row < task.count) {
    dot<T, 1, kColumns>(task.few + row * task.steps, task.steps, many, stride, sums + row * task.sums_stride,
                        task.sums_stride, task.rounds);
  }
}

template <class T>
void multiply_columns(const ThinTask& task) {
  const T* many = static_cast<const T*>(task.many.data);
  int64_t column = 0;
  for (; column + 4 <= task.columns; column += 4) {
    dot_rows<T, 4>(task, many + column * task.many.column_stride, task.sums + column);
  }
  for (; column < task.columns; ++column) {
    dot_rows<T, 1>(task, many + column * task.many.column_stride, task.sums + column);
  }
}

// Eight steps of k at a time: their rows are read once, and the sums of every row of `few` once for all eight.
template <class T>
void multiply_rows(const ThinTask& task) {
  constexpr int kSteps = 8;
  const T* many = static_cast<const T*>(task.many.data);
  const int64_t stride = task.many.row_stride;
  for (int64_t i = 0; i < task.count; ++i) {
    for (int64_t j = 0; j < task.columns; j += kLanes) cpu::store(task.sums + i * task.sums_stride + j, Vec{});
  }
  for (int64_t step = 0; step < task.steps; step += kSteps) {
    const int64_t steps = smaller(kSteps, task.steps - step);
    for (int64_t j = 0; j < task.columns; j += kLanes) {
      Vec values[kSteps] = {};
      for (int64_t s = 0; s < steps; ++s) {
        const T* row = many + (step + s) * stride + j;
        values[s] = rounded_if(j + kLanes <= task.columns ? cpu::load(row) : cpu::load_partial(row, task.columns - j),
                               task.rounds);
      }
      for (int64_t i = 0; i < task.count; ++i) {
        float* sums = task.sums + i * task.sums_stride + j;
        const float* few = task.few + i * task.steps + step;
        Vec part = few[0] * values[0];  // by itself: a chain of an eighth as many sums rounds less
        if (steps == kSteps) {
#pragma GCC unroll 8
          for (int s = 1; s < kSteps; ++s) part += few[s] * values[s];
        } else {
          for (int64_t s = 1; s < steps; ++s) part += few[s] * values[s];
        }
        cpu::store(sums, cpu::load(sums) + part);
      }
    }
  }
}

}  // namespace

// The sums' rows have whole vectors.
void multiply_thin(const ThinTask& task) {
  with_type(task.many.dtype, [&](auto type) {
    using T = decltype(type);
    task.many.row_stride == 1 ? multiply_columns<T>(task) : multiply_rows<T>(task);
  });
}

// Partial sums of a few steps first: their error does not grow with the number of steps.
template <class T>
static void sum_of_rows(const RowSumTask& task) {
  constexpr int64_t kBlock = 512;
  const T* from = static_cast<const T*>(task.from.data) + task.first * task.from.row_stride;
  for (int64_t i = 0; i < task.count; ++i) {
    const T* row = from + i * task.from.row_stride;
    float total = 0;
    for (int64_t step = 0; step < task.steps; step += kBlock) {
      const int64_t end = smaller(task.steps, step + kBlock);
      Vec part{};
      int64_t k = step;
      for (; k + kLanes <= end; k += kLanes) part += cpu::load(row + k);
      if (k < end) part += cpu::load_partial(row + k, end - k);
      total += cpu::horizontal_sum(part);
    }
    task.sums[i] = total;
  }
}
template <class T>
static void sum_of_columns(const RowSumTask& task) {
  constexpr int64_t kBlock = 32;
  const T* from = static_cast<const T*>(task.from.data) + task.first;
  for (int64_t i = 0; i < task.count; i += kLanes) {
    const int64_t lanes = smaller(kLanes, task.count - i);
    Vec total{};
    for (int64_t step = 0; step < task.steps; step += kBlock) {
      Vec parts[4] = {};
      for (int64_t k = step; k < smaller(task.steps, step + kBlock); ++k) {
        const T* place = from + i + k * task.from.column_stride;
        parts[k % 4] += lanes == kLanes ? cpu::load(place) : cpu::load_partial(place, lanes);
      }
      total += (parts[0] + parts[1]) + (parts[2] + parts[3]);
    }
    cpu::store_partial(task.sums + i, total, lanes);
  }
}

void sum_rows(const RowSumTask& task) {
  with_type(task.from.dtype, [&](auto type) {
    using T = decltype(type);
    task.from.column_stride == 1 ? sum_of_rows<T>(task) : sum_of_columns<T>(task);
  });
}

}  // namespace kernel_pytorch::matmul::KP_ISA_NAMESPACE
