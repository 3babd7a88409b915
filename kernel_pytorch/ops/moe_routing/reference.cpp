// The reference of the routing: scalar, in double, a stable sort by expert.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::moe_routing {
namespace {

// A token's scores, and the probabilities that the losses are about.
struct Row {
  std::vector<double> logits, scores, softmax, shares;
  double lse = 0, total = 0;  // total: of the scores

  Row(const TensorView& view, int64_t token, Score score) {
    const auto experts = static_cast<size_t>(view.sizes[1]);
    logits.resize(experts), scores.resize(experts), softmax.resize(experts), shares.resize(experts);
    double largest = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t e = 0; e < experts; ++e) {
      logits[e] = load_element(view.data, view.dtype, token * view.strides[0] + static_cast<int64_t>(e));
      largest = std::max(largest, logits[e]);
    }
    for (size_t e = 0; e < experts; ++e) sum += softmax[e] = std::exp(logits[e] - largest);
    lse = largest + std::log(sum);
    for (size_t e = 0; e < experts; ++e) {
      softmax[e] /= sum;
      scores[e] = score == Score::kSoftmax ? softmax[e] : 1 / (1 + std::exp(-logits[e]));
      total += scores[e];
    }
    if (score == Score::kSoftmax) total = 1;
    for (size_t e = 0; e < experts; ++e) shares[e] = scores[e] / total;
  }
};

constexpr double kLowest = -std::numeric_limits<double>::infinity();
double ordered(double value) {
  return std::isnan(value) ? kLowest : value;
}

// The `count` highest of the candidates, of equal ones the lower first.
std::vector<int64_t> highest(const std::vector<double>& keys, std::vector<int64_t> candidates, int64_t count) {
  std::ranges::stable_sort(candidates, [&](int64_t a, int64_t b) { return keys[a] > keys[b]; });
  candidates.resize(static_cast<size_t>(count));
  return candidates;
}

std::vector<int64_t> choose(const Forward& problem, const Row& row) {
  const auto experts = static_cast<int64_t>(row.logits.size());
  std::vector<double> keys(row.logits.size()), quality(row.logits.size());
  for (int64_t e = 0; e < experts; ++e) {
    const bool has_bias = problem.bias.is_present();
    const double bias = has_bias ? load_element(problem.bias.data, problem.bias.dtype, e) : 0;
    quality[e] = ordered(row.scores[e] + bias);
    keys[e] = has_bias ? quality[e] : ordered(row.logits[e]);
  }
  std::vector<int64_t> candidates;
  const int64_t each = experts / problem.groups;
  std::vector<double> of_groups;
  std::vector<int64_t> groups;
  for (int64_t group = 0; group < problem.groups; ++group) {
    std::vector<double> sorted(quality.begin() + group * each, quality.begin() + (group + 1) * each);
    std::ranges::sort(sorted, std::greater<>());
    of_groups.push_back(sorted[0] + (problem.group_top == 2 && each > 1 ? sorted[1] : 0));
    groups.push_back(group);
  }
  groups = highest(of_groups, groups, problem.group_k);
  std::ranges::sort(groups);
  for (const int64_t group : groups) {
    for (int64_t i = 0; i < each; ++i) candidates.push_back(group * each + i);
  }
  return highest(keys, candidates, problem.k);
}

void run_forward(const Forward& problem, int, Context&) {
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1], k = problem.k;
  std::vector<std::vector<int64_t>> pairs(static_cast<size_t>(experts));  // of each expert, in the order of tokens
  std::vector<double> share_sums(static_cast<size_t>(experts));
  double z_sum = 0;
  for (int64_t token = 0; token < tokens; ++token) {
    const Row row(problem.logits, token, problem.score);
    const std::vector<int64_t> chosen = choose(problem, row);
    double sum = 0;
    for (const int64_t e : chosen) sum += row.scores[e];
    const double factor = problem.scale / (problem.renormalize ? sum + kLeastSum : 1);
    for (int64_t j = 0; j < k; ++j) {
      problem.experts.as<int32_t>()[token * k + j] = static_cast<int32_t>(chosen[j]);
      store_element(problem.weights.data, problem.weights.dtype, token * k + j, row.scores[chosen[j]] * factor);
      pairs[chosen[j]].push_back(token * k + j);
    }
    for (int64_t e = 0; e < experts; ++e) share_sums[e] += row.shares[e];
    z_sum += row.lse * row.lse;
  }
  int64_t next = 0, dropped = 0;
  double aux = 0;
  std::fill_n(problem.token_of_row.as<int32_t>(), tokens * k, -1);
  for (int64_t e = 0; e < experts; ++e) {
    const auto count = static_cast<int64_t>(pairs[e].size());
    for (int64_t i = 0; i < count; ++i) {
      const bool is_kept = problem.capacity == 0 || i < problem.capacity;
      problem.row_of_token.as<int32_t>()[pairs[e][i]] = is_kept ? static_cast<int32_t>(next) : -1;
      if (is_kept) {
        problem.token_of_row.as<int32_t>()[next++] = static_cast<int32_t>(pairs[e][i] / k);
      } else {
        store_element(problem.weights.data, problem.weights.dtype, pairs[e][i], 0);
        ++dropped;
      }
    }
    problem.offsets.as<int32_t>()[e] = static_cast<int32_t>(next);
    problem.counts.as<int32_t>()[e] = static_cast<int32_t>(count);
    aux += static_cast<double>(count) * share_sums[e];
  }
  const auto of_tokens = static_cast<double>(std::max<int64_t>(tokens, 1));
  *problem.dropped.as<int32_t>() = static_cast<int32_t>(dropped);
  store_element(problem.aux_loss.data, problem.aux_loss.dtype, 0,
                aux * static_cast<double>(experts) / (of_tokens * of_tokens * static_cast<double>(k)));
  store_element(problem.z_loss.data, problem.z_loss.dtype, 0, z_sum / of_tokens);
}

