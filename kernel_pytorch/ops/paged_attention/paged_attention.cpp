#include "kernel_pytorch/ops/paged_attention/paged_attention.h"

#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/ops/paged_attention/latent/operation.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/indices_cuda.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::paged_attention {
namespace {

struct Check {
  std::string_view op;
  Device device;

  void check_present(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }
  void check_dense(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.rank == 0 || view.size(-1) <= 1 || view.stride(-1) == 1, op, ": ", name, " has strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; its last dimension must be dense");
  }
  void check_rows(std::string_view name, const TensorView& view) const {
    check_present(name, view);
    const bool is_known =
        view.dtype == DType::kFloat32 || view.dtype == DType::kBFloat16 || view.dtype == DType::kFloat16;
    KP_CHECK(is_known, op, ": ", name, " is ", view.dtype, "; convert it to fp32, bf16 or fp16");
    KP_CHECK(view.rank == 3, op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be [tokens, heads, size]");
    check_dense(name, view);
  }
  void check_cache(std::string_view name, const TensorView& cache, std::string_view of, DType type) const {
    check_present(name, cache);
    const bool is_known = cache.dtype == type || cache.dtype == DType::kFloat8E4M3 || cache.dtype == DType::kInt8;
    KP_CHECK(is_known, op, ": ", name, " is ", cache.dtype, ", ", of, " is ", type,
             "; a cache has that type, or e4m3 or int8");
    KP_CHECK(cache.rank == 4 && cache.sizes[1] > 0, op, ": ", name, " has shape ", shape_text(cache.shape()),
             "; it must be [pages, page_size, key_heads, size]");
    check_dense(name, cache);
  }
  void check_caches(const TensorView& key, const TensorView& value) const {
    KP_CHECK(key.sizes[0] == value.sizes[0] && key.sizes[1] == value.sizes[1] && key.sizes[2] == value.sizes[2], op,
             ": key_cache has shape ", shape_text(key.shape()), ", value_cache ", shape_text(value.shape()),
             "; their pages, page sizes and heads must be equal");
    KP_CHECK(key.dtype == value.dtype, op, ": key_cache is ", key.dtype, ", value_cache is ", value.dtype,
             "; they must have one type");
  }
  void check_scale(std::string_view name, const TensorView& scale, const TensorView& cache) const {
    if (!scale.is_present()) return;
    check_present(name, scale);
    KP_CHECK(scale.dtype == DType::kFloat32, op, ": ", name, " is ", scale.dtype, "; convert it to fp32");
    const bool is_one = scale.element_count() == 1 && scale.rank <= 1;
    const bool is_head = scale.rank == 1 && scale.sizes[0] == cache.sizes[2];
    const bool is_token = scale.rank == 3 && scale.sizes[0] == cache.sizes[0] && scale.sizes[1] == cache.sizes[1] &&
                          scale.sizes[2] == cache.sizes[2];
    KP_CHECK(is_one || is_head || is_token, op, ": ", name, " has shape ", shape_text(scale.shape()), ", the cache ",
             shape_text(cache.shape()), "; it must be one number, [key_heads] or [pages, page_size, key_heads]");
  }
  void check_integers(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    check_present(name, view);
    KP_CHECK(view.dtype == DType::kInt32, op, ": ", name, " is ", view.dtype, "; convert it to int32");
    check_sizes(name, view, sizes);
    KP_CHECK(is_contiguous(view), op, ": ", name, " has strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; make it contiguous");
  }
  void check_sizes(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes) const {
    KP_CHECK(std::ranges::equal(view.shape(), sizes), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({sizes.begin(), sizes.size()}));
  }
  void check_heads(std::string_view name, const TensorView& view, int64_t heads) const {
    if (!view.is_present()) return;
    check_present(name, view);
    KP_CHECK(view.dtype == DType::kFloat32, op, ": ", name, " is ", view.dtype, "; convert it to fp32");
    check_sizes(name, view, {heads});
    KP_CHECK(is_contiguous(view), op, ": ", name, " must be contiguous");
  }
};

// Offsets and lengths are read where the host can: a mistake in them would read other requests' memory.
void check_offsets(std::string_view op, const Attend& problem) {
  if (problem.query.device.kind != DeviceKind::kCpu || problem.cu_seqlens_q.data == nullptr) return;
  if (Rehearsal::is_running()) return;  // there are no values yet
  const auto* offsets = problem.cu_seqlens_q.as<const int32_t>();
  const int64_t requests = problem.seq_lens.sizes[0];
  for (int64_t i = 0; i <= requests; ++i) {
    KP_CHECK(offsets[i] >= (i == 0 ? 0 : offsets[i - 1]) && (i > 0 || offsets[0] == 0) &&
                 offsets[i] <= problem.query.sizes[0],
             op, ": cu_seqlens_q[", i, "] is ", offsets[i], ", there are ", problem.query.sizes[0],
             " tokens; offsets must ascend from 0 up to that");
    if (i == 0 || problem.mask.data == nullptr || problem.mask.rank != 3) continue;
    KP_CHECK(offsets[i] - offsets[i - 1] <= problem.mask.sizes[1], op, ": mask is of ", problem.mask.sizes[1],
             " queries, request ", i - 1, " has ", offsets[i] - offsets[i - 1], "; it must cover all of them");
  }
}

// Tables, lengths and offsets of the requests that share `tokens`.
void check_requests(const Check& check, const Attend& problem, int64_t tokens) {
  check.check_present("block_tables", problem.block_tables);
  KP_CHECK(problem.block_tables.rank == 2, check.op, ": block_tables has shape ",
           shape_text(problem.block_tables.shape()), "; it must be [requests, pages of a request]");
  const int64_t requests = problem.block_tables.sizes[0];
  check.check_integers("block_tables", problem.block_tables, {requests, problem.block_tables.sizes[1]});
  check.check_integers("seq_lens", problem.seq_lens, {requests});
  KP_CHECK(problem.block_tables.sizes[1] * problem.key_cache.sizes[1] < int64_t{1} << 31, check.op,
           ": block_tables names ", problem.block_tables.sizes[1], " pages of ", problem.key_cache.sizes[1],
           " keys; a request has fewer than 2^31");
  if (problem.cu_seqlens_q.is_present()) {
    check.check_integers("cu_seqlens_q", problem.cu_seqlens_q, {requests + 1});
    check_offsets(check.op, problem);
  } else {
    KP_CHECK(requests == 0 ? tokens == 0 : tokens % requests == 0, check.op, ": query has ", tokens, " tokens of ",
             requests, " requests; it must have as many of each, or cu_seqlens_q must say how many");
  }
  KP_CHECK(problem.max_seqlen_q >= 0, check.op, ": max_seqlen_q is ", problem.max_seqlen_q, "; it must be at least 0");
}

void check_lse(const Check& check, const TensorView& lse, int64_t heads, int64_t tokens) {
  if (!lse.is_present()) return;
  check.check_present("lse", lse);
  KP_CHECK(lse.dtype == DType::kFloat32 && is_contiguous(lse), check.op, ": lse is ", lse,
           "; it must be fp32 and contiguous");
  check.check_sizes("lse", lse, {heads, tokens});
}

}  // namespace

