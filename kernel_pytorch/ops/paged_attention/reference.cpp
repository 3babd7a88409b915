// The references: scalar, in double, key by key.
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

int64_t offset_in(const TensorView& cache, int64_t page, int64_t row, int64_t head) {
  return page * cache.strides[0] + row * cache.strides[1] + head * cache.strides[2];
}

struct Row {
  const Attend& problem;
  int64_t request, query, head;
  Request tokens;

  int64_t key_head() const { return head / (problem.query.sizes[1] / problem.key_cache.sizes[2]); }
  int64_t token() const { return tokens.first_query + query; }

  bool keeps(int64_t key) const {
    const int64_t new_key = key - (tokens.keys - tokens.queries);
    if (!problem.mask.is_present() || new_key < 0) return true;
    const TensorView& mask = problem.mask;
    return mask.as<const bool>()[request * mask.strides[0] + query * mask.strides[1] + new_key * mask.strides[2]];
  }
  double score(int64_t page, int64_t row, int64_t key) const {
    const TensorView& cache = problem.key_cache;
    const int64_t from = offset_in(cache, page, row, key_head()),
                  own = token() * problem.query.strides[0] + head * problem.query.strides[1];
    double sum = 0;
    for (int64_t i = 0; i < cache.sizes[3]; ++i) {
      sum += load_element(problem.query.data, problem.query.dtype, own + i) *
             load_element(cache.data, cache.dtype, from + i);
    }
    sum *= problem.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(cache.sizes[3], 1)))) *
           scale_at(problem.key_scale, page, row, key_head());
    if (problem.softcap > 0) sum = problem.softcap * std::tanh(sum / problem.softcap);
    if (problem.alibi_slopes.is_present()) {
      sum -= double{problem.alibi_slopes.as<const float>()[head]} *
             std::abs(static_cast<double>(key - tokens.position(query)));
    }
    return sum;
  }
};

void store_row(const Row& row, const std::vector<double>& values, double lse) {
  const TensorView& output = row.problem.output;
  const int64_t place = row.token() * output.strides[0] + row.head * output.strides[1];
  for (size_t i = 0; i < values.size(); ++i) {
    store_element(output.data, output.dtype, place + static_cast<int64_t>(i), values[i]);
  }
  if (!row.problem.lse.is_present()) return;
  row.problem.lse.as<float>()[row.head * row.problem.query.sizes[0] + row.token()] = static_cast<float>(lse);
}

void attend_row(const Row& row) {
  const Attend& problem = row.problem;
  const TensorView& cache = problem.value_cache;
  const int64_t page_size = cache.sizes[1];
  const KeyRange range = keys_seen(problem, row.tokens, row.tokens.position(row.query));
  struct Kept {
    int64_t page, row;
    double score;
  };
  std::vector<Kept> kept;
  double largest = problem.sinks.is_present() ? problem.sinks.as<const float>()[row.head] : kMinusInfinity;
  for (int64_t key = range.first; key < range.last; ++key) {
    const int64_t page = page_of(problem, row.request, key);
    if (page < 0 || !row.keeps(key)) continue;
    kept.push_back({page, key % page_size, row.score(page, key % page_size, key)});
    largest = std::max(largest, kept.back().score);
  }
  std::vector<double> values(static_cast<size_t>(cache.sizes[3]));
  if (largest == kMinusInfinity) return store_row(row, values, kMinusInfinity);
  double sum = problem.sinks.is_present() ? std::exp(problem.sinks.as<const float>()[row.head] - largest) : 0;
  for (const Kept& key : kept) {
    const double weight = std::exp(key.score - largest);
    sum += weight;
    const double scaled = weight * scale_at(problem.value_scale, key.page, key.row, row.key_head());
    const int64_t from = offset_in(cache, key.page, key.row, row.key_head());
    for (int64_t i = 0; i < cache.sizes[3]; ++i) {
      values[static_cast<size_t>(i)] += scaled * load_element(cache.data, cache.dtype, from + i);
    }
  }
  for (double& value : values) value /= sum;
  store_row(row, values, largest + std::log(sum));
}

