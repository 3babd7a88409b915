#include "kernel_pytorch/ops/delayed_scales/delayed_scales.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/delayed_scales/operation.h"
#include "kernel_pytorch/registry/choose.h"

namespace kernel_pytorch::delayed_scales {
namespace {

struct UpdateCheck {
  Device device;

  void check_numbers(std::string_view name, const TensorView& view) const {
    KP_CHECK(view.is_present(), "delayed_scales: ", name, " is missing");
    KP_CHECK(view.device == device, "delayed_scales: ", name, " is on ", view.device, ", the call runs on ", device,
             "; move all tensors to one device");
    KP_CHECK(view.dtype == DType::kFloat32 && is_contiguous(view), "delayed_scales: ", name, " is ", view,
             "; it must be contiguous fp32");
  }
  void check_row(std::string_view name, const TensorView& view, int64_t count) const {
    check_numbers(name, view);
    KP_CHECK(view.element_count() == count, "delayed_scales: ", name, " has ", view.element_count(),
             " elements; the lists have ", count, " in all");
  }
};

}  // namespace

void check(const Update& problem, Device device) {
  const UpdateCheck check{device};
  KP_CHECK(problem.scales.size() == problem.amax.size(), "delayed_scales: scales has ", problem.scales.size(),
           " tensors, amax ", problem.amax.size(), "; give one of each for a layer");
  const int64_t elements = elements_of(problem), count = elements * static_cast<int64_t>(problem.amax.size());
  for (size_t i = 0; i < problem.amax.size(); ++i) {
    for (const TensorView* view : {&problem.amax[i], &problem.scales[i]}) {
      const std::string_view name = view == &problem.amax[i] ? "amax" : "scales";
      check.check_numbers(name, *view);
      KP_CHECK(view->element_count() == elements, "delayed_scales: ", name, "[", i, "] has ", view->element_count(),
               " elements, amax[0] has ", elements, "; all layers have as many");
    }
  }
  check.check_numbers("histories", problem.histories);
  KP_CHECK(problem.histories.rank >= 1 && problem.histories.sizes[0] >= 1 &&
               problem.histories.element_count() == problem.histories.sizes[0] * count,
           "delayed_scales: histories has shape ", shape_text(problem.histories.shape()),
           "; it must be [steps, ...] with a step at least and ", count, " elements each");
  check.check_row("factors", problem.factors, count);
  if (problem.joined.is_present()) check.check_row("joined", problem.joined, count);
}

void update(const Update& arguments, Context& context) {
  check(arguments, context.device());
  registry::run_best(kUpdate, arguments, context);
}

}  // namespace kernel_pytorch::delayed_scales
