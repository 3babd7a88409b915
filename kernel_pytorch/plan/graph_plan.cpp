#include "kernel_pytorch/plan/graph_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kReplayUs = 8, kReplayGapUs = 0.8;   // of a replay on the host; between two kernels of a graph
constexpr double kCopyUs = 5, kCopyBytesPerUs = 1e6;  // a copy's launch with torch's call; read and written, slow GPUs

std::string tenths(double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << value;
  return text.str();
}

}  // namespace

GraphPlan plan_graph(const GraphRequest& request) {
  for (double part : {request.eager_us, request.device_us, request.launches, request.copies, request.copy_bytes,
                      request.capture_us, request.calls, request.least_gain}) {
    KP_CHECK(part >= 0 && std::isfinite(part), "graph plan: a quantity is ", part, "; all are 0 or more");
  }
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (!request.is_cuda) {
    return {.break_even_calls = kNever,
            .reason = "there are no graphs here: they are CUDA's, and the module runs on the CPU"};
  }
  const double copies = request.copies * kCopyUs + request.copy_bytes / kCopyBytesPerUs;
  const double device = request.device_us + request.launches * kReplayGapUs + request.copy_bytes / kCopyBytesPerUs;
  GraphPlan plan{.graph_us = std::max(device, kReplayUs + copies)};
  const double saved = request.eager_us - plan.graph_us;
  plan.break_even_calls = saved > 0 ? std::ceil(request.capture_us / saved) : kNever;
  const std::string times = concat("a call takes ", tenths(request.eager_us), " us, ", tenths(request.device_us),
                                   " of them on the device, and would take about ", tenths(plan.graph_us), " replayed");
  if (saved < request.least_gain * request.eager_us || saved <= 0) {
    plan.reason = concat(times, ": not worth a graph");
  } else if (plan.break_even_calls > request.calls) {
    plan.reason = concat(times, ", which earns the capture back after ", tenths(plan.break_even_calls), " calls; ",
                         tenths(request.calls), " are expected");
  } else {
    plan.pays = true;
    plan.reason = concat(times, ", earned back after ", tenths(plan.break_even_calls), " calls");
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