void run_permute(const Permute& problem, int, Context&) {
  const int64_t pairs = problem.experts.element_count(), k = problem.experts.sizes[1];
  int32_t next = 0, dropped = 0;
  std::fill_n(problem.token_of_row.as<int32_t>(), pairs, -1);
  std::fill_n(problem.row_of_token.as<int32_t>(), pairs, -1);
  for (int64_t e = 0; e < problem.num_experts; ++e) {
    int32_t count = 0;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      if (problem.experts.as<const int32_t>()[pair] != e) continue;
      const bool is_kept = problem.capacity == 0 || count < problem.capacity;
      ++count;
      dropped += !is_kept;
      if (!is_kept) continue;
      problem.token_of_row.as<int32_t>()[next] = static_cast<int32_t>(pair / k);
      problem.row_of_token.as<int32_t>()[pair] = next++;
    }
    problem.counts.as<int32_t>()[e] = count;
    problem.offsets.as<int32_t>()[e] = next;
  }
  *problem.dropped.as<int32_t>() = dropped;
}

double scalar_of(const TensorView& view) {
  return view.is_present() ? load_element(view.data, view.dtype, 0) : 0;
}

void run_backward(const Backward& problem, int, Context&) {
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1], k = problem.k;
  const auto of_tokens = static_cast<double>(tokens);
  const double grad_aux = scalar_of(problem.grad_aux_loss), grad_z = scalar_of(problem.grad_z_loss);
  for (int64_t token = 0; token < tokens; ++token) {
    const Row row(problem.logits, token, problem.score);
    std::vector<double> of_scores(static_cast<size_t>(experts));
    // The share's gradient, through the division by the sum of scores.
    double mean = 0;
    const auto of_share = [&](int64_t e) {
      return grad_aux * static_cast<double>(experts) * problem.counts.as<const int32_t>()[e] /
             (of_tokens * of_tokens * static_cast<double>(k));
    };
    for (int64_t e = 0; e < experts; ++e) mean += of_share(e) * row.shares[e];
    for (int64_t e = 0; e < experts; ++e) {
      of_scores[e] = problem.score == Score::kSoftmax ? of_share(e) : (of_share(e) - mean) / row.total;
    }
    if (problem.grad_weights.is_present()) {
      double sum = 0, product = 0;
      const auto gradient = [&](int64_t j) {
        const bool is_kept = problem.row_of_token.as<const int32_t>()[token * k + j] >= 0;
        return is_kept ? load_element(problem.grad_weights.data, problem.grad_weights.dtype, token * k + j) : 0;
      };
      const int32_t* chosen = problem.experts.as<const int32_t>() + token * k;
      for (int64_t j = 0; j < k; ++j) {
        sum += row.scores[chosen[j]];
        product += gradient(j) * row.scores[chosen[j]];
      }
      for (int64_t j = 0; j < k; ++j) {
        of_scores[chosen[j]] += problem.renormalize
                                    ? problem.scale * (gradient(j) - product / (sum + kLeastSum)) / (sum + kLeastSum)
                                    : problem.scale * gradient(j);
      }
    }
    double product = 0;
    for (int64_t e = 0; e < experts; ++e) product += of_scores[e] * row.scores[e];
    for (int64_t e = 0; e < experts; ++e) {
      const double through = problem.score == Score::kSoftmax ? row.scores[e] * (of_scores[e] - product)
                                                              : of_scores[e] * row.scores[e] * (1 - row.scores[e]);
      store_element(problem.grad_logits.data, problem.grad_logits.dtype, token * experts + e,
                    through + grad_z * 2 * row.lse * row.softmax[e] / of_tokens);
    }
  }
}

uint64_t code_version() {
  return hash_text("moe_routing reference 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardReference{
    .name = "reference", .supports = supports_on_cpu<Backward>, .run = run_backward, .source_hash = code_version};
constinit const registry::Kernel<Permute> kPermuteReference{
    .name = "reference", .supports = supports_on_cpu<Permute>, .run = run_permute, .source_hash = code_version};

}  // namespace kernel_pytorch::moe_routing
