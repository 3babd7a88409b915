// The kernels of cross_entropy, best first, the reference last, and how problems of its kind are made and described.
#include "kernel_pytorch/ops/cross_entropy/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"

namespace kernel_pytorch::cross_entropy {
namespace {

constexpr auto kOptionKeys = field_group<Options>(
    option<&Options::ignore_index>(), option<&Options::label_smoothing>({.key = KeyPart::kPresence}),
    option<&Options::z_loss>(), option<&Options::softcap>({.key = KeyPart::kPresence}), option<&Options::vocabulary>(),
    option<&Options::first_column>());
constexpr auto kProblemFields = fields<Problem>(
    input<&Problem::logits>({.shape = "... columns", .leads = true}),
    input<&Problem::target>({.shape = "...", .content = "indices vocabulary"}),
    optional_input<&Problem::weight>({.shape = "vocabulary", .content = "positive"}),
    optional_input<&Problem::given_lse>({.shape = "...", .dtype = "statistic logits", .content = "positive"}),
    optional_input<&Problem::grad_loss>({.shape = "...", .dtype = "statistic logits"}),
    output<&Problem::loss>({.shape = "...", .dtype = "statistic logits"}),
    output<&Problem::lse>({.shape = "...", .dtype = "statistic logits"}),
    output<&Problem::total>({.shape = "1", .dtype = "statistic logits"}),
    output<&Problem::grad_logits>({.shape = "... columns", .dtype = "logits", .wanted = "gradient"}),
    output<&Problem::partials>({.shape = "... 4", .dtype = "statistic logits", .trial = "partials"}),
    all_of<&Problem::options, kOptionKeys>(),
    option<&Problem::reduction>({.key = KeyPart::kValue, .choices = "none sum mean"}),
    option<&Problem::gradient_scale>());
constexpr auto kRescaleProblem = fields<RescaleProblem>(
    updated<&RescaleProblem::tensor>({.shape = "...", .leads = true}),
    input<&RescaleProblem::scale>({.shape = "1", .dtype = "statistic tensor", .content = "positive"}));
constexpr registry::RequestForm kRequest{.sizes = "vocabulary=columns"};

void arrange_forward(const registry::ProblemRequest&, Problem& problem) {
  if (problem.partials.is_present()) problem.loss = problem.lse = problem.total = problem.grad_logits = {};
  if (problem.reduction == Reduction::kNone) problem.total = {};
}
void arrange_backward(const registry::ProblemRequest&, Problem& problem) {
  problem.given_lse = problem.lse;
  problem.grad_loss = problem.reduction == Reduction::kNone ? problem.lse : problem.total;
  problem.grad_logits = problem.logits;
  problem.loss = problem.lse = problem.total = problem.partials = {};
  problem.reduction = Reduction::kNone;
}

// Shapes that cross_entropy is tested and measured on: the vocabularies of models, odd tails, every option.
constexpr const char* kShapes = R"(
    fp32 bf16 fp16: 19x1,2,7,64,129,1000,4096 3x32000,50257,128256,262144 0x128; 700x8 ignore_index=3
    70000x8 ignore_index=3 weight=fp32  # so many that they are counted first
    5x4096 gradient=0; reduction=none; reduction=sum z_loss=0.001; 5x1000 partials=1
    partials=1 vocabulary=3000 first_column=1000 softcap=2; 40x30 label_smoothing=0.1 ignore_index=2
    7x513 weight=1; 7x512 weight=fp32 label_smoothing=0.2; 7x511 softcap=2
    2x65536 softcap=3 z_loss=0.01 label_smoothing=0.1 weight=1 reduction=mean; label_smoothing=0.1 z_loss=0.01
    fp64: 11x1,5,1000; 11x30 softcap=2 weight=1 label_smoothing=0.1
)";

constexpr const char* kRescaleShapes = R"(
    fp32 bf16 fp16 fp64: 3x0,1,15,4096,100003
)";

}  // namespace

constinit const registry::Operation<Problem> kForward = registry::declared<Problem, kProblemFields>(
    {.name = "cross_entropy_forward",
     .kernels = registry::kernel_list<kCudaCluster, kCudaBlock, kCpu, kReference>,
     .request = kRequest,
     .arrange = arrange_forward,
     .check = check_forward,
     .flops_per_element = 8,
     .shapes = kShapes});
constinit const registry::Operation<Problem> kBackward =
    registry::declared<Problem, kProblemFields>({.name = "cross_entropy_backward",
                                                 .kernels = registry::kernel_list<kCudaBlock, kCpu, kReference>,
                                                 .request = kRequest,
                                                 .arrange = arrange_backward,
                                                 .check = check_backward,
                                                 .flops_per_element = 8,
                                                 .shapes = kShapes});
constinit const registry::Operation<RescaleProblem> kRescale = registry::declared<RescaleProblem, kRescaleProblem>(
    {.name = "cross_entropy_rescale",
     .kernels = registry::kernel_list<kRescaleCuda, kRescaleCpu, kRescaleReference>,
     .check = check_rescale,
     .flops_per_element = 1,
     .shapes = kRescaleShapes});

constexpr auto kDeclarations = registry::join(
    registry::differentiable<Reduced, reduce>("cross_entropy", "cross_entropy_forward", kReducedFields),
    registry::plain<Reduced, reduce>("cross_entropy_", kReducedFields, {.in_place = true}),
    registry::differentiable<Forward, forward_rows>("cross_entropy_rows", "cross_entropy_rows_forward", kRowsFields,
                                                    {.without = "partials"}),
    registry::plain<Backward, backward>("cross_entropy_rows_backward", kBackwardFields,
                                        {.shown = "vocabulary first_column"}),
    registry::plain<Forward, forward_rows>(
        "cross_entropy_partials", kRowsFields,
        {.never = "weight", .without = "label_smoothing z_loss output lse", .shown = "vocabulary first_column"}),
    registry::plain<Rescale, rescale>("cross_entropy_rescale_", kRescaleFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations,
                                                .operations = registry::erased<kForward, kBackward, kRescale>};

}  // namespace kernel_pytorch::cross_entropy