void run_attend(const Attend& problem, int, Context&) {
  const int64_t requests = problem.seq_lens.sizes[0], tokens = problem.query.sizes[0];
  int64_t next = 0;
  for (int64_t request = 0; request <= requests; ++request) {
    // The last turn is of the tokens that belong to nobody: no keys.
    const Request own = request < requests ? request_at(problem, request) : Request{next, tokens - next, 0};
    next = own.first_query + own.queries;
    for (int64_t query = 0; query < own.queries; ++query) {
      for (int64_t head = 0; head < problem.query.sizes[1]; ++head) {
        const Row row{problem, request, query, head, own};
        if (request < requests) {
          attend_row(row);
        } else {
          store_row(row, std::vector<double>(static_cast<size_t>(problem.value_cache.sizes[3])), kMinusInfinity);
        }
      }
    }
  }
}

// In fp32, as every kernel computes: a number that was rounded elsewhere would give other codes.
void append_row(std::vector<float>& values, const TensorView& cache, float divisor, int64_t to) {
  const bool is_scaled = cache.dtype == DType::kFloat8E4M3 || cache.dtype == DType::kInt8;
  for (size_t i = 0; i < values.size(); ++i) {
    float value = is_scaled ? values[i] / divisor : values[i];
    if (cache.dtype == DType::kInt8) value = std::isnan(value) ? 0 : std::clamp(std::nearbyint(value), -128.0f, 127.0f);
    store_element(cache.data, cache.dtype, to + static_cast<int64_t>(i), value);
  }
}

void turn(const Append& problem, int64_t token, std::vector<float>& values) {
  const Rotation rotation = rotation_of(problem);
  const int64_t row = checked_row(problem, token);
  const auto at = [&](const TensorView& table, int64_t pair) {
    const int64_t place = row * table.strides[0] + pair * rotation.step * table.strides[1];
    return static_cast<float>(load_element(table.data, table.dtype, place));
  };
  for (int64_t i = 0; i < rotation.pairs; ++i) {
    float& first = values[static_cast<size_t>(problem.interleaved ? 2 * i : i)];
    float& second = values[static_cast<size_t>(problem.interleaved ? 2 * i + 1 : i + rotation.pairs)];
    const float a = first, b = second, cosine = at(problem.cos, i), sine = at(problem.sin, i);
    first = std::fma(a, cosine, -(b * sine));
    second = std::fma(b, cosine, a * sine);
  }
}

void run_append(const Append& problem, int, Context&) {
  for (int64_t token = 0; token < problem.key.sizes[0]; ++token) {
    const int64_t slot = checked_slot(problem, token);
    if (slot < 0) continue;
    const int64_t page = slot / problem.key_cache.sizes[1], row = slot % problem.key_cache.sizes[1];
    for (int64_t head = 0; head < problem.key_cache.sizes[2]; ++head) {
      const auto write = [&](const TensorView& rows, const TensorView& cache, const TensorView& scale, bool is_turned) {
        std::vector<float> values(static_cast<size_t>(cache.sizes[3]));
        const int64_t from = token * rows.strides[0] + head * rows.strides[1];
        for (size_t i = 0; i < values.size(); ++i) {
          values[i] = static_cast<float>(load_element(rows.data, rows.dtype, from + static_cast<int64_t>(i)));
        }
        if (is_turned) turn(problem, token, values);
        append_row(values, cache, scale_at(scale, page, row, head), offset_in(cache, page, row, head));
      };
      write(problem.key, problem.key_cache, problem.key_scale, problem.cos.is_present());
      write(problem.value, problem.value_cache, problem.value_scale, false);
    }
  }
}

uint64_t code_version() {
  return hash_text("paged_attention reference 1");
}

}  // namespace

constinit const registry::Kernel<Attend> kAttendReference{
    .name = "reference", .supports = supports_on_cpu<Attend>, .run = run_attend, .source_hash = code_version};
constinit const registry::Kernel<Append> kAppendReference{
    .name = "reference", .supports = supports_on_cpu<Append>, .run = run_append, .source_hash = code_version};

}  // namespace kernel_pytorch::paged_attention
