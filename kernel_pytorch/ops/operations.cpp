#include "kernel_pytorch/ops/operations.h"

#include "kernel_pytorch/registry/op_entry.h"

// NAME::kEntry of ops/NAME.
#define KP_OPS(OP)             \
  OP(rms_norm)                 \
  OP(layer_norm)               \
  OP(softmax)                  \
  OP(cross_entropy)            \
  OP(linear_cross_entropy)     \
  OP(optimizer_step)           \
  OP(reduce_norm)              \
  OP(gradient_code)            \
  OP(activation)               \
  OP(gated_activation)         \
  OP(dropout)                  \
  OP(embedding)                \
  OP(mean_pooling)             \
  OP(rope)                     \
  OP(norm_rope)                \
  OP(attention)                \
  OP(paged_attention)          \
  OP(merge_attention)          \
  OP(sample)                   \
  OP(linear_attention)         \
  OP(causal_conv1d)            \
  OP(native_sparse_attention)  \
  OP(lightning_indexer)        \
  OP(block_list)               \
  OP(moe_routing)              \
  OP(grouped_matmul)           \
  OP(matmul)                   \
  OP(quantize)                 \
  OP(scaled_matmul)            \
  OP(delayed_scales)           \
  OP(group_quantize)           \
  OP(quantized_matmul)         \
  OP(quantized_grouped_matmul) \
  OP(int8_matmul)              \
  OP(sparse_compress)          \
  OP(sparse_matmul)            \
  OP(scaled_grouped_matmul)    \
  OP(linear)                   \
  OP(mlp)                      \
  OP(moe_mlp)                  \
  OP(evaluate_expression)

namespace kernel_pytorch {

#define KP_DECLARE_ENTRY(OP)             \
  namespace OP {                         \
  extern const registry::OpEntry kEntry; \
  }
KP_OPS(KP_DECLARE_ENTRY)
#undef KP_DECLARE_ENTRY

namespace {

#define KP_NAME_ENTRY(OP) &OP::kEntry,
constexpr const registry::OpEntry* kEntries[] = {KP_OPS(KP_NAME_ENTRY)};
#undef KP_NAME_ENTRY

}  // namespace

const std::vector<registry::AnyOperation>& operations() {
  static const auto* all = [] {
    auto* found = new std::vector<registry::AnyOperation>;
    for (const registry::OpEntry* entry : kEntries) {
      if (entry->operations == nullptr) continue;
      for (registry::AnyOperation& operation : entry->operations()) found->push_back(std::move(operation));
    }
    return found;
  }();
  return *all;
}

const registry::AnyOperation* find_operation(std::string_view name) {
  for (const registry::AnyOperation& operation : operations()) {
    if (operation.name == name) return &operation;
  }
  return nullptr;
}

std::span<const registry::Declaration> declarations() {
  static const auto* all = [] {
    auto* found = new std::vector<registry::Declaration>;
    for (const registry::OpEntry* entry : kEntries) {
      found->insert(found->end(), entry->declarations.begin(), entry->declarations.end());
    }
    return found;
  }();
  return *all;
}

}  // namespace kernel_pytorch
