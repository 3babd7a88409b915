// A row's columns, vector by vector: whole vectors, then the lanes that are left. Bodies are generic lambdas that take
// the first column and AllLanes or SomeLanes, and pass these on to load and store.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

// All lanes, or the first `count` of them at a row's end.
struct AllLanes {};
struct SomeLanes {
  int count;
};

template <class T>
KP_PRIMITIVE VecOf<T> load(const T* from, AllLanes) {
  return load(from);
}
template <class T>
KP_PRIMITIVE VecOf<T> load(const T* from, SomeLanes lanes) {
  return load_partial(from, lanes.count);  // the rest is zero
}
template <class T>
KP_PRIMITIVE void store(T* to, VecOf<T> value, AllLanes) {
  store(to, value);
}
template <class T>
KP_PRIMITIVE void store(T* to, VecOf<T> value, SomeLanes lanes) {
  store_partial(to, value, lanes.count);
}
template <class V>
KP_PRIMITIVE V keep(V value, AllLanes) {
  return value;
}
template <class V>
KP_PRIMITIVE V keep(V value, SomeLanes lanes) {  // lanes past the row's end count for nothing
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(value[0])); ++i) {
    if (i >= lanes.count) value[i] = 0;
  }
  return value;
}

// Writes every column, two vectors at a time: a whole line of narrow types in one store. pair_at(j) gives the two, in
// the order of load2_unordered where kUnordered; value_at(j, lanes) those that are left at the row's end.
template <class T, bool kStream, bool kUnordered, class Pair, class Value>
KP_PRIMITIVE void write_columns_in_pairs(T* to, int64_t columns, Pair pair_at, Value value_at) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    const PairOf<T> pair = pair_at(j);
    if constexpr (kStream) {
      kUnordered ? stream2_unordered(to + j, pair) : stream2(to + j, pair);
    } else {
      kUnordered ? store2_unordered(to + j, pair) : store2(to + j, pair);
    }
  }
  for (; j + kStep <= columns; j += kStep) store(to + j, value_at(j, AllLanes()), AllLanes());
  if (j < columns) {
    const SomeLanes rest{static_cast<int>(columns - j)};
    store(to + j, value_at(j, rest), rest);
  }
}

template <class T, bool kStream, class Value>
KP_PRIMITIVE void write_columns(T* to, int64_t columns, Value value_at) {
  write_columns_in_pairs<T, kStream, false>(
      to, columns,
      [&](int64_t j) -> PairOf<T> {
        return {value_at(j, AllLanes()), value_at(j + kLanesOf<T>, AllLanes())};
      },
      value_at);
}

template <class T, class Body>
KP_PRIMITIVE void for_columns(int64_t columns, Body body) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + kStep <= columns; j += kStep) body(j, AllLanes());
  if (j < columns) body(j, SomeLanes{static_cast<int>(columns - j)});
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
