// The kernels of the indexer, best first, the reference last, and the shapes they are tested on.
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/lightning_indexer/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::lightning_indexer {
namespace {

constexpr registry::RequestForm kRequest{.shape = "batch queries heads size",
                                         .sizes = "entries=batch rows=queries table=3"};

// Small whole numbers: sums are exact in every order, so that kernels agree to the last key, and ties are many.
void set_trial_inputs(const Index& on_host) {
  for (const TensorView* view : {&on_host.query, &on_host.key, &on_host.weights, &on_host.key_scale}) {
    for (int64_t i = 0; view->is_present() && i < span_elements(*view); ++i) {
      store_element(view->data, view->dtype, i, std::nearbyint(2 * load_element(view->data, view->dtype, i)));
    }
  }
  const Sizes sizes(on_host);
  for (int64_t i = 0; on_host.key_lengths.is_present() && i < sizes.batch; ++i) {
    on_host.key_lengths.as<int32_t>()[i] = static_cast<int32_t>(sizes.keys - i * 5 % (sizes.keys + 1));
  }
  for (int64_t i = 0; on_host.block_tables.is_present() && i < on_host.block_tables.element_count(); ++i) {
    on_host.block_tables.as<int32_t>()[i] = static_cast<int32_t>(i * 7 % on_host.key.sizes[0]);
  }
}

int64_t flops(const Index& problem) {
  const Sizes sizes(problem);
  return 2 * sizes.batch * sizes.queries * sizes.heads * sizes.size * sizes.keys;
}

constexpr const char* kShapes = R"(
  fp32 bf16 fp16 e4m3: 2x70x4x32 top_k=9; 1x33x3x20 rows=150 top_k=40 key_scale=1; 2x5x8x64 rows=260 top_k=300
    3x4x2x16 entries=12 rows=16 block_tables=1 key_lengths=1 top_k=12 key_scale=0,1; 1x9x2x8 rows=4 top_k=3; 1x0x2x8 top_k=2; 1x5x1x8 top_k=0
)";

}  // namespace

constinit const registry::Operation<Index> kIndex = registry::declared<Index, kIndexFields, flops>(
    {.name = "lightning_indexer",
     .kernels = registry::kernel_list<kIndexMma, kIndexCuda, kIndexCpu, kIndexReference>,
     .set_trial_inputs = set_trial_inputs,
     .request = kRequest,
     .check = registry::check_only<Index, check>,
     .shapes = kShapes});

constexpr auto kDeclarations = registry::plain<Index, choose>("lightning_indexer", kIndexFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kIndex>};

}  // namespace kernel_pytorch::lightning_indexer
