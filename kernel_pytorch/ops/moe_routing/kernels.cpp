// The kernels of the routing, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::moe_routing {
namespace {

// Logits and biases that are multiples of 1/8: choices are far from the rounding of scores, and ties are many.
void round_inputs(const TensorView& view) {
  for (int64_t i = 0; view.is_present() && i < span_elements(view); ++i) {
    store_element(view.data, view.dtype, i, std::nearbyint(8 * load_element(view.data, view.dtype, i)) / 8);
  }
}
void set_trial_forward(const Forward& on_host) {
  round_inputs(on_host.logits);
  if (on_host.bias.is_present()) round_inputs(on_host.bias);
}

// Choices of a token must differ, and counts be theirs; every fourth pair was dropped.
void set_trial_backward(const Backward& on_host) {
  const int64_t tokens = on_host.logits.sizes[0], experts = on_host.logits.sizes[1], k = on_host.k;
  auto* counts = on_host.counts.as<int32_t>();
  std::fill_n(counts, experts, 0);
  for (int64_t i = 0; i < tokens * k; ++i) {
    const int64_t expert = (i / k * 7 + i % k) % experts;
    on_host.experts.as<int32_t>()[i] = static_cast<int32_t>(expert);
    on_host.row_of_token.as<int32_t>()[i] = i % 4 == 3 ? -1 : static_cast<int32_t>(i);
    ++counts[expert];
  }
}

// Some choices are of other devices.
void set_trial_permute(const Permute& on_host) {
  for (int64_t i = 0; i < on_host.experts.element_count(); ++i) {
    const int64_t expert = (i * i + i / 3) % (on_host.num_experts + on_host.num_experts / 4 + 1);
    on_host.experts.as<int32_t>()[i] = static_cast<int32_t>(i % 11 == 10 ? -1 : expert);
  }
}
constexpr const char* kPermuteShapes = R"(
  int32: 300x4 num_experts=64; 1100x2 num_experts=7 capacity=50; 1x1; 33x16 num_experts=1024; 0x2 num_experts=3
)";
// Shapes [tokens, experts] that the routing is tested and measured on.
constexpr const char* kBackwardShapes = R"(
  fp32 bf16 fp16: 300x64 k=4; 1x1; 7x3 k=3 renormalize=0 scale=2.5; 0x8 k=2; 129x200 k=8 score=sigmoid
    33x1000 k=16 score=sigmoid renormalize=0; 1100x33 k=2
  fp64: 9x5 k=2
)";
std::vector<registry::ProblemRequest> forward_shapes() {
  return registry::requests_of(concat(kBackwardShapes, R"(
  fp32 bf16: 300x64 k=6 score=sigmoid bias=1 groups=8 group_k=3; 70x64 k=2 groups=16 group_k=2 group_top=1
    500x16 k=2 capacity=40; 65x512 k=3 capacity=1 bias=1)"));
}

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields>(
    {.name = "moe_route_forward",
     .kernels = registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>,
     .set_trial_inputs = set_trial_forward,
     .check = check,
     .flops_per_element = 5,
     .shapes = forward_shapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields>(
    {.name = "moe_route_backward",
     .kernels = registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .set_trial_inputs = set_trial_backward,
     .check = check,
     .flops_per_element = 10,
     .shapes = kBackwardShapes});

constinit const registry::Operation<Permute> kPermute = registry::declared<Permute, kPermuteFields>(
    {.name = "moe_permute",
     .kernels = registry::kernel_list<kPermuteCuda, kPermuteCpu, kPermuteReference>,
     .set_trial_inputs = set_trial_permute,
     .check = check,
     .shapes = kPermuteShapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("moe_route", "moe_route_forward", kForwardFields),
                   registry::plain<Backward, backward>("moe_route_backward", kBackwardFields),
                   registry::plain<Permute, permute>("moe_permute", kPermuteFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward, kPermute>};

}  // namespace kernel_pytorch::moe_routing
