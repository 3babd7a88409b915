// Attention over latent rows on the CPU. Where latent and rope rows lie next to each other, it is paged attention with
// one key head whose values are the first columns of its keys; indices are tables of pages of one key. Otherwise
// (codes, caches apart) the rows of a request are gathered first, as fp32. The reference goes key by key, in double.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"
#include "kernel_pytorch/ops/paged_attention/latent/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::paged_attention {
namespace {

// The keys that some tokens see: slots of the caches, -1 for none.
struct Seen {
  int64_t first_token = 0, tokens = 0;
  std::vector<int64_t> slots{};
};
std::vector<Seen> seen_of(const Latent& problem) {
  std::vector<Seen> all;
  const int64_t page_size = problem.latent_cache.sizes[1], slots = problem.latent_cache.sizes[0] * page_size;
  if (problem.indices.is_present()) {
    const int64_t top = problem.indices.sizes[1];
    for (int64_t token = 0; token < problem.query.sizes[0]; ++token) {
      Seen seen{.first_token = token, .tokens = 1};
      for (int64_t i = 0; i < top; ++i) {
        const int64_t slot = problem.indices.as<const int32_t>()[token * top + i];
        KP_CHECK(slot >= -1 && slot < slots, "mla_decode: indices[", token, ", ", i, "] is ", slot, ", the cache has ",
                 slots, " slots; it must be one of them, or -1");
        seen.slots.push_back(slot);
      }
      all.push_back(std::move(seen));
    }
    return all;
  }
  const Attend attend = attend_of(problem);
  int64_t next = 0;
  for (int64_t request = 0; request < problem.seq_lens.sizes[0]; ++request) {
    const Request own = request_at(attend, request);
    Seen seen{.first_token = own.first_query, .tokens = own.queries};
    for (int64_t key = 0; key < own.keys; ++key) {
      const int64_t page = page_of(attend, request, key);
      seen.slots.push_back(page < 0 ? -1 : page * page_size + key % page_size);
    }
    next = own.first_query + own.queries;
    all.push_back(std::move(seen));
  }
  if (next < problem.query.sizes[0]) all.push_back({.first_token = next, .tokens = problem.query.sizes[0] - next});
  return all;
}

double number_at(const Latent& problem, int64_t slot, int64_t column) {
  const int64_t page = slot / problem.latent_cache.sizes[1], row = slot % problem.latent_cache.sizes[1];
  const int64_t value_size = problem.latent_cache.sizes[2];
  const TensorView& cache = column < value_size ? problem.latent_cache : problem.rope_cache;
  const int64_t inside = column < value_size ? column : column - value_size;
  const double number =
      load_element(cache.data, cache.dtype, page * cache.strides[0] + row * cache.strides[1] + inside);
  if (!problem.latent_scale.is_present() || column >= value_size) return number;
  const TensorView& scale = problem.latent_scale;
  return number * double{scale.as<const float>()[page * scale.strides[0] + row * scale.strides[1] +
                                                 inside / kLatentScaleColumns * scale.strides[2]]};
}

// The positions that the i-th of these tokens sees end here.
int64_t last_seen(const Latent& problem, const Seen& seen, int64_t token) {
  const auto keys = static_cast<int64_t>(seen.slots.size());
  if (problem.indices.is_present() || !problem.causal) return keys;
  return std::clamp<int64_t>(keys - seen.tokens + token + 1, 0, keys);
}

void run_reference(const Latent& problem, int, Context&) {
  const int64_t size = problem.query.sizes[2], value_size = problem.latent_cache.sizes[2];
  const double scale = problem.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(size, 1))));
  for (const Seen& seen : seen_of(problem)) {
    const auto keys = static_cast<int64_t>(seen.slots.size());
    std::vector<double> rows(static_cast<size_t>(keys * size));
    for (int64_t key = 0; key < keys; ++key) {
      if (seen.slots[static_cast<size_t>(key)] < 0) continue;
      for (int64_t i = 0; i < size; ++i) {
        rows[static_cast<size_t>(key * size + i)] = number_at(problem, seen.slots[static_cast<size_t>(key)], i);
      }
    }
    for (int64_t index = 0; index < seen.tokens * problem.query.sizes[1]; ++index) {
      const int64_t query = index / problem.query.sizes[1], head = index % problem.query.sizes[1];
      const int64_t token = seen.first_token + query, last = last_seen(problem, seen, query);
      const int64_t own = token * problem.query.strides[0] + head * problem.query.strides[1];
      std::vector<double> scores(static_cast<size_t>(last), -std::numeric_limits<double>::infinity());
      double largest = -std::numeric_limits<double>::infinity();
      for (int64_t key = 0; key < last; ++key) {
        if (seen.slots[static_cast<size_t>(key)] < 0) continue;
        double sum = 0;
        for (int64_t i = 0; i < size; ++i) {
          sum += load_element(problem.query.data, problem.query.dtype, own + i) *
                 rows[static_cast<size_t>(key * size + i)];
        }
        scores[static_cast<size_t>(key)] = sum * scale;
        largest = std::max(largest, sum * scale);
      }
      const bool is_empty = largest == -std::numeric_limits<double>::infinity();
      std::vector<double> values(static_cast<size_t>(value_size));
      double sum = 0;
      for (int64_t key = 0; key < last && !is_empty; ++key) {
        const double weight = std::exp(scores[static_cast<size_t>(key)] - largest);
        sum += weight;
        for (int64_t i = 0; i < value_size; ++i) {
          values[static_cast<size_t>(i)] += weight * rows[static_cast<size_t>(key * size + i)];
        }
      }
      const int64_t place = token * problem.output.strides[0] + head * problem.output.strides[1];
      for (int64_t i = 0; i < value_size; ++i) {
        const double value = is_empty ? 0 : values[static_cast<size_t>(i)] / sum;
        store_element(problem.output.data, problem.output.dtype, place + i, value);
      }
      if (problem.lse.is_present()) {
        problem.lse.as<float>()[head * problem.query.sizes[0] + token] =
            static_cast<float>(is_empty ? largest : largest + std::log(sum));
      }
    }
  }
}

