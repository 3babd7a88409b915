#include "kernel_pytorch/ops/operations.h"

#include "kernel_pytorch/ops/activation/operation.h"
#include "kernel_pytorch/ops/adamw/operation.h"
#include "kernel_pytorch/ops/attention/operation.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/ops/dropout/operation.h"
#include "kernel_pytorch/ops/embedding/operation.h"
#include "kernel_pytorch/ops/gated_activation/operation.h"
#include "kernel_pytorch/ops/layer_norm/operation.h"
#include "kernel_pytorch/ops/matmul/operation.h"
#include "kernel_pytorch/ops/mean_pooling/operation.h"
#include "kernel_pytorch/ops/quantize/operation.h"
#include "kernel_pytorch/ops/reduce_norm/operation.h"
#include "kernel_pytorch/ops/rms_norm/operation.h"
#include "kernel_pytorch/ops/rope/operation.h"
#include "kernel_pytorch/ops/scaled_matmul/operation.h"
#include "kernel_pytorch/ops/softmax/operation.h"
#include "kernel_pytorch/registry/erase.h"

namespace kernel_pytorch {

const std::vector<registry::AnyOperation>& operations() {
  static const auto* all = new std::vector<registry::AnyOperation>{
      // clang-format off
      registry::erase(rms_norm::kForward),
      registry::erase(rms_norm::kBackward),
      registry::erase(layer_norm::kForward),
      registry::erase(layer_norm::kBackward),
      registry::erase(softmax::kForward),
      registry::erase(softmax::kBackward),
      registry::erase(cross_entropy::kForward),
      registry::erase(cross_entropy::kBackward),
      registry::erase(cross_entropy::kRescale),
      registry::erase(adamw::kStep),
      registry::erase(reduce_norm::kNorm),
      registry::erase(activation::kForward),
      registry::erase(activation::kBackward),
      registry::erase(gated_activation::kForward),
      registry::erase(gated_activation::kBackward),
      registry::erase(dropout::kForward),
      registry::erase(embedding::kForward),
      registry::erase(embedding::kBackward),
      registry::erase(mean_pooling::kForward),
      registry::erase(mean_pooling::kBackward),
      registry::erase(mean_pooling::kChunkForward),
      registry::erase(mean_pooling::kChunkBackward),
      registry::erase(rope::kRotate),
      registry::erase(attention::kForward),
      registry::erase(attention::kBackward),
      registry::erase(block_list::kBuild),
      registry::erase(block_list::kSelect),
      registry::erase(matmul::kMultiply),
      registry::erase(quantize::kQuantize),
      registry::erase(scaled_matmul::kProduct),
      registry::erase(matmul::kPairGradient),
      // clang-format on
  };
  return *all;
}

const registry::AnyOperation* find_operation(std::string_view name) {
  for (const registry::AnyOperation& operation : operations()) {
    if (operation.name == name) return &operation;
  }
  return nullptr;
}

}  // namespace kernel_pytorch
