// The kernels of paged attention, best first, references last, and the problems they are tested on.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/paged_attention/latent/operation.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/paged_attention/plan/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::paged_attention {
namespace {

constexpr std::string_view kScaleWords[] = {"none", "one", "head", "token"};

// Caches of `pages`; heads_first puts a head's rows of a page next to each other.
void make_caches(const registry::ProblemRequest& request, int64_t pages, int64_t page_size, int64_t heads, int64_t size,
                 TensorView* key, TensorView* value) {
  const DType dtype = registry::dtype_option(request, "cache", request.dtype);
  const int64_t value_size = registry::integer_option(request, "value_size", size);
  *key = contiguous_view(nullptr, dtype, {pages, page_size, heads, size}, request.device);
  *value = contiguous_view(nullptr, dtype, {pages, page_size, heads, value_size}, request.device);
  if (!registry::flag_option(request, "heads_first", false)) return;
  for (TensorView* cache : {key, value}) {
    cache->strides[1] = cache->sizes[3];
    cache->strides[2] = page_size * cache->sizes[3];
  }
}

TensorView make_scale(const registry::ProblemRequest& request, const TensorView& cache) {
  const int kind = registry::choice_option(request, "scales", kScaleWords, "none");
  if (kind == 0) return {};
  if (kind == 1) return contiguous_view(nullptr, DType::kFloat32, {1}, request.device);
  if (kind == 2) return contiguous_view(nullptr, DType::kFloat32, {cache.sizes[2]}, request.device);
  return contiguous_view(nullptr, DType::kFloat32, {cache.sizes[0], cache.sizes[1], cache.sizes[2]}, request.device);
}

// A request's shape is [requests, queries of each, heads, size]. Options besides those of the list: keys (at most, of a
// request), page_size, key_heads, value_size, cache=TYPE, heads_first, scales, ragged, mask, sinks, alibi, lse.
Attend make_attend(const registry::ProblemRequest& request) {
  Attend problem;
  std::vector<std::string_view> known = registry::option_names(kAttendFields);
  known.insert(known.end(), {"keys", "page_size", "key_heads", "value_size", "cache", "heads_first", "scales", "ragged",
                             "mask", "sinks", "alibi", "lse"});
  registry::check_options(request, known);
  registry::make_options(kAttendFields, request, &problem);
  KP_CHECK(request.shape.size() == 4, "paged_attention: the shape is ", shape_text(request.shape),
           "; it must be [requests, queries of each, heads, size]");
  const int64_t requests = request.shape[0], queries = request.shape[1], heads = request.shape[2],
                size = request.shape[3];
  const int64_t page_size = registry::integer_option(request, "page_size", 16);
  KP_CHECK(page_size > 0, "paged_attention: page_size is ", page_size, "; it must be positive");
  const int64_t table = (registry::integer_option(request, "keys", 256) + page_size - 1) / page_size;
  const auto make = [&](DType dtype, std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, dtype, sizes, request.device);
  };
  make_caches(request, std::max<int64_t>(requests * table, 1), page_size,
              registry::integer_option(request, "key_heads", heads), size, &problem.key_cache, &problem.value_cache);
  problem.query = make(request.dtype, {requests * queries, heads, size});
  problem.block_tables = make(DType::kInt32, {requests, table});
  problem.seq_lens = make(DType::kInt32, {requests});
  problem.key_scale = make_scale(request, problem.key_cache);
  problem.value_scale = make_scale(request, problem.value_cache);
  if (registry::flag_option(request, "ragged", false)) {
    problem.cu_seqlens_q = make(DType::kInt32, {requests + 1});
    problem.max_seqlen_q = 2 * queries;
  }
  const int64_t most = problem.cu_seqlens_q.is_present() ? problem.max_seqlen_q : queries;
  if (registry::flag_option(request, "mask", false)) problem.mask = make(DType::kBool, {requests, most, most});
  if (registry::flag_option(request, "sinks", false)) problem.sinks = make(DType::kFloat32, {heads});
  if (registry::flag_option(request, "alibi", false)) problem.alibi_slopes = make(DType::kFloat32, {heads});
  problem.output = make(request.dtype, {requests * queries, heads, problem.value_cache.sizes[3]});
  if (registry::flag_option(request, "lse", true)) problem.lse = make(DType::kFloat32, {heads, requests * queries});
  return problem;
}

