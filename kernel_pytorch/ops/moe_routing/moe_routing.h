// Which experts of a mixture a token goes to, how much each of them counts, and where its rows lie once they are sorted
// by expert.
//
//   score[t, e]   = softmax over e of logits[t, e], or sigmoid(logits[t, e])
//   chosen        = the k experts of the highest score[t, e] + bias[e]; bias serves the choice alone. Of equal ones the
//                   lower index goes first; NaN counts as the lowest.
//   weights[t, j] = scale * score[t, experts[t, j]], with `renormalize` over the sum of the token's k scores
//
// The choice compares logits where there is no bias, which is the same order without rounding. With `groups` the
// experts are so many groups of neighbours, and only the group_k best groups of a token are chosen from; a group is as
// good as the sum of its group_top highest score + bias.
//
// Rows: pair (t, j) has row row_of_token[t, j] of an array sorted by expert, within an expert in the order of tokens.
// Expert e has the rows [offsets[e - 1], offsets[e]), and token_of_row is the inverse. With `capacity` an expert keeps
// its first so many pairs; others have weight 0 and row -1, the row array ends earlier, and token_of_row is -1 behind
// its end. counts are the pairs that chose an expert, before anything is dropped.
//
// Losses, of T tokens: aux_loss = E * sum over e of counts[e] / (T k) * mean over t of p[t, e], which is 1 where
// experts are used alike; p are the scores over their sum. z_loss = mean over t of logsumexp(logits[t, :])^2.
//
// moe_permute makes the rows of choices that are given: experts[t, j] in [0, num_experts), others (experts of another
// device) have row -1 and are in no count.
//
// Types: logits fp32, bf16, fp16, and fp64 on the CPU; sums and scores are fp32 (fp64). Up to 1024 experts, 16 of a
// token, 32 groups. Everything is bitwise repeatable. No tokens is legal: losses are 0.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/base/fields.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::moe_routing {

enum class Score : uint8_t { kSoftmax, kSigmoid };
inline constexpr std::string_view kScoreNames = "softmax sigmoid";
inline constexpr int64_t kMostExperts = 1024, kMostChosen = 16, kMostGroups = 32;

struct Forward {
  TensorView logits{};
  TensorView bias{};  // optional: fp32 (fp64 for fp64)
  int64_t k = 1;
  Score score = Score::kSoftmax;
  int64_t groups = 1, group_k = 1, group_top = 2;
  bool renormalize = true;
  double scale = 1;
  int64_t capacity = 0;  // 0: as many as there are
  TensorView weights{}, experts{};
  TensorView offsets{}, counts{};
  TensorView token_of_row{}, row_of_token{};
  TensorView dropped{};
  TensorView aux_loss{}, z_loss{};
};
inline constexpr auto kForwardFields = fields<Forward>(
    input<&Forward::logits>(
        {.shape = "tokens experts", .leads = true, .bucketed = "tokens", .memory = MemoryLayout::kDenseLast}),
    optional_input<&Forward::bias>(
        {.shape = "experts", .dtype = "statistic logits", .memory = MemoryLayout::kContiguous}),
    option<&Forward::k>({.key = KeyPart::kValue}),
    option<&Forward::score>({.key = KeyPart::kValue, .choices = kScoreNames}),
    option<&Forward::groups>({.key = KeyPart::kValue}), option<&Forward::group_k>(), option<&Forward::group_top>(),
    option<&Forward::renormalize>(), option<&Forward::scale>(), option<&Forward::capacity>({.symbolic = true}),
    output<&Forward::weights>({.shape = "tokens k", .dtype = "statistic logits"}),
    output<&Forward::experts>({.shape = "tokens k", .dtype = "int32"}),
    output<&Forward::offsets>({.shape = "experts", .dtype = "int32"}),
    output<&Forward::counts>({.shape = "experts", .dtype = "int32"}),
    output<&Forward::token_of_row>({.shape = "tokens*k", .dtype = "int32"}),
    output<&Forward::row_of_token>({.shape = "tokens k", .dtype = "int32"}),
    output<&Forward::dropped>({.shape = "()", .dtype = "int32"}),
    output<&Forward::aux_loss>({.shape = "()", .dtype = "statistic logits"}),
    output<&Forward::z_loss>({.shape = "()", .dtype = "statistic logits"}));

// The choice itself has no gradient, nor has bias. Absent gradients are zeros.
struct Backward {
  TensorView grad_weights{}, grad_aux_loss{}, grad_z_loss{};
  TensorView logits{};
  TensorView experts{}, counts{}, row_of_token{};
  int64_t k = 1;
  Score score = Score::kSoftmax;
  bool renormalize = true;
  double scale = 1;
  TensorView grad_logits{};
};
inline constexpr auto kBackwardFields = fields<Backward>(
    optional_input<&Backward::grad_weights>(
        {.shape = "tokens k", .dtype = "statistic logits", .memory = MemoryLayout::kContiguous, .usual = true}),
    optional_input<&Backward::grad_aux_loss>({.shape = "()", .dtype = "statistic logits", .usual = true}),
    optional_input<&Backward::grad_z_loss>({.shape = "()", .dtype = "statistic logits", .usual = true}),
    input<&Backward::logits>(
        {.shape = "tokens experts", .leads = true, .bucketed = "tokens", .memory = MemoryLayout::kDenseLast}),
    input<&Backward::experts>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::counts>({.shape = "experts", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    input<&Backward::row_of_token>({.shape = "tokens k", .dtype = "int32", .memory = MemoryLayout::kContiguous}),
    option<&Backward::k>({.key = KeyPart::kValue}),
    option<&Backward::score>({.key = KeyPart::kValue, .choices = kScoreNames}), option<&Backward::renormalize>(),
    option<&Backward::scale>(), output<&Backward::grad_logits>({.shape = "tokens experts", .dtype = "logits"}));

struct Permute {
  TensorView experts{};
  int64_t num_experts = 1;
  int64_t capacity = 0;
  TensorView offsets{}, counts{};
  TensorView token_of_row{}, row_of_token{};
  TensorView dropped{};
};
inline constexpr auto kPermuteFields = fields<Permute>(
    input<&Permute::experts>({.shape = "tokens k",
                              .leads = true,
                              .bucketed = "tokens",
                              .dtype = "int32",
                              .memory = MemoryLayout::kContiguous}),
    option<&Permute::num_experts>({.key = KeyPart::kValue}), option<&Permute::capacity>({.symbolic = true}),
    output<&Permute::offsets>({.shape = "num_experts", .dtype = "int32"}),
    output<&Permute::counts>({.shape = "num_experts", .dtype = "int32"}),
    output<&Permute::token_of_row>({.shape = "tokens*k", .dtype = "int32"}),
    output<&Permute::row_of_token>({.shape = "tokens k", .dtype = "int32"}),
    output<&Permute::dropped>({.shape = "()", .dtype = "int32"}));

// Throw Error{kInvalidArgument} naming the argument, both values and the cure.
KP_EXPORT void permute(const Permute& arguments, Context& context);
KP_EXPORT void forward(const Forward& arguments, Context& context);
KP_EXPORT void backward(const Backward& arguments, Context& context);

}  // namespace kernel_pytorch::moe_routing