bool is_one_cache(const Latent& problem) {
  const TensorView &latent = problem.latent_cache, &rope = problem.rope_cache;
  const char* behind = latent.as<const char>() + latent.sizes[2] * size_of(latent.dtype);
  return latent.dtype == rope.dtype && rope.data == behind && latent.strides[0] == rope.strides[0] &&
         latent.strides[1] == rope.strides[1];
}

// The row in a slot as fp32, codes times their scales; behind it up to kRowAlignment numbers are written.
void load_row(const Latent& problem, const TileKernels& kernels, int64_t slot, float* to) {
  const int64_t page = slot / problem.latent_cache.sizes[1], row = slot % problem.latent_cache.sizes[1];
  const auto copy = [&](const TensorView& cache, float* target) {
    const void* from =
        cache.as<const char>() + (page * cache.strides[0] + row * cache.strides[1]) * size_of(cache.dtype);
    const int64_t columns = cache.sizes[2];
    const int64_t pitch = (columns + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
    const int type = cache.dtype == DType::kFloat8E4M3 ? 3 : cpu_type_index(cache.dtype);
    kernels.copy[type]({&from, 1, columns, pitch, target});
  };
  const int64_t value_size = problem.latent_cache.sizes[2];
  copy(problem.latent_cache, to);
  copy(problem.rope_cache, to + value_size);  // over what is behind the latent row
  if (!problem.latent_scale.is_present()) return;
  const TensorView& scale = problem.latent_scale;
  const float* scales = scale.as<const float>() + page * scale.strides[0] + row * scale.strides[1];
  for (int64_t i = 0; i < value_size; ++i) to[i] *= scales[i / kLatentScaleColumns * scale.strides[2]];
}

// Rows of a request's keys as pages of one key each, so that positions and missing keys stay what they are; in fp32,
// since a code times its scale is no number of the query's type.
void attend_gathered(const Latent& problem, const Seen& seen, Context& context) {
  const int64_t size = problem.query.sizes[2], heads = problem.query.sizes[1], tokens = problem.query.sizes[0];
  const int64_t value_size = problem.latent_cache.sizes[2], count = seen.tokens * heads;
  const auto keys = static_cast<int64_t>(seen.slots.size());
  const Device device = problem.query.device;
  const int64_t row_floats = size + kRowAlignment;
  std::vector<float> rows(static_cast<size_t>(std::max<int64_t>(keys, 1) * row_floats));
  std::vector<float> query(static_cast<size_t>(count * size)), output(static_cast<size_t>(count * value_size));
  std::vector<float> lse(static_cast<size_t>(count));
  std::vector<int32_t> table(static_cast<size_t>(keys));
  const auto place_in = [&](const TensorView& view, int64_t index) {
    return (seen.first_token + index / heads) * view.strides[0] + index % heads * view.strides[1];
  };
  constexpr int64_t kKeysOfTask = 128;
  const TileKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kTileKernels);
  parallel_for(context.threads, (keys + kKeysOfTask - 1) / kKeysOfTask, [&](int64_t task) {
    for (int64_t key = task * kKeysOfTask; key < std::min(keys, (task + 1) * kKeysOfTask); ++key) {
      const int64_t slot = seen.slots[static_cast<size_t>(key)];
      table[static_cast<size_t>(key)] = slot < 0 ? -1 : static_cast<int32_t>(key);
      if (slot >= 0) load_row(problem, kernels, slot, rows.data() + key * row_floats);
    }
  });
  for (int64_t index = 0; index < count; ++index) {
    for (int64_t i = 0; i < size; ++i) {
      query[static_cast<size_t>(index * size + i)] =
          static_cast<float>(load_element(problem.query.data, problem.query.dtype, place_in(problem.query, index) + i));
    }
  }
  auto length = static_cast<int32_t>(keys);
  const auto view = [&](auto* data, DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(data, dtype, sizes, device);
  };
  Attend attend{.query = view(query.data(), DType::kFloat32, {seen.tokens, heads, size}),
                .key_cache = view(rows.data(), DType::kFloat32, {std::max<int64_t>(keys, 1), 1, 1, size}),
                .value_cache = {},
                .block_tables = view(table.data(), DType::kInt32, {1, keys}),
                .seq_lens = view(&length, DType::kInt32, {1}),
                .causal = problem.causal && !problem.indices.is_present(),
                .scale = problem.scale,
                .batch_invariant = problem.batch_invariant,
                .output = view(output.data(), DType::kFloat32, {seen.tokens, heads, value_size}),
                .lse = view(lse.data(), DType::kFloat32, {heads, seen.tokens})};
  attend.key_cache.strides[0] = row_floats;
  attend.value_cache = attend.key_cache;
  attend.value_cache.sizes[3] = value_size;
  paged_attention::attend(attend, context);
  for (int64_t index = 0; index < count; ++index) {
    for (int64_t i = 0; i < value_size; ++i) {
      store_element(problem.output.data, problem.output.dtype, place_in(problem.output, index) + i,
                    output[static_cast<size_t>(index * value_size + i)]);
    }
  }
  for (int64_t head = 0; head < heads && problem.lse.is_present(); ++head) {
    std::memcpy(problem.lse.as<float>() + head * tokens + seen.first_token, lse.data() + head * seen.tokens,
                static_cast<size_t>(seen.tokens) * sizeof(float));
  }
}

