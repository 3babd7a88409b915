// The reference: sorts the tokens of a row and goes through them as the contract says.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/ops/sample/operation.h"
#include "kernel_pytorch/ops/sample/weight_cuda.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sample {
namespace {

struct Token {
  uint32_t key;
  int64_t index;
  uint64_t weight;
};

// The sorted tokens that top-k and top-p keep.
size_t kept_by_rank(const std::vector<Token>& sorted, const RowNumbers& numbers) {
  size_t end = sorted.size();
  if (numbers.top_k > 0 && static_cast<size_t>(numbers.top_k) < end) {
    const uint32_t last = sorted[static_cast<size_t>(numbers.top_k) - 1].key;
    end = static_cast<size_t>(numbers.top_k);
    while (end < sorted.size() && sorted[end].key == last) ++end;
  }
  if (!limits_p(numbers.top_p)) return end;
  uint64_t total = 0;
  for (size_t i = 0; i < end; ++i) total += sorted[i].weight;
  const uint64_t goal = goal_of(numbers.top_p, total);
  uint64_t larger = 0;
  for (size_t first = 0; first < end;) {
    if (larger >= goal) return first;
    size_t next = first;
    for (; next < end && sorted[next].key == sorted[first].key; ++next) larger += sorted[next].weight;
    first = next;
  }
  return end;
}

int64_t token_of(const Draw& problem, int64_t row) {
  const RowNumbers numbers = numbers_of(problem, row);
  std::vector<Token> tokens;
  const int64_t begin = row * problem.logits.strides[0];
  for (int64_t i = 0; i < problem.logits.sizes[1]; ++i) {
    const auto logit = static_cast<float>(load_element(problem.logits.data, problem.logits.dtype, begin + i));
    if (key_of(logit) != 0) tokens.push_back({key_of(logit), i, 0});
  }
  if (tokens.empty()) return -1;
  std::stable_sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.key > b.key; });
  if (!(numbers.temperature > kLeastTemperature)) return tokens[0].index;
  const Scale scale = scale_of(value_of_key(tokens[0].key), numbers.temperature);
  for (Token& token : tokens) token.weight = weight_of(scale, value_of_key(token.key));
  tokens.resize(kept_by_rank(tokens, numbers));
  std::erase_if(tokens, [&](const Token& token) { return token.weight < least_weight(numbers.min_p); });
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.index < b.index; });
  uint64_t total = 0;
  for (const Token& token : tokens) total += token.weight;
  const PhiloxBlock bits = philox(numbers.seed, numbers.position, 0);
  const uint64_t target = upper_product(uint64_t{bits.words[1]} << 32 | bits.words[0], total);
  uint64_t sum = 0;
  for (const Token& token : tokens) {
    sum += token.weight;
    if (sum > target) return token.index;
  }
  return -1;  // cannot be: the sum ends above every target
}

void run(const Draw& problem, int, Context&) {
  for (int64_t row = 0; row < problem.logits.sizes[0]; ++row) {
    problem.tokens.as<int32_t>()[row] = static_cast<int32_t>(token_of(problem, row));
  }
}

uint64_t code_version() {
  return hash_text("sample reference 1");
}

}  // namespace

constinit const registry::Kernel<Draw> kDrawReference{
    .name = "reference", .supports = supports_on_cpu<Draw>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::sample
