#include "kernel_pytorch/plan/graph_plan.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

TEST(GraphPlan, PaysWhereTheHostIsTheLimit) {
  const GraphRequest launch_bound{
      .eager_us = 1000, .device_us = 250, .launches = 150, .copies = 2, .copy_bytes = 1e6, .capture_us = 1e5};
  const GraphPlan plan = plan_graph(launch_bound);
  EXPECT_TRUE(plan.pays) << plan.reason;
  EXPECT_DOUBLE_EQ(plan.graph_us, 250 + 150 * 0.8 + 1);
  EXPECT_EQ(plan.break_even_calls, std::ceil(1e5 / (1000 - plan.graph_us)));
}

TEST(GraphPlan, SaysWhyItDoesNotPay) {
  const GraphPlan busy = plan_graph({.eager_us = 20000, .device_us = 19900, .launches = 150, .capture_us = 1e5});
  EXPECT_FALSE(busy.pays);
  EXPECT_NE(busy.reason.find("not worth a graph"), std::string::npos) << busy.reason;
  const GraphPlan rare =
      plan_graph({.eager_us = 1000, .device_us = 250, .launches = 150, .capture_us = 1e6, .calls = 3});
  EXPECT_FALSE(rare.pays);
  EXPECT_NE(rare.reason.find("3.0 are expected"), std::string::npos) << rare.reason;
  const GraphPlan tiny = plan_graph({.eager_us = 10, .device_us = 2, .launches = 1, .copies = 2});
  EXPECT_FALSE(tiny.pays) << "one kernel is cheaper than a replay and two copies";
  EXPECT_TRUE(std::isinf(tiny.break_even_calls));
  const GraphPlan on_cpu = plan_graph({.is_cuda = false, .eager_us = 1000});
  EXPECT_FALSE(on_cpu.pays);
  EXPECT_NE(on_cpu.reason.find("CPU"), std::string::npos);
  EXPECT_THROW(plan_graph({.eager_us = -1}), Error);
}

}  // namespace
}  // namespace kernel_pytorch::plan
