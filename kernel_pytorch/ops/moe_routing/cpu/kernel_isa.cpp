// Tokens one by one: a row of logits becomes scores in a buffer that stays in the first cache, and the best are found
// by as many searches for a maximum as there are experts to choose.
#include "kernel_pytorch/cpu/load_store.h"
#include "kernel_pytorch/cpu/vec_math.h"
#include "kernel_pytorch/ops/moe_routing/cpu/rows.h"

namespace kernel_pytorch::moe_routing::KP_ISA_NAMESPACE {
namespace {

using cpu::kLanes;
using cpu::Vec;

constexpr int64_t kMostExperts = 1024, kMostChosen = 16, kMostGroups = 32;
constexpr float kLowest = -__builtin_inff();
constexpr float kTaken = __builtin_nanf("");
constexpr float kLeastSum = 1e-20f;

// Buffers of a token, padded to whole vectors.
struct alignas(64) Row {
  float logits[kMostExperts];   // -inf in the padding
  float softmax[kMostExperts];  // zeros in the padding
  float scores[kMostExperts];   // likewise
  float keys[kMostExperts];     // NaN where an expert cannot be chosen
};
struct Sums {
  float lse, total;  // total: of the scores
};

template <class T>
KP_PRIMITIVE Sums read_row(const T* from, int64_t experts, bool is_sigmoid, Row& row) {
  Vec largest = cpu::broadcast(kLowest);
  for (int64_t e = 0; e < experts; e += kLanes) {
    Vec x;
    if (e + kLanes <= experts) {
      x = cpu::load(from + e);
    } else {
      x = cpu::load_partial(from + e, experts - e);
      for (int64_t i = experts - e; i < kLanes; ++i) x[i] = kLowest;
    }
    cpu::store(row.logits + e, x);
    largest = cpu::max(x, largest);  // the second where the first is NaN
  }
  const float most = cpu::horizontal_max(largest);
  Vec sum{}, total{};
  for (int64_t e = 0; e < experts; e += kLanes) {
    const Vec x = cpu::load(row.logits + e), power = cpu::exp(x - most);
    sum += power;
    cpu::store(row.softmax + e, power);
    if (is_sigmoid) {
      const Vec score = cpu::sigmoid(x);
      total += score;
      cpu::store(row.scores + e, score);
    }
  }
  const float of_powers = cpu::horizontal_sum(sum), factor = 1.0f / of_powers;
  for (int64_t e = 0; e < experts; e += kLanes) {
    const Vec probability = cpu::load(row.softmax + e) * factor;
    cpu::store(row.softmax + e, probability);
    if (!is_sigmoid) cpu::store(row.scores + e, probability);
  }
  return {most + cpu::log(cpu::broadcast(of_powers))[0], is_sigmoid ? cpu::horizontal_sum(total) : 1.0f};
}

// The first index of the largest key, which is then taken.
KP_PRIMITIVE int64_t take_highest(float* keys, int64_t count) {
  Vec largest = cpu::broadcast(kLowest);
  for (int64_t e = 0; e < count; e += kLanes) largest = cpu::max(cpu::load(keys + e), largest);
  const float most = cpu::horizontal_max(largest);
  int64_t at = 0;
  while (!(keys[at] == most)) ++at;
  keys[at] = kTaken;
  return at;
}

KP_PRIMITIVE float ordered(float value) {
  return value == value ? value : kLowest;
}

// Keys of experts whose groups are not among the best become taken. Groups are as good as their best experts.
KP_PRIMITIVE void keep_groups(const ChooseTask& task, const Row& row, float* keys) {
  const int64_t each = task.experts / task.groups;
  alignas(64) float quality[kMostGroups + kLanes];
  for (int64_t i = 0; i < task.groups + kLanes && i < kMostGroups + kLanes; ++i) quality[i] = kTaken;
  for (int64_t group = 0; group < task.groups; ++group) {
    float best = kLowest, second = kLowest;
    for (int64_t e = group * each; e < (group + 1) * each; ++e) {
      const float value = ordered(row.scores[e] + (task.bias == nullptr ? 0.0f : task.bias[e]));
      if (value > best) {
        second = best;
        best = value;
      } else if (value > second) {
        second = value;
      }
    }
    quality[group] = task.group_top == 2 && each > 1 ? best + second : best;
  }
  bool is_kept[kMostGroups] = {};
  for (int64_t i = 0; i < task.group_k; ++i) is_kept[take_highest(quality, task.groups)] = true;
  for (int64_t e = 0; e < task.experts; ++e) {
    if (!is_kept[e / each]) keys[e] = kTaken;
  }
}

template <class T>
void choose(ChooseTask& task) {
  Row row;
  for (int64_t token = 0; token < task.tokens; ++token) {
    const T* from = static_cast<const T*>(task.logits) + token * task.stride;
    const Sums sums = read_row(from, task.experts, task.is_sigmoid, row);
    task.z_sum += static_cast<double>(sums.lse) * sums.lse;
    const float share = 1.0f / sums.total;
    for (int64_t e = 0; e < task.experts; e += kLanes) {
      const Vec added = cpu::load(row.scores + e) * share;
      if (e + kLanes <= task.experts) {
        cpu::store(task.shares + e, cpu::load(task.shares + e) + added);
      } else {
        const int64_t count = task.experts - e;
        cpu::store_partial(task.shares + e, cpu::load_partial(task.shares + e, count) + added, count);
      }
    }
    const int64_t padded = (task.experts + kLanes - 1) / kLanes * kLanes;
    for (int64_t e = 0; e < task.experts; ++e) {
      row.keys[e] = ordered(task.bias == nullptr ? row.logits[e] : row.scores[e] + task.bias[e]);
    }
    for (int64_t e = task.experts; e < padded; ++e) row.keys[e] = kTaken;
    if (task.groups > 1) keep_groups(task, row, row.keys);
    float sum = 0;
    for (int64_t j = 0; j < task.k; ++j) {
      const int64_t expert = take_highest(row.keys, task.experts);
      task.chosen[token * task.k + j] = static_cast<int32_t>(expert);
      ++task.counts[expert];
      sum += row.scores[expert];
    }
    const float factor = task.renormalize ? task.scale / (sum + kLeastSum) : task.scale;
    for (int64_t j = 0; j < task.k; ++j) {
      task.weights[token * task.k + j] = row.scores[task.chosen[token * task.k + j]] * factor;
    }
  }
}

template <class T>
void differentiate(const GradientTask& task) {
  Row row;
  for (int64_t token = 0; token < task.tokens; ++token) {
    const T* from = static_cast<const T*>(task.logits) + token * task.stride;
    const Sums sums = read_row(from, task.experts, task.is_sigmoid, row);
    const int32_t* chosen = task.chosen + token * task.k;
    float* of_scores = row.keys;
    const int64_t padded = (task.experts + kLanes - 1) / kLanes * kLanes;
    for (int64_t e = 0; e < padded; ++e) of_scores[e] = 0;
    if (task.of_shares != nullptr) {
      float mean = 0;
      if (task.is_sigmoid) {
        for (int64_t e = 0; e < task.experts; ++e) mean += task.of_shares[e] * row.scores[e];
        mean /= sums.total;
      }
      for (int64_t e = 0; e < task.experts; ++e) of_scores[e] = (task.of_shares[e] - mean) / sums.total;
    }
    if (task.grad_weights != nullptr) {
      float gradients[kMostChosen], sum = kLeastSum, product = 0;
      for (int64_t j = 0; j < task.k; ++j) {
        const int64_t pair = token * task.k + j;
        gradients[j] = task.rows[pair] >= 0 ? task.grad_weights[pair] : 0.0f;
        sum += row.scores[chosen[j]];
        product += gradients[j] * row.scores[chosen[j]];
      }
      for (int64_t j = 0; j < task.k; ++j) {
        of_scores[chosen[j]] += task.scale * (task.renormalize ? (gradients[j] - product / sum) / sum : gradients[j]);
      }
    }
    Vec products{};
    for (int64_t e = 0; e < padded; e += kLanes) products += cpu::load(of_scores + e) * cpu::load(row.scores + e);
    const float product = cpu::horizontal_sum(products), of_lse = task.of_square * 2 * sums.lse;
    T* to = static_cast<T*>(task.grad_logits) + token * task.experts;
    for (int64_t e = 0; e < task.experts; e += kLanes) {
      const Vec score = cpu::load(row.scores + e), gradient = cpu::load(of_scores + e);
      const Vec through = task.is_sigmoid ? gradient * score * (1.0f - score) : score * (gradient - product);
      const Vec result = through + of_lse * cpu::load(row.softmax + e);
      e + kLanes <= task.experts ? cpu::store(to + e, result) : cpu::store_partial(to + e, result, task.experts - e);
    }
  }
}

}  // namespace

extern const RowKernels kRowKernels[3];
constinit const RowKernels kRowKernels[3] = {{choose<float>, differentiate<float>},
                                             {choose<BFloat16>, differentiate<BFloat16>},
                                             {choose<Float16>, differentiate<Float16>}};

}  // namespace kernel_pytorch::moe_routing::KP_ISA_NAMESPACE
