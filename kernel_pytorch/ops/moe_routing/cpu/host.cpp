// The host side of the CPU kernels. Tokens are cut into parts by their number alone, so that threads do not show:
// the parts choose, their counts become where each part's rows of an expert begin, and the parts write the rows.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/moe_routing/cpu/rows.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::moe_routing {
namespace {

constexpr int64_t kPartTokens = 64, kMostParts = 256;

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.logits.dtype, device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(problem.logits.dtype, device));
}

const RowKernels& kernels_of(CpuIsa isa, DType dtype) {
  return KP_AT_CPU_LEVEL(isa, kRowKernels)[cpu_type_index(dtype)];
}

int64_t part_tokens(int64_t tokens) {
  return std::max(kPartTokens, (tokens + kMostParts - 1) / kMostParts);
}

const char* token_start(const TensorView& logits, int64_t token) {
  return logits.as<const char>() + token * logits.strides[0] * size_of(logits.dtype);
}

struct Placed {
  const int32_t* counts;  // of each expert
};

bool is_here(int32_t expert, int64_t experts) {
  return expert >= 0 && expert < experts;
}

// Gives every pair its row. `counts` are those of each part of the tokens, [parts, experts]; weights of pairs that are
// dropped become 0, where there are weights.
Placed place(const Permute& problem, float* weights, std::vector<int32_t>& counts, Context& context) {
  const int64_t tokens = problem.experts.sizes[0], k = problem.experts.sizes[1], experts = problem.num_experts;
  const int64_t each = part_tokens(tokens), parts = (tokens + each - 1) / each;
  int64_t dropped = 0, next = 0;
  std::vector<int32_t> starts(static_cast<size_t>(experts));
  for (int64_t e = 0; e < experts; ++e) {  // counts become the number of earlier pairs of the same expert
    int32_t count = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t of_part = std::exchange(counts[part * experts + e], count);
      count += of_part;
    }
    starts[e] = static_cast<int32_t>(next);
    const int64_t kept = problem.capacity == 0 ? count : std::min<int64_t>(count, problem.capacity);
    next += kept;
    dropped += count - kept;
    problem.offsets.as<int32_t>()[e] = static_cast<int32_t>(next);
    problem.counts.as<int32_t>()[e] = count;
  }
  parallel_for(context.threads, parts, [&](int64_t part) {
    int32_t* ranks = counts.data() + part * experts;
    for (int64_t pair = part * each * k; pair < std::min((part + 1) * each, tokens) * k; ++pair) {
      const int32_t expert = problem.experts.as<const int32_t>()[pair];
      int32_t row = -1;
      if (is_here(expert, experts)) {
        const int32_t rank = ranks[expert]++;
        if (problem.capacity == 0 || rank < problem.capacity) row = starts[expert] + rank;
      }
      problem.row_of_token.as<int32_t>()[pair] = row;
      if (row >= 0) {
        problem.token_of_row.as<int32_t>()[row] = static_cast<int32_t>(pair / k);
      } else if (weights != nullptr) {
        weights[pair] = 0;
      }
    }
  });
  std::fill(problem.token_of_row.as<int32_t>() + next, problem.token_of_row.as<int32_t>() + tokens * k, -1);
  *problem.dropped.as<int32_t>() = static_cast<int32_t>(dropped);
  return {problem.counts.as<const int32_t>()};
}

void run_permute(const Permute& problem, int, Context& context) {
  const int64_t tokens = problem.experts.sizes[0], k = problem.experts.sizes[1], experts = problem.num_experts;
  const int64_t each = part_tokens(tokens), parts = (tokens + each - 1) / each;
  std::vector<int32_t> counts(static_cast<size_t>(parts * experts));
  parallel_for(context.threads, parts, [&](int64_t part) {
    for (int64_t pair = part * each * k; pair < std::min((part + 1) * each, tokens) * k; ++pair) {
      const int32_t expert = problem.experts.as<const int32_t>()[pair];
      if (is_here(expert, experts)) ++counts[part * experts + expert];
    }
  });
  place(problem, nullptr, counts, context);
}

