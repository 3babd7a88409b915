// A row as floats in the nearest cache, in the order that costs least to unpack: for rows that are gone over more than
// twice.
#pragma once

#include "kernel_pytorch/cpu/columns.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// Lanes past the row's end become `other`.
KP_PRIMITIVE Vec keep(Vec value, AllLanes, float) {
  return value;
}
KP_PRIMITIVE Vec keep(Vec value, SomeLanes lanes, float other) {
  static constexpr int32_t kNumbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const VecI numbers = load_storage<VecI>(kNumbers);
  return select(numbers < lanes.count, value, broadcast(other));
}

// The values of a row in whatever order is cheapest: each(value, slot, chain, lanes), chain being 0 or 1 for sums that
// do not wait for each other. A slot is where a vector of floats would keep the value; write_slots puts what stands for
// the slots back into their columns. In each whole pair of vectors, bf16 has the even elements in the first slot and
// the odd ones in the second; slot_of finds a column.
template <class T, class Each>
KP_PRIMITIVE void for_slots(const T* row, int64_t columns, Each each) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    const PairOf<T> pair = load2_unordered(row + j);
    each(pair.low, j, 0, AllLanes());
    each(pair.high, j + kStep, 1, AllLanes());
  }
  for (; j < columns; j += kStep) {
    const SomeLanes rest{static_cast<int>(columns - j < kStep ? columns - j : kStep)};
    each(load(row + j, rest), j, 0, rest);
  }
}

template <class T>
KP_PRIMITIVE int64_t slot_of(int64_t column, int64_t columns) {
  constexpr int64_t kPair = 2 * kLanesOf<T>;
  if (!__is_same(T, BFloat16) || column < 0 || column >= columns / kPair * kPair) return column;
  const int64_t place = column % kPair;
  return column - place + place % 2 * (kPair / 2) + place / 2;
}

// value_of(slot, lanes). kStream needs `to` aligned to two vectors.
template <class T, bool kStream, class Value>
KP_PRIMITIVE void write_slots(T* to, int64_t columns, Value value_of) {
  write_columns_in_pairs<T, kStream, true>(
      to, columns,
      [&](int64_t j) -> PairOf<T> {
        return {value_of(j, AllLanes()), value_of(j + kLanesOf<T>, AllLanes())};
      },
      value_of);
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
