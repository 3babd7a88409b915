// A tile of paged attention on the lanes of the CPU, built once per instruction level: scores of up to 8 rows with some
// keys at a time, softmax of 32 keys, weighted sums of these rows and some vectors of columns. Keys and values are read
// as the cache holds them, and the next step's are fetched meanwhile: rows of a cache lie far apart, so that no
// hardware foresees them.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/fold.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"

namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::Vec4;
using cpu::VecI;
using cpu::VecU8;

static_assert(kRowAlignment % kLanes == 0 && kTileKeys % kLanes == 0);
constexpr int kTileVectors = kTileKeys / kLanes;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr bool kManyRegisters = cpu::kVectorRegisters >= 32;

struct Int8 {
  int8_t value;
};
template <class T, bool kPartial>
KP_PRIMITIVE Vec load_row(const T* row, int64_t count) {
  if constexpr (__is_same(T, Int8)) {
    const VecU8 stored = kPartial ? cpu::load_storage_partial<VecU8, 1>(row, count) : cpu::load_storage<VecU8>(row);
    const VecI wide = reinterpret_cast<VecI>(cpu::widen_bits(stored));
    return __builtin_convertvector((wide << 24) >> 24, Vec);
  } else {
    return kPartial ? cpu::load_partial(row, count) : cpu::load(row);
  }
}

template <class T>
void copy(const CopyArguments& arguments) {
  for (int64_t i = 0; i < arguments.count; ++i) {
    float* to = arguments.to + i * arguments.pitch;
    const T* row = static_cast<const T*>(arguments.rows[i]);
    int64_t j = 0;
    for (; j + kLanes <= arguments.columns; j += kLanes) cpu::store(to + j, load_row<T, false>(row + j, kLanes));
    if (j < arguments.columns) {
      cpu::store(to + j, load_row<T, true>(row + j, arguments.columns - j));
      j += kLanes;
    }
    for (; j < arguments.pitch; j += kLanes) cpu::store(to + j, Vec{});
  }
}

template <class T>
void store(const float* from, float factor, int64_t count, void* to) {
  T* row = static_cast<T*>(to);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) cpu::store(row + i, cpu::load(from + i) * factor);
  if (i < count) cpu::store_partial(row + i, cpu::load(from + i) * factor, count - i);
}

template <class T>
KP_PRIMITIVE void prefetch_row(const void* row, int64_t columns) {
  constexpr int64_t kLineBytes = 64;
  const auto* bytes = static_cast<const char*>(row);
  for (int64_t i = 0; i < columns * int64_t{sizeof(T)}; i += kLineBytes) cpu::prefetch_far(bytes + i);
}

template <class T, int kRows, int kKeys, bool kPartial>
KP_PRIMITIVE void multiply_columns(Vec (&sums)[kRows][kKeys], const T* const (&keys)[kKeys], const float* queries,
                                   int64_t pitch, int64_t count) {
  Vec loaded[kKeys];
  for (int k = 0; k < kKeys; ++k) loaded[k] = load_row<T, kPartial>(keys[k], count);
  for (int row = 0; row < kRows; ++row) {
    const Vec query = cpu::load(queries + row * pitch);
    for (int k = 0; k < kKeys; ++k) sums[row][k] = cpu::fma(query, loaded[k], sums[row][k]);
  }
}

