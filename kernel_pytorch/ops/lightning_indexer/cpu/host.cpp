// The host side of the CPU kernel: a task is a few neighbouring queries. Keys become floats tile by tile, each query
// scores the tile and keeps its best so far: twice as many as it needs at most, then the better part of them.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/lightning_indexer/cpu/scores.h"
#include "kernel_pytorch/ops/lightning_indexer/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::lightning_indexer {
namespace {

constexpr int64_t kTileQueries = 8;

int type_index(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? 3 : cpu_type_index(dtype);
}

// The best keys of those that come in ascending order.
class BestKeys {
 public:
  explicit BestKeys(int64_t count) : count_(static_cast<size_t>(count)) {}
  void add(float score, int64_t key) {
    const Candidate<float> next{score, static_cast<int32_t>(key)};
    if (count_ == 0 || (is_full_ && !goes_first(next, worst_))) return;
    kept_.push_back(next);
    if (kept_.size() >= 2 * count_) shrink();
  }
  void write(const Index& problem, const Sizes& sizes, int64_t batch, int32_t* indices) {
    if (kept_.size() > count_) shrink();
    std::ranges::sort(kept_, [](const auto& a, const auto& b) { return a.key < b.key; });
    std::fill_n(indices, problem.top_k, -1);
    for (size_t i = 0; i < kept_.size(); ++i) indices[i] = index_of(problem, sizes, batch, kept_[i].key);
  }

 private:
  void shrink() {
    std::ranges::nth_element(kept_, kept_.begin() + static_cast<int64_t>(count_) - 1, goes_first<float>);
    kept_.resize(count_);
    worst_ = kept_.back();
    is_full_ = true;
  }

  size_t count_;
  bool is_full_ = false;
  Candidate<float> worst_{};
  std::vector<Candidate<float>> kept_{};
};

void run_queries(const Index& problem, const Sizes& sizes, const ScoreKernels& kernels, int64_t batch, int64_t begin) {
  const int64_t end = std::min(begin + kTileQueries, sizes.queries), keys = keys_of(problem, sizes, batch);
  const int64_t padded = (sizes.size + kPadding - 1) / kPadding * kPadding, element = size_of(problem.query.dtype);
  const auto load = kernels.load[type_index(problem.query.dtype)];
  std::vector<float> queries(static_cast<size_t>(kTileQueries * sizes.heads * padded));
  std::vector<float> weights(static_cast<size_t>(kTileQueries * sizes.heads));
  std::vector<float> rows(static_cast<size_t>(kTileKeys * padded)), scores(kTileKeys), scales(kTileKeys, 1.0f);
  std::vector<BestKeys> best(static_cast<size_t>(end - begin), BestKeys(problem.top_k));
  for (int64_t query = begin; query < end; ++query) {
    for (int64_t head = 0; head < sizes.heads; ++head) {
      const TensorView &from = problem.query, &weight = problem.weights;
      const int64_t offset = batch * from.strides[0] + query * from.strides[1] + head * from.strides[2];
      const int64_t row = (query - begin) * sizes.heads + head;
      load(from.as<const char>() + offset * element, sizes.size, &queries[row * padded]);
      weights[row] =
          weight.as<const float>()[batch * weight.strides[0] + query * weight.strides[1] + head * weight.strides[2]];
    }
  }
  const int64_t seen = end + keys - sizes.queries;  // by the last query
  for (int64_t first = 0; first < seen; first += kTileKeys) {
    const int64_t count = std::min(kTileKeys, seen - first);
    for (int64_t i = 0; i < count; ++i) {
      const Place place = place_of(problem, sizes, batch, first + i);
      KP_CHECK(place.first >= 0 && place.first < problem.key.sizes[0], "lightning_indexer: block_tables has page ",
               place.first, " for entry ", batch, ", key has ", problem.key.sizes[0], " pages");
      const int64_t offset = place.first * problem.key.strides[0] + place.second * problem.key.strides[1];
      load(problem.key.as<const char>() + offset * element, sizes.size, &rows[i * padded]);
      if (problem.key_scale.is_present()) {
        const TensorView& scale = problem.key_scale;
        scales[i] = scale.as<const float>()[place.first * scale.strides[0] + place.second * scale.strides[1]];
      }
    }
    for (int64_t query = begin; query < end; ++query) {
      const int64_t visible = std::min(count, query + 1 + keys - sizes.queries - first);
      if (visible <= 0) continue;
      const int64_t row = (query - begin) * sizes.heads;
      kernels.score({&queries[row * padded], &weights[row], rows.data(), sizes.heads, padded, scores.data()});
      for (int64_t i = 0; i < visible; ++i) best[query - begin].add(scores[i] * scales[i], first + i);
    }
  }
  for (int64_t query = begin; query < end; ++query) {
    best[query - begin].write(problem, sizes, batch,
                              problem.indices.as<int32_t>() + (batch * sizes.queries + query) * problem.top_k);
  }
}

void run(const Index& problem, int, Context& context) {
  const Sizes sizes(problem);
  const ScoreKernels& kernels = KP_AT_CPU_LEVEL(context.info->cpu.isa, kScoreKernels);
  const int64_t tiles = (sizes.queries + kTileQueries - 1) / kTileQueries;
  parallel_for(context.threads, sizes.batch * tiles, [&](int64_t task) {
    const int64_t tile = tiles - 1 - task % tiles;  // the longest first
    run_queries(problem, sizes, kernels, task / tiles, tile * kTileQueries);
  });
}

registry::Support supports(const Index& problem, const DeviceInfo& device) {
  if (const char* obstacle = cpu_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(type_index(problem.query.dtype) < 0 ? kNeedsSingle : nullptr);
}
uint64_t code_version() {
  return hash_text("lightning_indexer cpu 1");
}

}  // namespace

constinit const registry::Kernel<Index> kIndexCpu{
    .name = "cpu", .supports = supports, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::lightning_indexer
