#include "kernel_pytorch/ops/moe_routing/moe_routing.h"

#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::moe_routing {
namespace {

struct RoutingCheck {
  std::string_view op;
  const TensorView& logits;
  int64_t k;
  Device device;

  int64_t tokens() const { return logits.sizes[0]; }
  int64_t experts() const { return logits.sizes[1]; }

  void check_logits() const {
    KP_CHECK(logits.is_present(), op, ": logits are missing");
    check_device("logits", logits);
    const DType dtype = logits.dtype;
    const bool is_known = dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
                          (dtype == DType::kFloat64 && device.kind == DeviceKind::kCpu);
    KP_CHECK(is_known, op, ": logits are ", dtype, "; convert them to fp32, bf16, fp16, or on the CPU fp64");
    KP_CHECK(logits.rank == 2, op, ": logits have shape ", shape_text(logits.shape()),
             "; they must be [tokens, experts]");
    KP_CHECK(experts() >= 1 && experts() <= kMostExperts, op, ": logits have shape ", shape_text(logits.shape()), ", ",
             experts(), " experts; there must be 1 to ", kMostExperts);
    KP_CHECK(experts() == 1 || tokens() == 0 || logits.strides[1] == 1, op, ": logits have a last stride of ",
             logits.strides[1], "; make them contiguous");
    KP_CHECK(k >= 1 && k <= std::min(kMostChosen, experts()), op, ": k is ", k, " of ", experts(),
             " experts; it must be from 1 to the number of experts, at most ", kMostChosen);
    KP_CHECK(tokens() * k < std::numeric_limits<int32_t>::max(), op, ": ", tokens(), " tokens with ", k,
             " experts each are 2^31 rows or more; split the tokens");
  }
  void check_device(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.device == device, op, ": ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
  }
  void check(std::string_view name, const TensorView& view, DType dtype, std::initializer_list<int64_t> sizes) const {
    KP_CHECK(view.is_present(), op, ": ", name, " is missing");
    check_device(name, view);
    KP_CHECK(view.dtype == dtype, op, ": ", name, " is ", view.dtype, "; it must be ", dtype);
    KP_CHECK(std::ranges::equal(view.shape(), sizes), op, ": ", name, " has shape ", shape_text(view.shape()),
             "; it must be ", shape_text({sizes.begin(), sizes.size()}));
    KP_CHECK(is_contiguous(view), op, ": ", name, " has strides ",
             shape_text({view.strides.data(), static_cast<size_t>(view.rank)}), "; make it contiguous");
  }
  void check_if_present(std::string_view name, const TensorView& view, DType dtype,
                        std::initializer_list<int64_t> sizes) const {
    if (view.is_present()) check(name, view, dtype, sizes);
  }
};

void check_numbers(std::string_view op, const Forward& problem) {
  const int64_t experts = problem.logits.sizes[1], groups = problem.groups;
  KP_CHECK(groups >= 1 && groups <= kMostGroups && experts % groups == 0, op, ": ", experts, " experts are in ", groups,
           " groups; their number must divide the experts, from 1 to ", kMostGroups);
  KP_CHECK(problem.group_k >= 1 && problem.group_k <= groups, op, ": group_k is ", problem.group_k, " of ", groups,
           " groups; it must be from 1 to their number");
  const int64_t each = experts / groups;
  KP_CHECK(problem.k <= problem.group_k * each, op, ": k is ", problem.k, ", but ", problem.group_k, " groups of ",
           each, " experts are ", problem.group_k * each, "; choose more groups");
  KP_CHECK(problem.group_top >= 1 && problem.group_top <= 2, op, ": group_top is ", problem.group_top,
           "; a group's score is that of its best expert (1) or the sum of its best two (2)");
  KP_CHECK(problem.capacity >= 0, op, ": capacity is ", problem.capacity,
           "; it must be positive, or 0 to drop nothing");
}

}  // namespace