// scores[row][key], not scaled; kKeys keys at a time, so that some behind the last are multiplied too.
template <class T, int kRows, int kKeys>
KP_PRIMITIVE void multiply_keys(const StepArguments& arguments, int64_t first_row, float* scores) {
  const int64_t pitch = arguments.pitch, whole = arguments.columns / kLanes * kLanes;
  const float* queries = arguments.queries + first_row * pitch;
  const bool prefetches = first_row == 0 && arguments.next_keys != nullptr;
  for (int64_t key = 0; key < arguments.count; key += kKeys) {
    const T* keys[kKeys];
    for (int k = 0; k < kKeys; ++k) keys[k] = static_cast<const T*>(arguments.keys[key + k]);
    if (prefetches) {
      for (int k = 0; k < kKeys; ++k) prefetch_row<T>(arguments.next_keys[key + k], arguments.columns);
    }
    Vec sums[kRows][kKeys] = {};
    int64_t j = 0;
    for (; j < whole; j += kLanes) {
      multiply_columns<T, kRows, kKeys, false>(sums, keys, queries + j, pitch, kLanes);
      for (int k = 0; k < kKeys; ++k) keys[k] += kLanes;
    }
    if (j < arguments.columns) {
      multiply_columns<T, kRows, kKeys, true>(sums, keys, queries + j, pitch, arguments.columns - j);
    }
    if constexpr (kRows == 1) {
      for (int k = 0; k < kKeys; k += 4) {
        const Vec4 four = cpu::sums_of(sums[0][k], sums[0][k + 1], sums[0][k + 2], sums[0][k + 3]);
        __builtin_memcpy(scores + key + k, &four, sizeof(four));
      }
    } else {
      for (int row = 0; row < kRows; row += 2) {
        for (int k = 0; k < kKeys; k += 2) {
          const Vec4 four = cpu::sums_of(sums[row][k], sums[row][k + 1], sums[row + 1][k], sums[row + 1][k + 1]);
          float* to = scores + row * kTileKeys + key + k;
          __builtin_memcpy(to, &four, sizeof(four) / 2);
          __builtin_memcpy(to + kTileKeys, reinterpret_cast<const char*>(&four) + sizeof(four) / 2, sizeof(four) / 2);
        }
      }
    }
  }
}

KP_PRIMITIVE Vec lane_numbers() {
  Vec numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);  // a constant
  return numbers;
}

// From products to weights of values; returns what the row's sums so far are multiplied with.
KP_PRIMITIVE float weigh(const StepArguments& arguments, int64_t row, float* scores) {
  Vec values[kTileVectors];
  Vec most = cpu::broadcast(kMinusInfinity);
  for (int i = 0; i < kTileVectors; ++i) {
    Vec value = cpu::load(scores + i * kLanes) * arguments.scale;
    if (arguments.key_scales != nullptr) value *= cpu::load(arguments.key_scales + i * kLanes);
    if (arguments.softcap > 0) value = arguments.softcap * cpu::tanh(value * (1 / arguments.softcap));
    if (arguments.slopes != nullptr) {
      const Vec distance = lane_numbers() + (arguments.distances[row] + static_cast<float>(i * kLanes));
      value -= arguments.slopes[row] * (cpu::abs(distance) - arguments.bases[row]);
    }
    if (arguments.keeps != nullptr) {
      const uint8_t* keeps = arguments.keeps + row * kTileKeys + i * kLanes;
      const VecI kept = reinterpret_cast<VecI>(cpu::widen_bits(cpu::load_storage<VecU8>(keeps))) != 0;
      value = cpu::select(kept, value, cpu::broadcast(kMinusInfinity));
    }
    values[i] = value;
    most = cpu::max(value, most);  // leaves NaN out; the sum below brings it to the output
  }
  const float before = arguments.largest[row], in_tile = cpu::horizontal_max(most);
  const float largest = before > in_tile ? before : in_tile;
  const float reference = largest == kMinusInfinity ? 0 : largest;  // no difference of infinities may be taken
  Vec sum{};
  for (int i = 0; i < kTileVectors; ++i) {
    Vec weights = cpu::exp(values[i] - reference);
    sum += weights;
    weights *= arguments.value_scale;
    if (arguments.value_scales != nullptr) weights *= cpu::load(arguments.value_scales + i * kLanes);
    cpu::store(scores + i * kLanes, weights);
  }
  const float factor = before == largest ? 1.0f : cpu::exp(cpu::broadcast(before - largest))[0];
  arguments.largest[row] = largest;
  arguments.sums[row] = arguments.sums[row] * factor + cpu::horizontal_sum(sum);
  return factor;
}

