// Which parts of a model are worth replacing: from what each part moves, computes and launches, before and after, to
// microseconds against the roofs measured on this machine, a decision and its reason, and the time to spend on
// measuring it. A prediction refuses what cannot gain; what may gain is tried and measured by the caller.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

struct Work {  // bytes of the launches that memory bounds, operations of those that the rate of products bounds
  double bytes = 0, flops = 0;
  double float8_flops = 0;  // of products of FP8, which have a rate of their own
  int64_t launches = 0;
};

struct Site {
  std::string path, pattern;
  int64_t kind = 0;  // sites of one kind do the same work and share one measurement
  Work before, after;
  bool pointwise = false;    // bound by memory: a compiler would fuse it with what stands around it
  bool approximate = false;  // rounds more than the model does
};

struct Machine {
  double bytes_per_second = 0, flops_per_second = 0;  // a copy and a large product, measured
  double float8_flops_per_second = 0;                 // a large product of FP8; 0 where there are no units for it
  bool is_cuda = false;
};

struct Purpose {
  bool tolerant = false;  // whether rounding more is allowed
  bool compiled = false;  // whether torch.compile stands around the model
  double budget_seconds = 0;
};

struct SiteDecision {
  int64_t site = 0;  // index into the sites
  bool tries = false;
  bool only_as_a_whole = false;  // under a compiler: kept only if the whole model was measured faster with it
  double before_us = 0, after_us = 0, measure_seconds = 0;
  std::string reason;
};

struct ModelPlan {
  std::vector<SiteDecision> decisions;  // in the order of the sites, which is that of trying
  std::vector<std::string> notes;
};

KP_EXPORT double predicted_us(const Work& work, const Machine& machine);
KP_EXPORT ModelPlan plan_model(const std::vector<Site>& sites, const Machine& machine, const Purpose& purpose);

}  // namespace kernel_pytorch::plan
