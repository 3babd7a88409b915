// The kernels of delayed scales, best first, the reference last, and the shapes they are tested on.
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/delayed_scales/operation.h"
#include "kernel_pytorch/registry/declared.h"
#include "kernel_pytorch/registry/op_entry.h"
#include "kernel_pytorch/registry/request_options.h"

namespace kernel_pytorch::delayed_scales {
namespace {

void describe(const Update& problem, tuning::KeyBuilder& key) {
  key.field("layers", tuning::bucket(static_cast<int64_t>(problem.amax.size())));
  key.field("elements", elements_of(problem));
  key.field("steps", problem.histories.sizes[0]);
}

// A request's shape is [steps, layers, elements of a layer]. Option: joined=0|1.
Update make(const registry::ProblemRequest& request) {
  registry::check_options(request, {"joined"});
  KP_CHECK(request.shape.size() == 3 && request.shape[0] > 0, "delayed_scales: the shape is ",
           shape_text(request.shape), "; it must be [steps, layers, elements] with a step at least");
  KP_CHECK(request.dtype == DType::kFloat32, "delayed_scales: the type is ", request.dtype, "; it must be fp32");
  const int64_t steps = request.shape[0], layers = request.shape[1], elements = request.shape[2];
  const auto numbers = [&](std::initializer_list<int64_t> sizes) {
    return contiguous_view(nullptr, DType::kFloat32, sizes, request.device);
  };
  Update problem;
  problem.histories = numbers({steps, layers, elements});
  problem.amax.assign(static_cast<size_t>(layers), numbers({elements}));
  problem.scales = problem.amax;
  problem.factors = numbers({layers, elements});
  if (registry::flag_option(request, "joined", false)) problem.joined = numbers({layers, elements});
  return problem;
}

// Its problems are small as they are.
Update shrink(const Update& problem, int64_t) {
  return problem;
}

constexpr const char* kShapes = R"(
    fp32: 1x1x1 16x1x3 joined=0,1; 5x37x3 joined=0,1; 3x600x3 16x4x130; 2x0x3 2x3x0
)";

}  // namespace

constinit const registry::Operation<Update> kUpdate =
    registry::declared<Update, kFields>({.name = "delayed_scales",
                                         .kernels = registry::kernel_list<kCuda, kCpu, kReference>,
                                         .describe = describe,
                                         .make = make,
                                         .check = registry::check_only<Update, check>,
                                         .shrink = shrink,
                                         .flops_per_element = 1,
                                         .shapes = kShapes});

constexpr auto kDeclarations = registry::join(registry::plain<Update, update>("delayed_scales_", kFields));

extern constinit const registry::OpEntry kEntry{.declarations = kDeclarations, .operations = registry::erased<kUpdate>};

}  // namespace kernel_pytorch::delayed_scales
