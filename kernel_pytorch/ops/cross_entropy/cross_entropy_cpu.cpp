// Cross entropy of rows on the lanes of the CPU, built once per instruction level. A row comes from memory once; what
// the next pass needs (capped logits, then exponentials) waits in a buffer of the caches, and the gradient leaves by
// stores that bypass them where it is large.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/row_loops.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/cross_entropy/cross_entropy_rows.h"

namespace kernel_pytorch::cross_entropy::KP_ISA_NAMESPACE {
namespace {

using cpu::Vec;

constexpr float kMinusInfinity = -__builtin_inff();

template <class T, bool kCapped, class Lanes>
KP_WORD Vec logit_at(const Rows& block, const T* logits, int64_t j, Lanes lanes) {
  const Vec logit = cpu::load(logits + j, lanes);
  if constexpr (kCapped) {
    return cpu::tanh(logit * (1 / block.softcap)) * block.softcap;
  } else {
    return logit;
  }
}

template <class Lanes>
KP_WORD Vec weight_at(const Rows& block, int64_t j, Lanes lanes) {
  return block.weight == nullptr ? cpu::broadcast(1.0f) : cpu::load(block.weight + block.first_column + j, lanes);
}

struct Totals {
  float largest;
  float sum;           // of e^(z - largest)
  float weighted_sum;  // of w z, with smoothing or partials
};

// First two passes. Afterwards the buffer has the exponentials, or with kCapped the capped logits.
template <class T, bool kCapped>
KP_WORD Totals reduce_row(const Rows& block, const T* logits, const T* next) {
  constexpr bool kKeepsLogits = kCapped || sizeof(T) < 4;  // a float row lies in the caches as it is
  float* buffer = block.buffer;
  const bool sums_logits = block.share != 0 || block.partials != nullptr;
  Vec largest[4], weighted[4] = {};
  for (Vec& chain : largest) chain = cpu::broadcast(kMinusInfinity);
  cpu::for_columns_in_chains<T>(block.columns, [&](int64_t j, int chain, auto lanes) {
    const Vec z = logit_at<T, kCapped>(block, logits, j, lanes);
    if constexpr (kKeepsLogits) cpu::store(buffer + j, z, lanes);
    if (sums_logits) weighted[chain] += z * weight_at(block, j, lanes);              // a partial vector ends in zeros
    largest[chain] = cpu::max(cpu::keep(z, lanes, kMinusInfinity), largest[chain]);  // NaN is found by the sum
  });
  const float most = cpu::horizontal_max(cpu::max(cpu::max(largest[0], largest[1]), cpu::max(largest[2], largest[3])));
  const bool keeps_exponentials = block.gradient != nullptr && !kCapped;
  Vec sums[4] = {};
  cpu::for_columns_in_chains<T>(block.columns, [&](int64_t j, int chain, auto lanes) {
    cpu::prefetch_far(next + j);
    Vec z;
    if constexpr (kKeepsLogits) {
      z = cpu::load(buffer + j, lanes);
    } else {
      z = cpu::load(logits + j, lanes);
    }
    const Vec exponential = cpu::exp(z - most);
    if (keeps_exponentials) cpu::store(buffer + j, exponential, lanes);
    sums[chain] += cpu::keep(exponential, lanes, 0.0f);
  });
  return {most, cpu::horizontal_sum((sums[0] + sums[1]) + (sums[2] + sums[3])),
          cpu::horizontal_sum((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]))};
}

// gradient = along * e - share * w, less `on_target` at the target; times the cap's derivative.
struct Coefficients {
  float along, share, on_target;
  float center;  // e is e^(z - center)
};

template <class T, bool kCapped, bool kFromBuffer, bool kStream>
KP_WORD void write_gradient(const Rows& block, const T* logits, int64_t target_column, Coefficients by, T* gradient) {
  cpu::write_columns<T, kStream>(gradient, block.columns, [&](int64_t j, auto lanes) {
    Vec z{}, exponential;
    if constexpr (kFromBuffer && !kCapped) {
      exponential = cpu::load(block.buffer + j, lanes);
    } else {
      if constexpr (kFromBuffer) {
        z = cpu::load(block.buffer + j, lanes);
      } else {
        z = logit_at<T, kCapped>(block, logits, j, lanes);
      }
      exponential = cpu::exp(z - by.center);
    }
    Vec value = exponential * by.along;
    if (by.share != 0) value -= weight_at(block, j, lanes) * by.share;
    if (static_cast<uint64_t>(target_column - j) < static_cast<uint64_t>(cpu::kLanes)) {
      value[target_column - j] -= by.on_target;
    }
    if constexpr (kCapped) {
      const Vec relative = z * (1 / block.softcap);
      value *= 1.0f - relative * relative;
    }
    return value;
  });
}

template <class T, bool kCapped, bool kFromBuffer>
KP_WORD void write_gradient(const Rows& block, const T* logits, int64_t target_column, Coefficients by, T* gradient) {
  if (block.stream_stores) {
    write_gradient<T, kCapped, kFromBuffer, true>(block, logits, target_column, by, gradient);
  } else {
    write_gradient<T, kCapped, kFromBuffer, false>(block, logits, target_column, by, gradient);
  }
}

template <class T>
KP_WORD void ignore_row(const Rows& block, int64_t row, T* gradient) {
  if (block.loss != nullptr) block.loss[row] = 0;
  if (block.lse != nullptr) block.lse[row] = 0;
  if (block.partials != nullptr) {
    for (int i = 0; i < 4; ++i) block.partials[4 * row + i] = i == 0 ? kMinusInfinity : 0.0f;
  }
  if (gradient == nullptr) return;
  cpu::for_columns<T>(block.columns, [&](int64_t j, auto lanes) { cpu::store(gradient + j, Vec{}, lanes); });
}

template <class T, bool kCapped>
KP_WORD float capped_logit(const Rows& block, const T* logits, int64_t column) {
  return logit_at<T, kCapped>(block, logits, column, cpu::SomeLanes{1})[0];
}

template <class T, bool kCapped>
KP_WORD void run_row(const Rows& block, int64_t row, const T* logits, const T* next, T* gradient) {
  const int64_t target = block.target[row], column = target - block.first_column;
  if (target == block.ignore_index) return ignore_row<T>(block, row, gradient);
  const float target_weight = block.weight == nullptr ? 1.0f : block.weight[target];
  const float on_target = (1 - block.label_smoothing) * target_weight;
  if (block.given_lse != nullptr) {
    const float lse = block.given_lse[row], scale = block.scale * block.grad_loss[row * block.grad_loss_step];
    const float along = on_target + block.share * block.weight_sum + 2 * block.z_loss * lse;
    write_gradient<T, kCapped, false>(block, logits, column,
                                      {scale * along, scale * block.share, scale * on_target, lse}, gradient);
    return;
  }
  const bool is_here = column >= 0 && column < block.columns;
  const float own = is_here ? capped_logit<T, kCapped>(block, logits, column) : 0.0f;  // before it is overwritten
  const Totals totals = reduce_row<T, kCapped>(block, logits, next);
  if (block.partials != nullptr) {
    const float shares[4] = {totals.largest, totals.sum, own, totals.weighted_sum};
    for (int i = 0; i < 4; ++i) block.partials[4 * row + i] = shares[i];
    return;
  }
  const float log_sum = __builtin_logf(totals.sum), lse = totals.largest + log_sum;
  float loss = on_target * ((totals.largest - own) + log_sum);
  if (block.share != 0) loss += block.share * (block.weight_sum * lse - totals.weighted_sum);
  if (block.z_loss != 0) loss += block.z_loss * lse * lse;
  if (block.loss != nullptr) block.loss[row] = loss;
  if (block.lse != nullptr) block.lse[row] = lse;
  if (gradient == nullptr) return;
  const float along = on_target + block.share * block.weight_sum + 2 * block.z_loss * lse;
  write_gradient<T, kCapped, true>(
      block, logits, column,
      {block.scale * along / totals.sum, block.scale * block.share, block.scale * on_target, totals.largest}, gradient);
}

template <class T>
void run_rows(const Rows& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* logits = static_cast<const T*>(block.logits) + i * block.logits_stride_elements;
    const T* next = i + 1 < block.rows ? logits + block.logits_stride_elements : logits;
    T* gradient = block.gradient == nullptr ? nullptr : static_cast<T*>(block.gradient) + i * block.columns;
    if (block.softcap != 0) {
      run_row<T, true>(block, i, logits, next, gradient);
    } else {
      run_row<T, false>(block, i, logits, next, gradient);
    }
  }
  if (block.stream_stores) cpu::stream_fence();
}

template <class T>
void rescale(const RescaleRun& run) {
  T* tensor = static_cast<T*>(run.tensor);
  cpu::write_columns<T, false>(tensor, run.elements,
                               [&](int64_t j, auto lanes) { return cpu::load(tensor + j, lanes) * run.factor; });
}

}  // namespace

extern const RowKernels kRowKernels[kTypesCount] = {
    {run_rows<float>, rescale<float>}, {run_rows<BFloat16>, rescale<BFloat16>}, {run_rows<Float16>, rescale<Float16>}};

}  // namespace kernel_pytorch::cross_entropy::KP_ISA_NAMESPACE
