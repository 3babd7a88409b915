// Whether a captured CUDA graph pays for one shape of a module: what a call takes eagerly and replayed, predicted from
// what was measured of the eager call, and after how many calls the capture is earned back. A graph saves the host's
// launches and the gaps between kernels; it adds copies into and out of the memory that it was captured with.
#pragma once

#include <cstdint>
#include <string>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

struct GraphRequest {
  bool is_cuda = true;
  double eager_us = 0;      // of one call, from the first launch to the last kernel's end
  double device_us = 0;     // of its kernels alone
  double launches = 0;      // how many they are
  double copies = 1;        // of inputs and outputs
  double copy_bytes = 0;    // their bytes
  double capture_us = 0;    // of warming and capturing
  double calls = 1000;      // expected with this shape
  double least_gain = 0.1;  // share of the eager time below which a graph is not worth its memory
};

struct GraphPlan {
  bool pays = false;
  double graph_us = 0;
  double break_even_calls = 0;  // infinite where a replay is not faster
  std::string reason{};
};

KP_EXPORT GraphPlan plan_graph(const GraphRequest& request);

}  // namespace kernel_pytorch::plan
