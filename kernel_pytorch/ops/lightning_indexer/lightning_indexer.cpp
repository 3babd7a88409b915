#include "kernel_pytorch/ops/lightning_indexer/lightning_indexer.h"

#include <initializer_list>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/lightning_indexer/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::lightning_indexer {
namespace {

constexpr std::string_view kOp = "lightning_indexer";
constexpr int64_t kMost = int64_t{1} << 30;

void check_tensor(std::string_view name, const TensorView& view, std::initializer_list<int64_t> sizes, DType dtype,
                  Device device) {
  KP_CHECK(view.is_present(), kOp, ": ", name, " is missing");
  KP_CHECK(view.device == device, kOp, ": ", name, " is on ", view.device, ", the call runs on ", device,
           "; move all tensors to one device");
  KP_CHECK(view.dtype == dtype, kOp, ": ", name, " is ", view.dtype, "; convert it to ", dtype);
  KP_CHECK(std::ranges::equal(view.shape(), sizes), kOp, ": ", name, " has shape ", shape_text(view.shape()),
           "; it must be ", shape_text({sizes.begin(), sizes.size()}));
}
void check_dense(std::string_view name, const TensorView& view) {
  KP_CHECK(view.size(-1) <= 1 || view.element_count() == 0 || view.stride(-1) == 1, kOp, ": ", name, " is ", view,
           "; its last dimension must be dense, make it contiguous");
}
void check_contiguous(std::string_view name, const TensorView& view) {
  KP_CHECK(is_contiguous(view), kOp, ": ", name, " is ", view, "; it must be contiguous");
}

}  // namespace

void check(const Index& problem, Device device) {
  const TensorView &query = problem.query, &key = problem.key;
  KP_CHECK(query.rank == 4, kOp, ": query has shape ", shape_text(query.shape()),
           "; it must be [batch, queries, heads, size]");
  KP_CHECK(query.dtype == DType::kFloat32 || query.dtype == DType::kBFloat16 || query.dtype == DType::kFloat16 ||
               query.dtype == DType::kFloat8E4M3,
           kOp, ": query is ", query.dtype, "; convert it to fp32, bf16, fp16 or e4m3");
  KP_CHECK(key.rank == 3, kOp, ": key has shape ", shape_text(key.shape()),
           "; it must be [batch, keys, size], or with block_tables [pages, page_size, size]");
  KP_CHECK(problem.top_k >= 0 && problem.top_k <= kMost, kOp, ": top_k is ", problem.top_k, "; it must be 0 to ",
           kMost);
  const bool has_pages = problem.block_tables.is_present();
  if (has_pages) {
    KP_CHECK(problem.block_tables.rank == 2, kOp, ": block_tables has shape ", shape_text(problem.block_tables.shape()),
             "; it must be [batch, pages of an entry]");
    KP_CHECK(problem.key_lengths.is_present(), kOp,
             ": key_lengths is missing; with block_tables they say how many keys an entry has");
  }
  const Sizes sizes(problem);
  KP_CHECK(sizes.keys <= kMost && key.sizes[0] * key.sizes[1] < int64_t{1} << 31, kOp, ": key ", key,
           " has too many keys for indices of 32 bits");
  check_tensor("query", query, {sizes.batch, sizes.queries, sizes.heads, sizes.size}, query.dtype, device);
  check_tensor("key", key, {has_pages ? key.sizes[0] : sizes.batch, key.sizes[1], sizes.size}, query.dtype, device);
  check_tensor("weights", problem.weights, {sizes.batch, sizes.queries, sizes.heads}, DType::kFloat32, device);
  check_dense("query", query);
  check_dense("key", key);
  if (problem.key_scale.is_present()) {
    check_tensor("key_scale", problem.key_scale, {key.sizes[0], key.sizes[1]}, DType::kFloat32, device);
  }
  if (problem.key_lengths.is_present()) {
    check_tensor("key_lengths", problem.key_lengths, {sizes.batch}, DType::kInt32, device);
    check_contiguous("key_lengths", problem.key_lengths);
  }
  if (has_pages) {
    check_tensor("block_tables", problem.block_tables, {sizes.batch, sizes.table}, DType::kInt32, device);
    check_contiguous("block_tables", problem.block_tables);
  }
  check_tensor("indices", problem.indices, {sizes.batch, sizes.queries, problem.top_k}, DType::kInt32, device);
  check_contiguous("indices", problem.indices);
}

void choose(const Index& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kIndex, arguments, context);
}

}  // namespace kernel_pytorch::lightning_indexer