void run_cpu(const Latent& problem, int, Context& context) {
  if (problem.query.sizes[0] * problem.query.sizes[1] == 0) return;
  const bool has_indices = problem.indices.is_present();
  const std::vector<Seen> all = has_indices || !is_one_cache(problem) ? seen_of(problem) : std::vector<Seen>();
  if (is_one_cache(problem) && (!has_indices || has_even_pages(problem))) {
    Attend attend = attend_of(problem);
    attend.value_cache = attend.key_cache;
    attend.key_cache.sizes[3] = problem.query.sizes[2];
    std::vector<int32_t> lengths;
    if (has_indices) {
      lengths.assign(static_cast<size_t>(problem.query.sizes[0]), static_cast<int32_t>(problem.indices.sizes[1]));
      attend.seq_lens = contiguous_view(lengths.data(), DType::kInt32, {problem.query.sizes[0]}, problem.query.device);
    }
    paged_attention::attend(attend, context);
    return;
  }
  for (const Seen& seen : all) {
    if (seen.tokens > 0) attend_gathered(problem, seen, context);
  }
}

uint64_t code_version() {
  return hash_text("mla_decode cpu 2");
}

}  // namespace

constinit const registry::Kernel<Latent> kLatentCpu{
    .name = "cpu", .supports = supports_on_cpu<Latent>, .run = run_cpu, .source_hash = code_version};
constinit const registry::Kernel<Latent> kLatentReference{
    .name = "reference", .supports = supports_on_cpu<Latent>, .run = run_reference, .source_hash = code_version};

}  // namespace kernel_pytorch::paged_attention
