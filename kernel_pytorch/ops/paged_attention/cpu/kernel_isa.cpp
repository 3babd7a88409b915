// A tile of paged attention on the lanes of the CPU, built once per instruction level: rows of the cache to fp32,
// scores of 4 rows with 4 keys at a time, softmax of 32 keys, weighted sums of 4 rows and 4 vectors of columns at a
// time.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"

namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;
using cpu::VecI;
using cpu::VecU8;

static_assert(kRowAlignment % kLanes == 0 && kTileKeys % kLanes == 0);
constexpr int kTileVectors = kTileKeys / kLanes;
constexpr float kMinusInfinity = -__builtin_inff();

struct Int8 {
  int8_t value;
};
template <class T>
KP_PRIMITIVE Vec load_row(const T* row, int64_t count) {
  if constexpr (__is_same(T, Int8)) {
    const VecU8 stored =
        count >= kLanes ? cpu::load_storage<VecU8>(row) : cpu::load_storage_partial<VecU8, 1>(row, count);
    const VecI wide = reinterpret_cast<VecI>(cpu::widen_bits(stored));
    return __builtin_convertvector((wide << 24) >> 24, Vec);
  } else {
    return count >= kLanes ? cpu::load(row) : cpu::load_partial(row, count);
  }
}

template <class T>
void copy(const CopyArguments& arguments) {
  for (int64_t i = 0; i < arguments.count; ++i) {
    float* to = arguments.to + i * arguments.pitch;
    const T* row = static_cast<const T*>(arguments.rows[i]);
    const Vec scale = cpu::broadcast(arguments.scales[i]);
    for (int64_t j = 0; j < arguments.pitch; j += kLanes) {
      const int64_t count = arguments.columns - j;
      const Vec loaded = row == nullptr || count <= 0 ? Vec{} : load_row(row + j, count);
      cpu::store(to + j, loaded * scale);
    }
  }
}

// scores[row][key], not scaled.
template <int kRows>
KP_PRIMITIVE void multiply_keys(const StepArguments& arguments, int64_t first_row, float* scores) {
  constexpr int kKeys = 4;
  const float* queries = arguments.queries + first_row * arguments.pitch;
  for (int64_t key = 0; key < kTileKeys; key += kKeys) {
    const float* keys = arguments.keys + key * arguments.pitch;
    Vec sums[kRows][kKeys] = {};
    for (int64_t j = 0; j < arguments.pitch; j += kLanes) {
      Vec loaded[kKeys];
      for (int k = 0; k < kKeys; ++k) loaded[k] = cpu::load(keys + k * arguments.pitch + j);
      for (int row = 0; row < kRows; ++row) {
        const Vec query = cpu::load(queries + row * arguments.pitch + j);
        for (int k = 0; k < kKeys; ++k) sums[row][k] = cpu::fma(query, loaded[k], sums[row][k]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kKeys; ++k) scores[row * kTileKeys + key + k] = cpu::horizontal_sum(sums[row][k]);
    }
  }
}

KP_PRIMITIVE Vec lane_numbers() {
  Vec numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i);  // a constant
  return numbers;
}

// From products to weights; returns what the row's sums so far are multiplied with.
KP_PRIMITIVE float weigh(const StepArguments& arguments, int64_t row, float* scores) {
  Vec values[kTileVectors];
  Vec most = cpu::broadcast(kMinusInfinity);
  for (int i = 0; i < kTileVectors; ++i) {
    Vec value = cpu::load(scores + i * kLanes) * arguments.scale;
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
    most = cpu::max(most, value);
  }
  const float before = arguments.largest[row], in_tile = cpu::horizontal_max(most);
  const float largest = before > in_tile ? before : in_tile;
  if (largest == kMinusInfinity) {  // nothing is kept yet, and no difference of infinities may be taken
    for (int i = 0; i < kTileVectors; ++i) cpu::store(scores + i * kLanes, Vec{});
    return 1;
  }
  Vec sum{};
  for (int i = 0; i < kTileVectors; ++i) {
    const Vec weights = cpu::exp(values[i] - largest);
    sum += weights;
    cpu::store(scores + i * kLanes, weights);
  }
  const float factor = before == largest ? 1.0f : cpu::exp(cpu::broadcast(before - largest))[0];
  arguments.largest[row] = largest;
  arguments.sums[row] = arguments.sums[row] * factor + cpu::horizontal_sum(sum);
  return factor;
}

template <int kRows, int kVectors>
KP_PRIMITIVE void add_columns(const StepArguments& arguments, float* outputs, int64_t column, const float* weights,
                              const float* factors) {
  Vec sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kVectors; ++i) {
      sums[row][i] = cpu::load(outputs + row * arguments.value_pitch + column + i * kLanes) * factors[row];
    }
  }
  for (int64_t key = 0; key < kTileKeys; ++key) {
    const float* values = arguments.values + key * arguments.value_pitch + column;
    for (int i = 0; i < kVectors; ++i) {
      const Vec value = cpu::load(values + i * kLanes);
      for (int row = 0; row < kRows; ++row)
        sums[row][i] = cpu::fma(value, weights[row * kTileKeys + key] + Vec{}, sums[row][i]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kVectors; ++i) {
      cpu::store(outputs + row * arguments.value_pitch + column + i * kLanes, sums[row][i]);
    }
  }
}

template <int kRows>
KP_PRIMITIVE void step_rows(const StepArguments& arguments, int64_t first_row) {
  alignas(64) float scores[kRows * kTileKeys];
  multiply_keys<kRows>(arguments, first_row, scores);
  float factors[kRows];
  for (int row = 0; row < kRows; ++row) factors[row] = weigh(arguments, first_row + row, scores + row * kTileKeys);
  float* outputs = arguments.outputs + first_row * arguments.value_pitch;
  int64_t column = 0;
  for (; column + 4 * kLanes <= arguments.value_pitch; column += 4 * kLanes) {
    add_columns<kRows, 4>(arguments, outputs, column, scores, factors);
  }
  for (; column < arguments.value_pitch; column += kLanes) {
    add_columns<kRows, 1>(arguments, outputs, column, scores, factors);
  }
}

void step(const StepArguments& arguments) {
  int64_t row = 0;
  for (; row + 4 <= arguments.rows; row += 4) step_rows<4>(arguments, row);
  for (; row < arguments.rows; ++row) step_rows<1>(arguments, row);
}

}  // namespace

extern const TileKernels kTileKernels = {{copy<float>, copy<BFloat16>, copy<Float16>, copy<Float8E4M3>, copy<Int8>},
                                         step};

}  // namespace kernel_pytorch::paged_attention::KP_ISA_NAMESPACE
