#include "kernel_pytorch/ops/paged_attention/cpu/chunk.h"

#include <algorithm>
#include <cstring>

#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/attention/attention.h"
#include "kernel_pytorch/ops/paged_attention/cpu/tile.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr int64_t kFewestQueries = 16;
constexpr int64_t kMostBytes = int64_t{256} << 20;  // of gathered keys and values
constexpr int64_t kKeysOfTask = 128;

// The first key that any query of a request sees.
int64_t first_seen(const Attend& problem, const Request& request) {
  return keys_seen(problem, request, request.position(0)).first;
}

// Rows of a request's keys from `first` on, [keys, heads, size].
TensorView gather(const Attend& problem, const TensorView& cache, int64_t index, int64_t first, int64_t count,
                  Context& context) {
  const int64_t heads = cache.sizes[2], size = cache.sizes[3], page_size = cache.sizes[1];
  const auto bytes = static_cast<int64_t>(size_of(cache.dtype));
  auto* to = static_cast<char*>(context.scratch->allocate(static_cast<size_t>(count * heads * size * bytes) + 1));
  const bool is_run = heads <= 1 || cache.strides[2] == size;  // a key's heads behind each other
  const int64_t runs = is_run ? 1 : heads, run_bytes = (is_run ? heads : 1) * size * bytes;
  parallel_for(context.threads, (count + kKeysOfTask - 1) / kKeysOfTask, [&](int64_t task) {
    for (int64_t i = task * kKeysOfTask; i < std::min(count, (task + 1) * kKeysOfTask); ++i) {
      const int64_t page = page_of(problem, index, first + i), row = (first + i) % page_size;
      for (int64_t head = 0; head < runs; ++head) {
        const int64_t from = page * cache.strides[0] + row * cache.strides[1] + head * cache.strides[2];
        std::memcpy(to + i * heads * size * bytes + head * run_bytes, cache.as<const char>() + from * bytes,
                    static_cast<size_t>(run_bytes));
      }
    }
  });
  return contiguous_view(to, cache.dtype, {1, count, heads, size}, cache.device);
}

// A request's tokens of [tokens, heads, size] as [1, tokens, heads, size].
TensorView tokens_of(const TensorView& view, const Request& request) {
  TensorView own = view;
  own.data = view.as<char>() + request.first_query * view.strides[0] * static_cast<int64_t>(size_of(view.dtype));
  own.rank = 4;
  own.sizes = {1, request.queries, view.sizes[1], view.sizes[2]};
  own.strides = {request.queries * view.strides[0], view.strides[0], view.strides[1], view.strides[2]};
  return own;
}

}  // namespace

bool is_chunk(const Attend& problem, int64_t index) {
  const TensorView &keys = problem.key_cache, &values = problem.value_cache;
  // The tiles of `attention` sum keys in another order, which would make a row's bits depend on how many rows there
  // are.
  if (problem.batch_invariant) return false;
  // ALiBi is kept relative to the least that it takes off by the tasks of pages alone.
  if (keys.dtype != problem.query.dtype || problem.mask.is_present() || problem.alibi_slopes.is_present() ||
      problem.key_scale.is_present() || problem.value_scale.is_present()) {
    return false;
  }
  const Request request = request_at(problem, index);
  const int64_t group = problem.query.sizes[1] / std::max<int64_t>(keys.sizes[2], 1);
  if (request.queries < kFewestQueries || request.queries * group <= kTileRows) return false;
  const int64_t first = first_seen(problem, request), count = request.keys - first;
  const int64_t row_bytes =
      keys.sizes[2] * (keys.sizes[3] + values.sizes[3]) * static_cast<int64_t>(size_of(keys.dtype));
  if (count <= 0 || count * row_bytes > kMostBytes) return false;
  for (int64_t key = first; key < request.keys; key += keys.sizes[1] - key % keys.sizes[1]) {
    if (page_of(problem, index, key) < 0) return false;
  }
  return true;
}

void attend_chunk(const Attend& problem, int64_t index, Context& context) {
  const Request request = request_at(problem, index);
  const int64_t first = first_seen(problem, request), count = request.keys - first;
  const int64_t heads = problem.query.sizes[1], tokens = problem.query.sizes[0];
  OwnContext own(problem.query.device);  // its memory goes with it: that of several chunks does not add up
  Context inner = own;                   // and the choice of this kernel is not its part's
  inner.info = context.info;
  inner.threads = context.threads;
  attention::Forward chunk{.query = tokens_of(problem.query, request),
                           .key = gather(problem, problem.key_cache, index, first, count, inner),
                           .value = gather(problem, problem.value_cache, index, first, count, inner),
                           .output = tokens_of(problem.output, request)};
  chunk.options.heads_first = false;
  chunk.options.sinks = problem.sinks;
  chunk.options.scale = problem.scale;
  chunk.options.softcap = problem.softcap;
  chunk.options.causal = problem.causal;
  chunk.options.window_left = problem.window_left;
  chunk.options.window_right = problem.window_right;
  float* lse = nullptr;
  if (problem.lse.is_present()) {
    lse = static_cast<float*>(inner.scratch->allocate(static_cast<size_t>(heads * request.queries) * sizeof(float)));
    chunk.lse = contiguous_view(lse, DType::kFloat32, {1, heads, request.queries}, problem.lse.device);
  }
  attention::forward(chunk, inner);
  for (int64_t head = 0; head < heads && lse != nullptr; ++head) {
    std::memcpy(problem.lse.as<float>() + head * tokens + request.first_query, lse + head * request.queries,
                static_cast<size_t>(request.queries) * sizeof(float));
  }
}

}  // namespace kernel_pytorch::paged_attention