void check(Forward& problem, Device device) {
  const RoutingCheck check{"moe_route", problem.logits, problem.k, device};
  check.check_logits();
  check_numbers(check.op, problem);
  const int64_t tokens = check.tokens(), experts = check.experts(), k = problem.k;
  const DType wide = statistic_type(problem.logits.dtype);
  check.check_if_present("bias", problem.bias, wide, {experts});
  check.check("weights", problem.weights, wide, {tokens, k});
  check.check("experts", problem.experts, DType::kInt32, {tokens, k});
  check.check("offsets", problem.offsets, DType::kInt32, {experts});
  check.check("counts", problem.counts, DType::kInt32, {experts});
  check.check("token_of_row", problem.token_of_row, DType::kInt32, {tokens * k});
  check.check("row_of_token", problem.row_of_token, DType::kInt32, {tokens, k});
  check.check("dropped", problem.dropped, DType::kInt32, {});
  check.check("aux_loss", problem.aux_loss, wide, {});
  check.check("z_loss", problem.z_loss, wide, {});
}

void check(Backward& problem, Device device) {
  const RoutingCheck check{"moe_route backward", problem.logits, problem.k, device};
  check.check_logits();
  const int64_t tokens = check.tokens(), experts = check.experts(), k = problem.k;
  const DType wide = statistic_type(problem.logits.dtype);
  check.check_if_present("grad_weights", problem.grad_weights, wide, {tokens, k});
  check.check_if_present("grad_aux_loss", problem.grad_aux_loss, wide, {});
  check.check_if_present("grad_z_loss", problem.grad_z_loss, wide, {});
  check.check("experts", problem.experts, DType::kInt32, {tokens, k});
  check.check("counts", problem.counts, DType::kInt32, {experts});
  check.check("row_of_token", problem.row_of_token, DType::kInt32, {tokens, k});
  check.check("grad_logits", problem.grad_logits, problem.logits.dtype, {tokens, experts});
}

void check(Permute& problem, Device device) {
  const RoutingCheck check{"moe_permute", problem.experts, 0, device};
  KP_CHECK(problem.experts.is_present() && problem.experts.rank == 2, check.op, ": experts have shape ",
           shape_text(problem.experts.shape()), "; they must be [tokens, k]");
  const int64_t tokens = problem.experts.sizes[0], k = problem.experts.sizes[1], experts = problem.num_experts;
  check.check("experts", problem.experts, DType::kInt32, {tokens, k});
  KP_CHECK(experts >= 1 && experts <= kMostExperts, check.op, ": there are ", experts, " experts; there must be 1 to ",
           kMostExperts);
  KP_CHECK(k >= 1 && k <= kMostChosen, check.op, ": a token has ", k, " experts; it must have 1 to ", kMostChosen);
  KP_CHECK(tokens * k < std::numeric_limits<int32_t>::max(), check.op, ": ", tokens, " tokens with ", k,
           " experts each are 2^31 rows or more; split the tokens");
  KP_CHECK(problem.capacity >= 0, check.op, ": capacity is ", problem.capacity,
           "; it must be positive, or 0 to drop nothing");
  check.check("offsets", problem.offsets, DType::kInt32, {experts});
  check.check("counts", problem.counts, DType::kInt32, {experts});
  check.check("token_of_row", problem.token_of_row, DType::kInt32, {tokens * k});
  check.check("row_of_token", problem.row_of_token, DType::kInt32, {tokens, k});
  check.check("dropped", problem.dropped, DType::kInt32, {});
}

void permute(const Permute& arguments, Context& context) {
  Permute problem = arguments;
  check(problem, context.device());
  registry::run_best(kPermute, problem, context);
}

void forward(const Forward& arguments, Context& context) {
  Forward problem = arguments;
  check(problem, context.device());
  registry::run_best(kForward, problem, context);
}

void backward(const Backward& arguments, Context& context) {
  Backward problem = arguments;
  check(problem, context.device());
  registry::run_best(kBackward, problem, context);
}

}  // namespace kernel_pytorch::moe_routing