void run_forward(const Forward& problem, int, Context& context) {
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1], k = problem.k;
  const int64_t each = part_tokens(tokens), parts = (tokens + each - 1) / each;
  const RowKernels& kernels = kernels_of(context.info->cpu.isa, problem.logits.dtype);
  std::vector<int32_t> counts(static_cast<size_t>(parts * experts));
  std::vector<float> shares(static_cast<size_t>(parts * experts));
  std::vector<double> squares(static_cast<size_t>(parts));
  parallel_for(context.threads, parts, [&](int64_t part) {
    const int64_t first = part * each;
    ChooseTask task{.logits = token_start(problem.logits, first),
                    .stride = problem.logits.strides[0],
                    .bias = problem.bias.as<const float>(),
                    .tokens = std::min(each, tokens - first),
                    .experts = experts,
                    .k = k,
                    .groups = problem.groups,
                    .group_k = problem.group_k,
                    .group_top = problem.group_top,
                    .is_sigmoid = problem.score == Score::kSigmoid,
                    .renormalize = problem.renormalize,
                    .scale = static_cast<float>(problem.scale),
                    .weights = problem.weights.as<float>() + first * k,
                    .chosen = problem.experts.as<int32_t>() + first * k,
                    .counts = counts.data() + part * experts,
                    .shares = shares.data() + part * experts};
    kernels.choose(task);
    squares[part] = task.z_sum;
  });
  const Placed placed = place({.experts = problem.experts,
                               .num_experts = experts,
                               .capacity = problem.capacity,
                               .offsets = problem.offsets,
                               .counts = problem.counts,
                               .token_of_row = problem.token_of_row,
                               .row_of_token = problem.row_of_token,
                               .dropped = problem.dropped},
                              problem.weights.as<float>(), counts, context);
  double aux = 0;
  for (int64_t e = 0; e < experts; ++e) {
    double share = 0;
    for (int64_t part = 0; part < parts; ++part) share += shares[part * experts + e];
    aux += placed.counts[e] * share;
  }
  const auto of_tokens = static_cast<double>(std::max<int64_t>(tokens, 1));
  double square = 0;
  for (const double one : squares) square += one;
  *problem.aux_loss.as<float>() =
      static_cast<float>(aux * static_cast<double>(experts) / (of_tokens * of_tokens * static_cast<double>(k)));
  *problem.z_loss.as<float>() = static_cast<float>(square / of_tokens);
}

void run_backward(const Backward& problem, int, Context& context) {
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1], k = problem.k;
  if (tokens == 0) return;
  const RowKernels& kernels = kernels_of(context.info->cpu.isa, problem.logits.dtype);
  const auto of_tokens = static_cast<double>(tokens);
  std::vector<float> of_shares;
  if (problem.grad_aux_loss.is_present()) {
    const double factor = *problem.grad_aux_loss.as<const float>() * static_cast<double>(experts) /
                          (of_tokens * of_tokens * static_cast<double>(k));
    for (int64_t e = 0; e < experts; ++e) {
      of_shares.push_back(static_cast<float>(factor * problem.counts.as<const int32_t>()[e]));
    }
  }
  const double of_square = problem.grad_z_loss.is_present() ? *problem.grad_z_loss.as<const float>() / of_tokens : 0;
  const int64_t each = part_tokens(tokens);
  parallel_for(context.threads, (tokens + each - 1) / each, [&](int64_t part) {
    const int64_t first = part * each;
    const float* grad_weights = problem.grad_weights.as<const float>();
    kernels.differentiate(
        {.logits = token_start(problem.logits, first),
         .stride = problem.logits.strides[0],
         .tokens = std::min(each, tokens - first),
         .experts = experts,
         .k = k,
         .is_sigmoid = problem.score == Score::kSigmoid,
         .renormalize = problem.renormalize,
         .scale = static_cast<float>(problem.scale),
         .grad_weights = grad_weights == nullptr ? nullptr : grad_weights + first * k,
         .chosen = problem.experts.as<const int32_t>() + first * k,
         .rows = problem.row_of_token.as<const int32_t>() + first * k,
         .of_shares = of_shares.empty() ? nullptr : of_shares.data(),
         .of_square = static_cast<float>(of_square),
         .grad_logits = problem.grad_logits.as<char>() + first * experts * size_of(problem.grad_logits.dtype)});
  });
}

uint64_t code_version() {
  return hash_text("moe_routing cpu 1");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCpu{
    .name = "cpu", .supports = supports_forward, .run = run_forward, .source_hash = code_version};
constinit const registry::Kernel<Backward> kBackwardCpu{
    .name = "cpu", .supports = supports_backward, .run = run_backward, .source_hash = code_version};
constinit const registry::Kernel<Permute> kPermuteCpu{
    .name = "cpu", .supports = supports_on_cpu<Permute>, .run = run_permute, .source_hash = code_version};

}  // namespace kernel_pytorch::moe_routing
