// The kernels of the routing, best first, the reference last, and what the registry asks about its problems.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

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
int64_t permute_flops(const Permute&) {
  return 0;
}
std::vector<registry::ProblemRequest> permute_shapes() {
  registry::RequestList add;
  add({300, 4}, DType::kInt32, {{"num_experts", "64"}});
  add({1100, 2}, DType::kInt32, {{"num_experts", "7"}, {"capacity", "50"}});
  add({1, 1}, DType::kInt32);
  add({33, 16}, DType::kInt32, {{"num_experts", "1024"}});
  add({0, 2}, DType::kInt32, {{"num_experts", "3"}});
  return std::move(add.all);
}
Permute shrink_permute(const Permute& problem, int64_t) {
  return problem;
}

int64_t forward_flops(const Forward& problem) {
  return problem.logits.element_count() * 5;
}
int64_t backward_flops(const Backward& problem) {
  return problem.logits.element_count() * 10;
}

void set_tokens(void* tokens, std::string_view name, registry::Role, TensorView& view) {
  const int64_t count = *static_cast<int64_t*>(tokens);
  if (name == "token_of_row" || view.rank == 0 || name == "bias" || name == "offsets" || name == "counts") return;
  view.sizes[0] = count;
}
template <class Problem, const auto& kFields>
Problem shrink(const Problem& problem, int64_t elements) {
  Problem small = problem;
  int64_t tokens = registry::batches_within(problem.logits, elements);
  registry::visit_fields(kFields, &small, set_tokens, &tokens);
  if constexpr (requires { small.token_of_row; }) small.token_of_row.sizes[0] = tokens * problem.k;
  return small;
}

// Shapes [tokens, experts] that the routing is tested and measured on.
std::vector<registry::ProblemRequest> common_shapes() {
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    add({300, 64}, dtype, {{"k", "4"}});
    add({1, 1}, dtype);
    add({7, 3}, dtype, {{"k", "3"}, {"renormalize", "0"}, {"scale", "2.5"}});
    add({0, 8}, dtype, {{"k", "2"}});
    add({129, 200}, dtype, {{"k", "8"}, {"score", "sigmoid"}});
    add({33, 1000}, dtype, {{"k", "16"}, {"score", "sigmoid"}, {"renormalize", "0"}});
    add({1100, 33}, dtype, {{"k", "2"}});
  }
  add({9, 5}, DType::kFloat64, {{"k", "2"}});
  return std::move(add.all);
}
std::vector<registry::ProblemRequest> forward_shapes() {
  std::vector<registry::ProblemRequest> all = common_shapes();
  registry::RequestList add;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    add({300, 64}, dtype, {{"k", "6"}, {"score", "sigmoid"}, {"bias", "1"}, {"groups", "8"}, {"group_k", "3"}});
    add({70, 64}, dtype, {{"k", "2"}, {"groups", "16"}, {"group_k", "2"}, {"group_top", "1"}});
    add({500, 16}, dtype, {{"k", "2"}, {"capacity", "40"}});
    add({65, 512}, dtype, {{"k", "3"}, {"capacity", "1"}, {"bias", "1"}});
  }
  all.insert(all.end(), add.all.begin(), add.all.end());
  return all;
}

}  // namespace

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, forward_flops>(
    {.name = "moe_route_forward",
     .kernels = registry::kernel_list<kForwardCuda, kForwardCpu, kForwardReference>,
     .set_trial_inputs = set_trial_forward,
     .check = check,
     .shrink = shrink<Forward, kForwardFields>,
     .shapes = forward_shapes});
constinit const registry::Operation<Backward> kBackward = registry::declared<Backward, kBackwardFields, backward_flops>(
    {.name = "moe_route_backward",
     .kernels = registry::kernel_list<kBackwardCuda, kBackwardCpu, kBackwardReference>,
     .set_trial_inputs = set_trial_backward,
     .check = check,
     .shrink = shrink<Backward, kBackwardFields>,
     .shapes = common_shapes});

constinit const registry::Operation<Permute> kPermute = registry::declared<Permute, kPermuteFields, permute_flops>(
    {.name = "moe_permute",
     .kernels = registry::kernel_list<kPermuteCuda, kPermuteCpu, kPermuteReference>,
     .set_trial_inputs = set_trial_permute,
     .check = check,
     .shrink = shrink_permute,
     .shapes = permute_shapes});

constexpr auto kDeclarations =
    registry::join(registry::differentiable<Forward, forward>("moe_route", "moe_route_forward", kForwardFields),
                   registry::plain<Backward, backward>("moe_route_backward", kBackwardFields),
                   registry::plain<Permute, permute>("moe_permute", kPermuteFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward, kPermute>};

}  // namespace kernel_pytorch::moe_routing
