// The kernels of attention over latent rows, best first, and the problems they are tested on.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/paged_attention/latent/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::paged_attention {
namespace {

// A request's shape is [requests, queries of each, heads]; options: keys (at most, of a request), page_size,
// value_size, rope_size, cache=e4m3, ragged, top (indices of so many keys), lse.
Latent make_latent(const registry::ProblemRequest& request) {
  Latent problem;
  std::vector<std::string_view> known = registry::option_names(kLatentFields);
  known.insert(known.end(), {"keys", "page_size", "value_size", "rope_size", "cache", "ragged", "top", "lse"});
  registry::check_options(request, known);
  registry::make_options(kLatentFields, request, &problem);
  KP_CHECK(request.shape.size() == 3, "mla_decode: the shape is ", shape_text(request.shape),
           "; it must be [requests, queries of each, heads]");
  const int64_t requests = request.shape[0], queries = request.shape[1], heads = request.shape[2];
  const int64_t page_size = registry::integer_option(request, "page_size", 16);
  KP_CHECK(page_size > 0, "mla_decode: page_size is ", page_size, "; it must be positive");
  const int64_t table = (registry::integer_option(request, "keys", 256) + page_size - 1) / page_size;
  const int64_t value_size = registry::integer_option(request, "value_size", 512),
                rope_size = registry::integer_option(request, "rope_size", 64),
                top = registry::integer_option(request, "top", 0), pages = std::max<int64_t>(requests * table, 1);
  const auto make = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  const DType cache = registry::dtype_option(request, "cache", request.dtype);
  problem.query = make(request.dtype, {requests * queries, heads, value_size + rope_size});
  problem.latent_cache = make(cache, {pages, page_size, value_size});
  problem.rope_cache = make(request.dtype, {pages, page_size, rope_size});
  if (cache == DType::kFloat8E4M3) {
    problem.latent_scale = make(DType::kFloat32, {pages, page_size, value_size / kLatentScaleColumns});
  }
  if (top > 0) {
    problem.indices = make(DType::kInt32, {requests * queries, top});
  } else {
    problem.block_tables = make(DType::kInt32, {requests, table});
    problem.seq_lens = make(DType::kInt32, {requests});
    if (registry::flag_option(request, "ragged", false)) {
      problem.cu_seqlens_q = make(DType::kInt32, {requests + 1});
      problem.max_seqlen_q = 2 * queries;
    }
  }
  problem.output = make(request.dtype, {requests * queries, heads, value_size});
  if (registry::flag_option(request, "lse", true)) problem.lse = make(DType::kFloat32, {heads, requests * queries});
  return problem;
}

registry::Filling latent_filling(const Latent& problem, std::string_view tensor) {
  using registry::Content;
  const int64_t slots = problem.latent_cache.sizes[0] * problem.latent_cache.sizes[1];
  if (tensor == "indices") return {.content = Content::kIndices, .limit = slots};
  if (tensor == "block_tables") return {.content = Content::kIndices, .limit = problem.latent_cache.sizes[0]};
  if (tensor == "seq_lens") {
    return {.content = Content::kIndices, .limit = problem.block_tables.sizes[1] * problem.latent_cache.sizes[1] + 1};
  }
  if (tensor == "cu_seqlens_q") return {.content = Content::kOffsets, .limit = problem.query.sizes[0]};
  return registry::detail::declared_filling(kLatentFields, &problem, tensor);
}

// Rows that nobody sees may hold anything: they become NaN, in every type.
void poison(const Latent& problem) {
  const int64_t page_size = problem.latent_cache.sizes[1], pages = problem.latent_cache.sizes[0];
  std::vector<bool> is_seen(static_cast<size_t>(pages * page_size));
  if (problem.indices.is_present()) {
    for (int64_t i = 0; i < problem.indices.element_count(); ++i) {
      const int32_t slot = problem.indices.as<const int32_t>()[i];
      if (slot >= 0) is_seen[static_cast<size_t>(slot)] = true;
    }
  } else {
    const int64_t table = problem.block_tables.sizes[1];
    for (int64_t request = 0; request < problem.seq_lens.sizes[0]; ++request) {
      const int64_t keys = std::min<int64_t>(problem.seq_lens.as<const int32_t>()[request], table * page_size);
      for (int64_t key = 0; key < keys; ++key) {
        const int32_t page = problem.block_tables.as<const int32_t>()[request * table + key / page_size];
        if (page >= 0) is_seen[static_cast<size_t>(page * page_size + key % page_size)] = true;
      }
    }
  }
  for (const TensorView* view : {&problem.latent_cache, &problem.rope_cache, &problem.latent_scale}) {
    if (!view->is_present()) continue;
    const int64_t row_bytes = view->sizes[2] * size_of(view->dtype);
    for (size_t row = 0; row < is_seen.size(); ++row) {
      char* const to = view->as<char>() + static_cast<int64_t>(row) * row_bytes;
      if (!is_seen[row]) std::memset(to, 0xff, static_cast<size_t>(row_bytes));
    }
  }
}

void set_latent_inputs(const Latent& problem) {
  const TensorView& slots = problem.indices.is_present() ? problem.indices : problem.block_tables;
  for (int64_t i = 3; i < slots.element_count(); i += 17) slots.as<int32_t>()[i] = -1;
  if (problem.seq_lens.is_present()) {
    const int64_t requests = problem.seq_lens.sizes[0];
    auto* lengths = problem.seq_lens.as<int32_t>();
    if (requests > 0) lengths[0] = static_cast<int32_t>(problem.block_tables.sizes[1] * problem.latent_cache.sizes[1]);
    if (requests > 2) lengths[1] = 0;
  }
  poison(problem);
}

registry::Cost latent_cost(const Latent& problem) {
  const TensorView& table = problem.indices.is_present() ? problem.indices : problem.block_tables;
  const int64_t requests = std::max<int64_t>(table.sizes[0], 1);
  const int64_t keys = table.element_count() * (problem.indices.is_present() ? 1 : problem.latent_cache.sizes[1]);
  const int64_t value_size = problem.latent_cache.sizes[2], rope_size = problem.rope_cache.sizes[2];
  return {
      .bytes = keys * (value_size * size_of(problem.latent_cache.dtype) + rope_size * size_of(problem.query.dtype)) +
               problem.query.byte_count() + problem.output.byte_count(),
      .flops = 2 * problem.query.sizes[0] / requests * keys * problem.query.sizes[1] * (2 * value_size + rope_size)};
}

constexpr const char* kLatentShapes = R"(
    fp32 bf16 fp16: 1x1x1 keys=1; 3x1x16 keys=300 page_size=64; 2x2x20 keys=90; 3x1x5 keys=70 ragged=1 page_size=1
    2x3x7 value_size=40 rope_size=8 keys=50 page_size=3; 2x1x16 keys=90 cache=e4m3; 2x1x40 keys=60 top=37 page_size=4
    7x2x40 keys=300 page_size=64; 2x1x128 keys=140 page_size=64; 1x2x36 keys=70 cache=e4m3 causal=0 batch_invariant=1
    3x1x16 keys=2 cache=e4m3 top=70; 0x1x2; 2x1x2 keys=0
)";
}  // namespace

constinit const registry::Operation<Latent> kLatent = registry::declared<Latent, kLatentFields>(
    {.name = "mla_decode",
     .kernels = registry::kernel_list<kLatentSm90, kLatentCuda, kLatentCudaRows, kLatentCpu, kLatentReference>,
     .filling = latent_filling,
     .set_trial_inputs = set_latent_inputs,
     .make = make_latent,
     .check = check,
     .cost = latent_cost,
     .shapes = kLatentShapes});
}  // namespace kernel_pytorch::paged_attention
