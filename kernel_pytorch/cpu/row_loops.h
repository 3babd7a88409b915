// Loops over the columns of a row, whole vectors first and a partial one last. Bodies take (column, lanes), lanes being
// AllLanes or SomeLanes, and are inlined twice; load and store below take the same tag.
#pragma once

#include "kernel_pytorch/cpu/load_store.h"

namespace kernel_pytorch::cpu {
inline namespace KP_ISA_NAMESPACE {

struct AllLanes {};
struct SomeLanes {
  int count;
};

template <class T>
KP_WORD VecOf<T> load(const T* from, AllLanes) {
  return load(from);
}
template <class T>
KP_WORD VecOf<T> load(const T* from, SomeLanes lanes) {
  return load_partial(from, lanes.count);  // the rest is zero
}
template <class T>
KP_WORD void store(T* to, VecOf<T> value, AllLanes) {
  store(to, value);
}
template <class T>
KP_WORD void store(T* to, VecOf<T> value, SomeLanes lanes) {
  store_partial(to, value, lanes.count);
}

// Lanes past the row's end become `other`.
template <class V, class Scalar>
KP_WORD V keep(V value, AllLanes, Scalar) {
  return value;
}
template <class V, class Scalar>
KP_WORD V keep(V value, SomeLanes lanes, Scalar other) {
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(value[0])); ++i) {
    if (i >= lanes.count) value[i] = other;
  }
  return value;
}

template <class T, class Body>
KP_WORD void for_columns(int64_t columns, Body body) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + kStep <= columns; j += kStep) body(j, AllLanes());
  if (j < columns) body(j, SomeLanes{static_cast<int>(columns - j)});
}

// Four vectors at a time, body(column, chain, lanes) with chain 0 to 3, for reductions whose steps would otherwise wait
// for each other.
template <class T, class Body>
KP_WORD void for_columns_in_chains(int64_t columns, Body body) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + 4 * kStep <= columns; j += 4 * kStep) {
    body(j, 0, AllLanes());
    body(j + kStep, 1, AllLanes());
    body(j + 2 * kStep, 2, AllLanes());
    body(j + 3 * kStep, 3, AllLanes());
  }
  for (; j + kStep <= columns; j += kStep) body(j, 0, AllLanes());
  if (j < columns) body(j, 1, SomeLanes{static_cast<int>(columns - j)});
}

// Writes value_at(column, lanes) to every column, two vectors at a time: a whole line of narrow types in one store.
// kStream needs `to` aligned to two vectors.
template <class T, bool kStream, class Value>
KP_WORD void write_columns(T* to, int64_t columns, Value value_at) {
  constexpr int kStep = kLanesOf<T>;
  int64_t j = 0;
  for (; j + 2 * kStep <= columns; j += 2 * kStep) {
    const PairOf<T> pair{value_at(j, AllLanes()), value_at(j + kStep, AllLanes())};
    if constexpr (kStream) {
      stream2(to + j, pair);
    } else {
      store2(to + j, pair);
    }
  }
  for (; j + kStep <= columns; j += kStep) store(to + j, value_at(j, AllLanes()));
  if (j < columns) {
    const SomeLanes rest{static_cast<int>(columns - j)};
    store(to + j, value_at(j, rest), rest);
  }
}

}  // namespace KP_ISA_NAMESPACE
}  // namespace kernel_pytorch::cpu