ScaleStrides scale_strides(const TensorView& scale) {
  if (!scale.is_present() || scale.element_count() == 1) return {};
  if (scale.rank == 1) return {.head = scale.strides[0]};
  return {.page = scale.strides[0], .row = scale.strides[1], .head = scale.strides[2]};
}

void check(Attend& problem, Device device) {
  const Check check{"paged_attention", device};
  check.check_rows("query", problem.query);
  check.check_cache("key_cache", problem.key_cache, "query", problem.query.dtype);
  check.check_cache("value_cache", problem.value_cache, "query", problem.query.dtype);
  check.check_caches(problem.key_cache, problem.value_cache);
  const int64_t heads = problem.query.sizes[1], key_heads = problem.key_cache.sizes[2];
  KP_CHECK(problem.query.sizes[2] == problem.key_cache.sizes[3], "paged_attention: query has size ",
           problem.query.sizes[2], ", key_cache has ", problem.key_cache.sizes[3], "; they must be equal");
  KP_CHECK(key_heads > 0 ? heads % key_heads == 0 : heads == 0, "paged_attention: query has ", heads,
           " heads, the caches have ", key_heads, "; it must have a multiple of theirs");
  check_requests(check, problem, problem.query.sizes[0]);
  const int64_t requests = problem.block_tables.sizes[0], tokens = problem.query.sizes[0];
  if (problem.mask.is_present()) {
    check.check_present("mask", problem.mask);
    KP_CHECK(problem.mask.dtype == DType::kBool && problem.mask.rank == 3 && problem.mask.sizes[0] == requests &&
                 problem.mask.sizes[1] == problem.mask.sizes[2],
             "paged_attention: mask is ", problem.mask, "; it must be bool [requests, queries, queries]");
    const int64_t most = problem.cu_seqlens_q.is_present() ? problem.max_seqlen_q
                         : requests > 0                    ? tokens / requests
                                                           : 0;
    KP_CHECK(problem.mask.sizes[1] >= most, "paged_attention: mask is of ", problem.mask.sizes[1],
             " queries, a request has ", most, "; it must cover all of them");
  }
  check.check_heads("sinks", problem.sinks, heads);
  check.check_heads("alibi_slopes", problem.alibi_slopes, heads);
  check.check_scale("key_scale", problem.key_scale, problem.key_cache);
  check.check_scale("value_scale", problem.value_scale, problem.value_cache);
  KP_CHECK(problem.softcap >= 0, "paged_attention: softcap is ", problem.softcap, "; it must be positive, or 0");
  KP_CHECK(problem.window_left >= -1 && problem.window_right >= -1, "paged_attention: the window is (",
           problem.window_left, ", ", problem.window_right, "); its sides must be at least 0, or -1");
  check.check_rows("output", problem.output);
  check.check_sizes("output", problem.output, {tokens, heads, problem.value_cache.sizes[3]});
  KP_CHECK(problem.output.dtype == problem.query.dtype, "paged_attention: output is ", problem.output.dtype,
           ", query is ", problem.query.dtype, "; they must be equal");
  check_lse(check, problem.lse, heads, tokens);
  check_plan(problem, device);
}