registry::Filling filling(const Attend& problem, std::string_view tensor) {
  using registry::Content;
  const int64_t capacity = problem.block_tables.sizes[1] * problem.key_cache.sizes[1];
  if (tensor == "block_tables") return {.content = Content::kIndices, .limit = problem.key_cache.sizes[0]};
  if (tensor == "seq_lens") return {.content = Content::kIndices, .limit = capacity + 1};
  if (tensor == "cu_seqlens_q") return {.content = Content::kOffsets, .limit = problem.query.sizes[0]};
  if (tensor == "mask") return {.content = Content::kIndices, .limit = 2};
  return registry::detail::declared_filling(kAttendFields, &problem, tensor);
}

// Some pages are missing, and the lengths begin with none and all.
void set_trial_inputs(const Attend& problem) {
  auto* pages = problem.block_tables.as<int32_t>();
  for (int64_t i = 3; i < problem.block_tables.element_count(); i += 17) pages[i] = -1;
  auto* lengths = problem.seq_lens.as<int32_t>();
  const int64_t requests = problem.seq_lens.sizes[0];
  if (requests > 0) lengths[0] = static_cast<int32_t>(problem.block_tables.sizes[1] * problem.key_cache.sizes[1]);
  if (requests > 2) lengths[1] = 0;
}

registry::Cost attend_cost(const Attend& problem) {
  const int64_t keys = problem.block_tables.element_count() * problem.key_cache.sizes[1] * problem.key_cache.sizes[2];
  const int64_t columns = problem.key_cache.sizes[3] + problem.value_cache.sizes[3];
  const int64_t requests = std::max<int64_t>(problem.seq_lens.sizes[0], 1);
  return {.bytes = keys * columns * size_of(problem.key_cache.dtype) + problem.query.byte_count() +
                   problem.output.byte_count(),
          .flops = 2 * problem.query.sizes[0] * problem.query.sizes[1] * columns *
                   problem.block_tables.element_count() / requests * problem.key_cache.sizes[1]};
}

constexpr std::string_view kRopeWords[] = {"none", "half", "whole", "positions"};

// Tables with one value for a pair or with two, a row for each token or rows by their positions.
void make_rotation(const registry::ProblemRequest& request, Append* problem) {
  const int kind = registry::choice_option(request, "rope", kRopeWords, "none");
  problem->rotary_dim = registry::integer_option(request, "rotary_dim", 0);
  problem->interleaved = registry::flag_option(request, "interleaved", false);
  if (kind == 0) return;
  const int64_t tokens = request.shape[0], turned = problem->rotary_dim > 0 ? problem->rotary_dim : request.shape[2];
  const DType dtype = registry::dtype_option(request, "table", DType::kFloat32);
  const auto make_table = [&] {
    return contiguous_view(nullptr, dtype, {kind == 3 ? tokens + 5 : tokens, kind == 2 ? turned : turned / 2},
                           request.device);
  };
  problem->cos = make_table();
  problem->sin = make_table();
  if (kind == 3) problem->positions = contiguous_view(nullptr, DType::kInt32, {tokens}, request.device);
}

// A request's shape is [tokens, key_heads, size]; options: pages, page_size, value_size, cache, heads_first, scales,
// rope=half|whole|positions, rotary_dim, interleaved, table=TYPE.
Append make_append(const registry::ProblemRequest& request) {
  registry::check_options(request, {"pages", "page_size", "value_size", "cache", "heads_first", "scales", "slots",
                                    "rope", "rotary_dim", "interleaved", "table"});
  KP_CHECK(request.shape.size() == 3, "append_kv: the shape is ", shape_text(request.shape),
           "; it must be [tokens, key_heads, size]");
  Append problem;
  const int64_t tokens = request.shape[0], heads = request.shape[1], size = request.shape[2];
  const int64_t page_size = registry::integer_option(request, "page_size", 16);
  KP_CHECK(page_size > 0, "append_kv: page_size is ", page_size, "; it must be positive");
  make_caches(request, registry::integer_option(request, "pages", tokens / page_size + 3), page_size, heads, size,
              &problem.key_cache, &problem.value_cache);
  problem.key = contiguous_view(nullptr, request.dtype, {tokens, heads, size}, request.device);
  problem.value =
      contiguous_view(nullptr, request.dtype, {tokens, heads, problem.value_cache.sizes[3]}, request.device);
  problem.slots =
      contiguous_view(nullptr, registry::dtype_option(request, "slots", DType::kInt64), {tokens}, request.device);
  problem.key_scale = make_scale(request, problem.key_cache);
  problem.value_scale = make_scale(request, problem.value_cache);
  make_rotation(request, &problem);
  return problem;
}