struct Weights {
  const float* of_keys;  // [rows][kTileKeys]
  const float* factors;  // [rows], of the outputs so far
  float* outputs;        // [rows][value_pitch]
  bool prefetches;       // the next step's values
};

template <class T, int kRows, int kVectors, bool kPartial>
KP_PRIMITIVE void add_columns(const StepArguments& arguments, const Weights& weights, int64_t column) {
  const int64_t pitch = arguments.value_pitch;
  float* outputs = weights.outputs + column;
  Vec sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kVectors; ++i) {
      sums[row][i] = cpu::load(outputs + row * pitch + i * kLanes) * weights.factors[row];
    }
  }
  const bool prefetches = weights.prefetches && column == 0;
  for (int64_t key = 0; key < arguments.count; ++key) {
    const T* from = static_cast<const T*>(arguments.values[key]) + column;
    if (prefetches) prefetch_row<T>(arguments.next_values[key], arguments.value_columns);
    Vec values[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      values[i] = load_row<T, kPartial>(from + i * kLanes, arguments.value_columns - column);
    }
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = cpu::broadcast(weights.of_keys[row * kTileKeys + key]);
      for (int i = 0; i < kVectors; ++i) sums[row][i] = cpu::fma(values[i], weight, sums[row][i]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kVectors; ++i) cpu::store(outputs + row * pitch + i * kLanes, sums[row][i]);
  }
}

// All columns from `column` on, kVectors vectors at a time, then half as many.
template <class T, int kRows, int kVectors>
KP_PRIMITIVE void add_values(const StepArguments& arguments, const Weights& weights, int64_t column) {
  for (; column + kVectors * kLanes <= arguments.value_columns; column += kVectors * kLanes) {
    add_columns<T, kRows, kVectors, false>(arguments, weights, column);
  }
  if constexpr (kVectors > 1) {
    add_values<T, kRows, kVectors / 2>(arguments, weights, column);
  } else if (column < arguments.value_columns) {
    add_columns<T, kRows, 1, true>(arguments, weights, column);
  }
}

template <class T, int kRows, int kKeys, int kVectors>
[[gnu::noinline]] void step_rows(const StepArguments& arguments, int64_t first_row) {
  alignas(64) float scores[kRows * kTileKeys] = {};
  multiply_keys<T, kRows, kKeys>(arguments, first_row, scores);
  float factors[kRows];
  for (int row = 0; row < kRows; ++row) factors[row] = weigh(arguments, first_row + row, scores + row * kTileKeys);
  const Weights weights{scores, factors, arguments.outputs + first_row * arguments.value_pitch,
                        first_row == 0 && arguments.next_values != nullptr};
  add_values<T, kRows, kVectors>(arguments, weights, 0);
}

template <class T>
void step(const StepArguments& arguments) {
  int64_t row = 0;
  if constexpr (kManyRegisters) {
    for (; row + 8 <= arguments.rows; row += 8) step_rows<T, 8, 2, 2>(arguments, row);
  }
  for (; row + 4 <= arguments.rows; row += 4) {
    step_rows<T, 4, kManyRegisters ? 4 : 2, kManyRegisters ? 4 : 2>(arguments, row);
  }
  for (; row + 2 <= arguments.rows; row += 2) step_rows<T, 2, 4, 4>(arguments, row);
  for (; row < arguments.rows; ++row) step_rows<T, 1, kManyRegisters ? 8 : 4, kManyRegisters ? 8 : 4>(arguments, row);
}

}  // namespace

extern const TileKernels kTileKernels = {{copy<float>, copy<BFloat16>, copy<Float16>, copy<Float8E4M3>, copy<Int8>},
                                         {step<float>, step<BFloat16>, step<Float16>, step<Float8E4M3>, step<Int8>},
                                         {store<float>, store<BFloat16>, store<Float16>}};

}  // namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE
