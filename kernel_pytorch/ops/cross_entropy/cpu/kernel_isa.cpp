// Cross entropy of rows on the lanes of the CPU, built once per instruction level. A row comes from memory once; what
// the next pass needs (capped logits, then exponentials) waits in a buffer of the caches, and the gradient leaves by
// stores that bypass them where it is large.
#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cpu/row_loops.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/cross_entropy/cpu/rows.h"

namespace kernel_pytorch::cross_entropy::KP_ISA_NAMESPACE {
namespace {

using cpu::Vec;

constexpr float kMinusInfinity = -__builtin_inff();

struct Totals {
  float largest;
  float sum;               // of e^(z - largest)
  float weighted_sum = 0;  // of w z, with smoothing or partials
};

// gradient = along * e^(z - center) - share * w, less `on_target` at the target; times the cap's derivative.
struct Coefficients {
  float along, share, on_target, center;
};

KP_PRIMITIVE Vec less_on_target(Vec value, int64_t place, float on_target) {
  if (static_cast<uint64_t>(place) < static_cast<uint64_t>(cpu::kLanes)) value[place] -= on_target;
  return value;
}

// Plain rows: no cap, no class weights. The loop uses the cheapest order (row_loops.h); the buffer has
// the exponentials afterwards, by slot.
template <class T>
KP_PRIMITIVE Totals reduce_plain(const Rows& block, const T* logits, const T* next) {
  Vec largest[2] = {cpu::broadcast(kMinusInfinity), cpu::broadcast(kMinusInfinity)}, sums[2] = {}, values[2] = {};
  cpu::for_slots<T>(logits, block.columns, [&](Vec z, int64_t, int chain, auto lanes) {
    values[chain] += z;                                                              // zeros past the end
    largest[chain] = cpu::max(cpu::keep(z, lanes, kMinusInfinity), largest[chain]);  // NaN is found by the sum
  });
  const float most = cpu::horizontal_max(cpu::max(largest[0], largest[1]));
  float* const buffer = block.buffer;
  cpu::for_slots<T>(logits, block.columns, [&](Vec z, int64_t slot, int chain, auto lanes) {
    cpu::prefetch_far(next + slot);
    const Vec term = cpu::exp_fast(z - most);
    cpu::store(buffer + slot, term, lanes);
    sums[chain] += cpu::keep(term, lanes, 0.0f);
  });
  return {most, cpu::horizontal_sum(sums[0] + sums[1]), cpu::horizontal_sum(values[0] + values[1])};
}

template <class T, bool kStream>
KP_PRIMITIVE void write_plain(const Rows& block, int64_t target_column, Coefficients by, T* gradient) {
  const int64_t target_slot = cpu::slot_of<T>(target_column, block.columns);
  const float* const buffer = block.buffer;
  cpu::write_slots<T, kStream>(gradient, block.columns, [=](int64_t slot, auto lanes) {
    const Vec value = cpu::load(buffer + slot, lanes) * by.along - by.share;
    return less_on_target(value, target_slot - slot, by.on_target);
  });
}

// Other rows: their capped logits as floats in the buffer, in the order of the columns.
template <class T>
KP_PRIMITIVE void store_logits(const Rows& block, const T* logits) {
  cpu::for_columns<T>(block.columns, [&](int64_t j, auto lanes) {
    Vec z = cpu::load(logits + j, lanes);
    if (block.softcap != 0) z = cpu::tanh(z * (1 / block.softcap)) * block.softcap;
    cpu::store(block.buffer + j, z, lanes);
  });
}

template <class Lanes>
KP_PRIMITIVE Vec weight_at(const Rows& block, int64_t j, Lanes lanes) {
  return block.weight == nullptr ? cpu::broadcast(1.0f) : cpu::load(block.weight + block.first_column + j, lanes);
}

Totals reduce_buffer(const Rows& block) {
  Vec largest = cpu::broadcast(kMinusInfinity), sums[2] = {}, weighted = {};
  cpu::for_columns<float>(block.columns, [&](int64_t j, auto lanes) {
    const Vec z = cpu::load(block.buffer + j, lanes);
    weighted += z * weight_at(block, j, lanes);
    largest = cpu::max(cpu::keep(z, lanes, kMinusInfinity), largest);
  });
  const float most = cpu::horizontal_max(largest);
  cpu::for_slots<float>(block.buffer, block.columns, [&](Vec z, int64_t, int chain, auto lanes) {
    sums[chain] += cpu::keep(cpu::exp_fast(z - most), lanes, 0.0f);
  });
  return {most, cpu::horizontal_sum(sums[0] + sums[1]), cpu::horizontal_sum(weighted)};
}

template <class T, bool kStream>
KP_PRIMITIVE void write_buffer(const Rows& block, int64_t target_column, Coefficients by, T* gradient) {
  const float per_cap = block.softcap == 0 ? 0.0f : 1 / block.softcap;
  cpu::write_columns<T, kStream>(gradient, block.columns, [&](int64_t j, auto lanes) {
    const Vec z = cpu::load(block.buffer + j, lanes), relative = z * per_cap;
    Vec value = cpu::exp_fast(z - by.center) * by.along;
    if (by.share != 0) value -= weight_at(block, j, lanes) * by.share;
    return less_on_target(value, target_column - j, by.on_target) * (1.0f - relative * relative);
  });
}

template <class T>
KP_PRIMITIVE void ignore_row(const Rows& block, int64_t row, T* gradient) {
  if (block.loss != nullptr) block.loss[row] = 0;
  if (block.lse != nullptr) block.lse[row] = 0;
  if (block.partials != nullptr) {
    for (int i = 0; i < 4; ++i) block.partials[4 * row + i] = i == 0 ? kMinusInfinity : 0.0f;
  }
  if (gradient == nullptr) return;
  cpu::for_columns<T>(block.columns, [&](int64_t j, auto lanes) { cpu::store(gradient + j, Vec{}, lanes); });
}

KP_PRIMITIVE void store_losses(const Rows& block, int64_t row, Totals totals, float own, float on_target) {
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
}

KP_PRIMITIVE Coefficients coefficients_of(const Rows& block, float on_target, float lse, float scale) {
  const float along = on_target + block.share * block.weight_sum + 2 * block.z_loss * lse;
  return {scale * along, scale * block.share, scale * on_target, lse};
}
KP_PRIMITIVE Coefficients coefficients_of(const Rows& block, float on_target, Totals totals) {
  Coefficients by = coefficients_of(block, on_target, totals.largest + __builtin_logf(totals.sum), block.scale);
  by.along /= totals.sum;
  by.center = totals.largest;
  return by;
}

template <class T, bool kStream>
KP_PRIMITIVE void run_row(const Rows& block, int64_t row, const T* logits, const T* next, T* gradient) {
  const int64_t target = block.target_is_wide ? static_cast<const int64_t*>(block.target)[row]
                                              : static_cast<const int32_t*>(block.target)[row];
  const int64_t column = target - block.first_column;
  if (target == block.ignore_index) return ignore_row<T>(block, row, gradient);
  const float on_target = (1 - block.label_smoothing) * (block.weight == nullptr ? 1.0f : block.weight[target]);
  const bool is_plain = block.softcap == 0 && (block.weight == nullptr || block.share == 0);
  if (is_plain && block.given_lse == nullptr) {
    const bool is_here = column >= 0 && column < block.columns;
    const float own = is_here ? cpu::load_partial(logits + column, 1)[0] : 0.0f;  // before it is overwritten
    const Totals totals = reduce_plain(block, logits, next);
    store_losses(block, row, totals, own, on_target);
    if (gradient != nullptr) {
      write_plain<T, kStream>(block, column, coefficients_of(block, on_target, totals), gradient);
    }
    return;
  }
  store_logits(block, logits);
  Coefficients by;
  if (block.given_lse != nullptr) {
    const float scale = block.scale * block.grad_loss[row * block.grad_loss_step];
    by = coefficients_of(block, on_target, block.given_lse[row], scale);
  } else {
    const float own = column >= 0 && column < block.columns ? block.buffer[column] : 0.0f;
    const Totals totals = reduce_buffer(block);
    store_losses(block, row, totals, own, on_target);
    by = coefficients_of(block, on_target, totals);
  }
  if (gradient != nullptr) write_buffer<T, kStream>(block, column, by, gradient);
}

template <class T>
void run_rows(const Rows& block) {
  for (int64_t i = 0; i < block.rows; ++i) {
    const T* logits = static_cast<const T*>(block.logits) + i * block.logits_stride_elements;
    const T* next = i + 1 < block.rows ? logits + block.logits_stride_elements : logits;
    T* gradient = block.gradient == nullptr ? nullptr : static_cast<T*>(block.gradient) + i * block.columns;
    if (block.stream_stores) {
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