registry::Filling append_filling(const Append& problem, std::string_view tensor) {
  if (tensor == "positions") return {.content = registry::Content::kIndices, .limit = problem.cos.sizes[0]};
  return registry::detail::declared_filling(kAppendFields, &problem, tensor);
}

// No slot twice, some rows without one.
void set_slots(const Append& problem) {
  const int64_t slots = problem.key_cache.sizes[0] * problem.key_cache.sizes[1];
  for (int64_t i = 0; i < problem.slots.sizes[0]; ++i) {
    const int64_t slot = i % 7 == 5 || i >= slots ? -1 : slots - 1 - i;
    if (problem.slots.dtype == DType::kInt64) {
      problem.slots.as<int64_t>()[i] = slot;
    } else {
      problem.slots.as<int32_t>()[i] = static_cast<int32_t>(slot);
    }
  }
}

constexpr const char* kAttendShapes = R"(
    fp32 bf16 fp16: 1x1x1x64 keys=1; 3x1x8x128 key_heads=2 keys=300 page_size=16; 2x1x4x80 keys=70 page_size=7
    5x1x16x64 key_heads=2 keys=2500 page_size=64 sinks=1 heads_first=1; 3x4x6x64 key_heads=3 keys=130 page_size=1
    4x3x8x128 key_heads=1 keys=515 page_size=32 window_left=100 softcap=20; 2x5x4x96 keys=90 mask=1 alibi=1
    3x40x8x64 key_heads=2 keys=333 page_size=128 ragged=1 window_left=37; 4x2x4x192 value_size=128 keys=64 ragged=1
    2x3x4x64 keys=100 causal=0 window_left=30 window_right=4 batch_invariant=1; 2x1x2x256 keys=40; 1x2x3x512 keys=33
    3x1x8x128 key_heads=2 keys=300 cache=e4m3 scales=none,one,head,token; 2x3x4x64 key_heads=2 keys=77 cache=int8 scales=token,head
    4x7x8x64 key_heads=4 keys=200 cache=e4m3 ragged=1 mask=1 sinks=1 page_size=3 scales=token; 0x1x2x64; 3x0x2x64; 2x1x2x64 keys=0
)";
constexpr const char* kAppendShapes = R"(
    fp32 bf16 fp16: 1x1x64; 37x2x80 page_size=7 slots=int32; 65x4x128 heads_first=1 value_size=64; 0x2x64
    20x3x64 cache=e4m3,int8 scales=none,one,head,token page_size=4; 19x2x64 rope=half,whole,positions interleaved=0,1
    21x3x80 rope=positions rotary_dim=22 interleaved=0,1 cache=e4m3,int8 scales=token,one; 9x2x33 rope=half rotary_dim=30
    18x2x128 rope=whole cache=e4m3 scales=head interleaved=1 heads_first=1; 5x1x8 rope=half rotary_dim=6 value_size=3
    bf16: 18x2x128 rope=whole,positions table=bf16 cache=e4m3 interleaved=0,1
)";

}  // namespace

constinit const registry::Operation<Attend> kAttend = registry::declared<Attend, kAttendFields>(
    {.name = "paged_attention",
     .kernels = registry::kernel_list<kAttendSm90, kAttendCuda, kAttendCudaRows, kAttendCpu, kAttendReference>,
     .filling = filling,
     .set_trial_inputs = set_trial_inputs,
     .make = make_attend,
     .check = check,
     .cost = attend_cost,
     .shapes = kAttendShapes});
constinit const registry::Operation<Append> kAppend = registry::declared<Append, kAppendFields>(
    {.name = "append_kv",
     .kernels = registry::kernel_list<kAppendCuda, kAppendCpu, kAppendReference>,
     .filling = append_filling,
     .set_trial_inputs = set_slots,
     .make = make_append,
     .check = check,
     .shapes = kAppendShapes});

constexpr auto kDeclarations =
    registry::join(registry::plain<Attend, attend>("paged_attention", kAttendFields),
                   registry::plain<Attend, attend>("paged_attention_", kAttendFields, {.updated = "output lse"}),
                   registry::plain<Append, append>("append_kv", kAppendFields),
                   registry::plain<Latent, attend_latent>("mla_decode", kLatentFields),
                   registry::plain<PlanDecode, plan_decode>("plan_decode", kPlanFields),
                   registry::plain<PlanDecode, plan_decode>("plan_decode_", kPlanFields, {.updated = "plan"}));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kAttend, kAppend, kLatent, kPlanDecode>};

}  // namespace kernel_pytorch::paged_attention