void check(Latent& problem, Device device) {
  const Check check{"mla_decode", device};
  check.check_rows("query", problem.query);
  const auto check_cache = [&](std::string_view name, const TensorView& cache) {
    check.check_present(name, cache);
    KP_CHECK(cache.rank == 3 && cache.sizes[1] > 0, "mla_decode: ", name, " has shape ", shape_text(cache.shape()),
             "; it must be [pages, page_size, size]");
    check.check_dense(name, cache);
  };
  check_cache("latent_cache", problem.latent_cache);
  check_cache("rope_cache", problem.rope_cache);
  const TensorView &latent = problem.latent_cache, &rope = problem.rope_cache;
  const DType type = problem.query.dtype;
  const bool is_code = latent.dtype == DType::kFloat8E4M3;
  KP_CHECK(is_code || latent.dtype == type, "mla_decode: latent_cache is ", latent.dtype, ", query is ", type,
           "; it must have that type, or e4m3");
  KP_CHECK(rope.dtype == type, "mla_decode: rope_cache is ", rope.dtype, ", query is ", type, "; they must be equal");
  KP_CHECK(latent.sizes[0] == rope.sizes[0] && latent.sizes[1] == rope.sizes[1], "mla_decode: latent_cache has shape ",
           shape_text(latent.shape()), ", rope_cache ", shape_text(rope.shape()),
           "; their pages and page sizes must be equal");
  KP_CHECK(problem.query.sizes[2] == latent.sizes[2] + rope.sizes[2], "mla_decode: query has size ",
           problem.query.sizes[2], ", the caches have ", latent.sizes[2], " and ", rope.sizes[2],
           "; it must have as many as both together");
  KP_CHECK(problem.latent_scale.is_present() == is_code, "mla_decode: latent_cache is ", latent.dtype,
           is_code ? "; it needs latent_scale" : "; latent_scale is for e4m3");
  if (is_code) {
    check.check_present("latent_scale", problem.latent_scale);
    KP_CHECK(problem.latent_scale.dtype == DType::kFloat32, "mla_decode: latent_scale is ", problem.latent_scale.dtype,
             "; convert it to fp32");
    KP_CHECK(latent.sizes[2] % kLatentScaleColumns == 0, "mla_decode: latent_cache has ", latent.sizes[2],
             " columns in e4m3; they must be a multiple of ", kLatentScaleColumns);
    check.check_sizes("latent_scale", problem.latent_scale,
                      {latent.sizes[0], latent.sizes[1], latent.sizes[2] / kLatentScaleColumns});
  }
  const int64_t tokens = problem.query.sizes[0], heads = problem.query.sizes[1];
  if (problem.indices.is_present()) {
    KP_CHECK(!problem.block_tables.is_present() && !problem.seq_lens.is_present() && !problem.cu_seqlens_q.is_present(),
             "mla_decode: indices name every key; leave out block_tables, seq_lens and cu_seqlens_q");
    KP_CHECK(problem.indices.rank == 2, "mla_decode: indices have shape ", shape_text(problem.indices.shape()),
             "; they must be [tokens, top]");
    check.check_integers("indices", problem.indices, {tokens, problem.indices.sizes[1]});
  } else {
    KP_CHECK(problem.block_tables.is_present() && problem.seq_lens.is_present(),
             "mla_decode: it needs block_tables and seq_lens, or indices");
    Attend attend = attend_of(problem);
    check_requests(check, attend, tokens);
  }
  check.check_rows("output", problem.output);
  check.check_sizes("output", problem.output, {tokens, heads, latent.sizes[2]});
  KP_CHECK(problem.output.dtype == type, "mla_decode: output is ", problem.output.dtype, ", query is ", type,
           "; they must be equal");
  check_lse(check, problem.lse, heads, tokens);
}

