// The reference: every score in double, then a sort.
#include <algorithm>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/lightning_indexer/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::lightning_indexer {
namespace {

double at(const TensorView& x, int64_t i, int64_t j, int64_t k = 0, int64_t l = 0) {
  const int64_t offset =
      i * x.strides[0] + j * x.strides[1] + (x.rank > 2 ? k * x.strides[2] : 0) + (x.rank > 3 ? l * x.strides[3] : 0);
  return load_element(x.data, x.dtype, offset);
}

double score_of(const Index& problem, const Sizes& sizes, int64_t batch, int64_t query, int64_t key) {
  const Place place = place_of(problem, sizes, batch, key);
  KP_CHECK(place.first >= 0 && place.first < problem.key.sizes[0], "lightning_indexer: block_tables has page ",
           place.first, " for entry ", batch, ", key has ", problem.key.sizes[0], " pages");
  double score = 0;
  for (int64_t head = 0; head < sizes.heads; ++head) {
    double dot = 0;
    for (int64_t i = 0; i < sizes.size; ++i) {
      dot += at(problem.query, batch, query, head, i) * at(problem.key, place.first, place.second, i);
    }
    score += at(problem.weights, batch, query, head) * (dot < 0 ? 0 : dot);
  }
  return problem.key_scale.is_present() ? score * at(problem.key_scale, place.first, place.second) : score;
}

void run(const Index& problem, int, Context&) {
  const Sizes sizes(problem);
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const int64_t keys = keys_of(problem, sizes, batch);
    for (int64_t query = 0; query < sizes.queries; ++query) {
      std::vector<Candidate<double>> all;
      for (int64_t key = 0; key <= query + keys - sizes.queries; ++key) {
        all.push_back({score_of(problem, sizes, batch, query, key), static_cast<int32_t>(key)});
      }
      std::ranges::sort(all, goes_first<double>);
      all.resize(std::min(all.size(), static_cast<size_t>(problem.top_k)));
      std::ranges::sort(all, [](const auto& a, const auto& b) { return a.key < b.key; });
      int32_t* indices = problem.indices.as<int32_t>() + (batch * sizes.queries + query) * problem.top_k;
      std::fill_n(indices, problem.top_k, -1);
      for (size_t i = 0; i < all.size(); ++i) indices[i] = index_of(problem, sizes, batch, all[i].key);
    }
  }
}

uint64_t code_version() {
  return hash_text("lightning_indexer reference 1");
}

}  // namespace

constinit const registry::Kernel<Index> kIndexReference{
    .name = "reference", .supports = supports_on_cpu<Index>, .run = run, .source_hash = code_version};

}  // namespace kernel_pytorch::lightning_indexer
