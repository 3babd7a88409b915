// The kernels of sampling, best first, reference last, and the shapes they are tested on.
#include "kernel_pytorch/ops/sample/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::sample {
namespace {

// Numbers of every kind next to each other: limits on and off, greedy rows, equal logits, rows without a token.
void set_trial_inputs(const Draw& problem) {
  const int64_t rows = problem.logits.sizes[0];
  for (int64_t row = 0; row < rows; ++row) {
    if (problem.temperature.is_present() && row % 5 == 4) problem.temperature.as<float>()[row] = 0;
    if (problem.top_p.is_present()) problem.top_p.as<float>()[row] = static_cast<float>(row % 7) / 6;
    if (problem.min_p.is_present()) problem.min_p.as<float>()[row] = static_cast<float>(row % 4) / 16;
  }
  if (problem.logits.dtype != DType::kFloat32) return;
  for (int64_t row = 0; row < rows; ++row) {
    auto* logits = problem.logits.as<float>() + row * problem.logits.strides[0];
    for (int64_t i = 0; i < problem.logits.sizes[1]; ++i) {
      if (row % 6 == 2) logits[i] = static_cast<float>(i % 3);
      if (row % 6 == 3 && i % 2 == 0) logits[i] = -__builtin_inff();
      if (row % 6 == 5) logits[i] = i % 2 == 0 ? __builtin_nanf("") : -__builtin_inff();
    }
  }
}

constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 8x1000; 9x257 top_k=1 top_p=1 min_p=1 positions=int32 seeds=int32; 3x50257 top_p=1; 5x4099 top_k=1; 6x33 min_p=1
    fp32: 1x1; 0x7; 4x0; 8x129 temperature=0 seeds=0; 30x7 top_k=1 top_p=1 min_p=1
    bf16: 2x131072 top_k=1 top_p=1
)";

}  // namespace

constinit const registry::Operation<Draw> kDraw =
    registry::declared<Draw, kDrawFields>({.name = "sample",
                                           .kernels = registry::kernel_list<kDrawCuda, kDrawCpu, kDrawReference>,
                                           .set_trial_inputs = set_trial_inputs,
                                           .check = registry::check_only<Draw, check>,
                                           .flops_per_element = 20,
                                           .shapes = kShapes});

constexpr auto kDeclarations = registry::plain<Draw, draw>("sample", kDrawFields);

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kDraw>};

}  // namespace kernel_pytorch::sample