void check(Append& problem, Device device) {
  const Check check{"append_kv", device};
  check.check_rows("key", problem.key);
  check.check_rows("value", problem.value);
  check.check_cache("key_cache", problem.key_cache, "key", problem.key.dtype);
  check.check_cache("value_cache", problem.value_cache, "key", problem.key.dtype);
  check.check_caches(problem.key_cache, problem.value_cache);
  const int64_t tokens = problem.key.sizes[0], heads = problem.key_cache.sizes[2];
  check.check_sizes("key", problem.key, {tokens, heads, problem.key_cache.sizes[3]});
  check.check_sizes("value", problem.value, {tokens, heads, problem.value_cache.sizes[3]});
  KP_CHECK(problem.value.dtype == problem.key.dtype, "append_kv: value is ", problem.value.dtype, ", key is ",
           problem.key.dtype, "; they must be equal");
  check.check_present("slots", problem.slots);
  KP_CHECK(problem.slots.dtype == DType::kInt32 || problem.slots.dtype == DType::kInt64, "append_kv: slots are ",
           problem.slots.dtype, "; convert them to int64 or int32");
  check.check_sizes("slots", problem.slots, {tokens});
  KP_CHECK(is_contiguous(problem.slots), "append_kv: slots must be contiguous");
  check.check_scale("key_scale", problem.key_scale, problem.key_cache);
  check.check_scale("value_scale", problem.value_scale, problem.value_cache);
  check_rotation(problem, device);
}

Request request_at(const Attend& problem, int64_t index) {
  const int64_t requests = problem.seq_lens.sizes[0], tokens = problem.query.sizes[0];
  Request request;
  if (problem.cu_seqlens_q.is_present()) {
    const auto* offsets = problem.cu_seqlens_q.as<const int32_t>();
    request.first_query = offsets[index];
    request.queries = offsets[index + 1] - offsets[index];
  } else {
    request.queries = tokens / requests;
    request.first_query = index * request.queries;
  }
  const int64_t capacity = problem.block_tables.sizes[1] * problem.key_cache.sizes[1];
  request.keys = std::clamp<int64_t>(problem.seq_lens.as<const int32_t>()[index], 0, capacity);
  return request;
}

KeyRange keys_seen(const Attend& problem, const Request& request, int64_t position) {
  KeyRange range{0, request.keys};
  if (problem.causal) range.last = std::min(range.last, position + 1);
  if (problem.window_right >= 0)
    range.last = std::min(range.last, position + 1 + std::min(problem.window_right, request.keys + request.queries));
  if (problem.window_left >= 0) range.first = std::max<int64_t>(0, position - problem.window_left);
  range.last = std::max(range.last, range.first);
  return range;
}

int64_t page_of(const Attend& problem, int64_t request, int64_t key) {
  const int64_t columns = problem.block_tables.sizes[1], pages = problem.key_cache.sizes[0];
  const int64_t page = problem.block_tables.as<const int32_t>()[request * columns + key / problem.key_cache.sizes[1]];
  KP_CHECK(page >= -1 && page < pages, "paged_attention: block_tables[", request, ", ",
           key / problem.key_cache.sizes[1], "] is ", page, ", the cache has ", pages,
           " pages; it must be one of them, or -1");
  return page;
}

int64_t checked_slot(const Append& problem, int64_t token) {
  const int64_t slots = problem.key_cache.sizes[0] * problem.key_cache.sizes[1];
  const int64_t slot = index_at(problem.slots.data, problem.slots.dtype == DType::kInt64, token);
  KP_CHECK(slot >= -1 && slot < slots, "append_kv: slots[", token, "] is ", slot, ", the cache has ", slots,
           " slots; it must be one of them, or -1");
  return slot;
}

void attend(const Attend& arguments, Context& context) {
  Attend problem = arguments;
  check(problem, context.device());
  registry::run_best(kAttend, problem, context);
}

bool has_even_pages(const Latent& problem) {
  const auto is_even = [](const TensorView& cache) {
    return cache.sizes[0] <= 1 || cache.strides[0] == cache.sizes[1] * cache.strides[1];
  };
  return is_even(problem.latent_cache) && is_even(problem.rope_cache) &&
         (!problem.latent_scale.is_present() || is_even(problem.latent_scale));
}

Attend attend_of(const Latent& problem) {
  const auto with_head = [](TensorView cache) {
    cache.sizes[3] = cache.sizes[2];
    cache.strides[3] = cache.strides[2];
    cache.sizes[2] = 1;
    cache.strides[2] = cache.sizes[3];
    cache.rank = 4;
    return cache;
  };
  const auto by_slots = [](TensorView cache) {
    if (!cache.is_present()) return cache;
    cache.sizes[0] *= cache.sizes[1];
    cache.strides[0] = cache.strides[1];
    cache.sizes[1] = 1;
    return cache;
  };
  Attend attend{.query = problem.query,
                .key_cache = with_head(problem.latent_cache),
                .value_cache = with_head(problem.rope_cache),
                .block_tables = problem.block_tables,
                .seq_lens = problem.seq_lens,
                .cu_seqlens_q = problem.cu_seqlens_q,
                .key_scale = problem.latent_scale,
                .causal = problem.causal,
                .scale = problem.scale,
                .max_seqlen_q = problem.max_seqlen_q,
                .batch_invariant = problem.batch_invariant,
                .output = problem.output,
                .lse = problem.lse};
  if (!problem.indices.is_present()) return attend;
  attend.key_cache = by_slots(attend.key_cache);
  attend.value_cache = by_slots(attend.value_cache);
  attend.key_scale = by_slots(attend.key_scale);
  attend.block_tables = problem.indices;
  attend.seq_lens = {};
  attend.seq_lens.sizes[0] = problem.query.sizes[0];  // as many as the table has, each
  attend.causal = false;
  return attend;
}

void attend_latent(const Latent& arguments, Context& context) {
  Latent problem = arguments;
  check(problem, context.device());
  registry::run_best(kLatent, problem, context);
}

void append(const Append& arguments, Context& context) {
  Append problem = arguments;
  check(problem, context.device());
  registry::run_best(kAppend, problem, context);
}

}  // namespace kernel_pytorch::paged_attention
