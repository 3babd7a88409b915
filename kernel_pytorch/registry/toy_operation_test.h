// Test support: an op with kernels that behave and kernels that do not. scale: output = factor * x, over [rows,
// columns].
#pragma once

#include <algorithm>
#include <chrono>
#include <span>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::registry::toy {

struct Problem {
  double factor = 2;
  TensorView x, output;
};

inline void scale(const Problem& problem, double factor, int64_t left_out = 0) {
  const int64_t count = problem.x.element_count() - left_out;
  for (int64_t i = 0; i < count; ++i) {
    store_element(problem.output.data, problem.output.dtype, i,
                  load_element(problem.x.data, problem.x.dtype, i) * factor);
  }
}

inline void spin_microseconds(int64_t microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

inline Support support_cpu(const Problem&, const DeviceInfo& device) {
  return device.is_cpu() ? Support::yes() : Support::no("runs on the CPU");
}
inline Support support_aligned(const Problem& problem, const DeviceInfo& device) {
  if (!device.is_cpu()) return Support::no("runs on the CPU");
  return reinterpret_cast<uintptr_t>(problem.x.data) % 16 == 0 ? Support::yes()
                                                               : Support::no("x must be 16-byte aligned");
}
inline Support support_nothing(const Problem&, const DeviceInfo&) {
  return Support::no("needs a machine of the future");
}

// Its heuristic proposes the config that is in fact the slower one.
inline const Kernel<Problem> kAligned{
    .name = "aligned",
    .supports = support_aligned,
    .configs =
        [](const Problem&, const DeviceInfo&) {
          return std::vector<std::string>{"wait=400", "wait=0"};
        },
    .heuristic = [](const Problem&, const DeviceInfo&) { return 0; },
    .run =
        [](const Problem& problem, int config, Context&) {
          if (config == 0) spin_microseconds(400);
          scale(problem, problem.factor);
        },
    .source_hash = [] { return uint64_t{17}; },
};
inline const Kernel<Problem> kFuture{.name = "future", .supports = support_nothing};
inline const Kernel<Problem> kWrong{
    .name = "wrong",
    .supports = support_cpu,
    .run = [](const Problem& problem, int, Context&) { scale(problem, problem.factor * 1.001); },
};
inline const Kernel<Problem> kPartial{
    .name = "partial",
    .supports = support_cpu,
    .run = [](const Problem& problem, int, Context&) { scale(problem, problem.factor, 1); },
};
inline const Kernel<Problem> kThrowing{
    .name = "throwing",
    .supports = support_cpu,
    .run = [](const Problem&, int, Context&) { fail(ErrorCode::kDevice, "toy: no such luck"); },
};
// Takes only problems far larger than what a first check would use, and is wrong on the largest.
inline const Kernel<Problem> kManyRows{
    .name = "many_rows",
    .supports =
        [](const Problem& problem, const DeviceInfo&) {
          return problem.x.size(0) >= 3000 ? Support::yes() : Support::no("wants 3000 rows or more");
        },
    .run = [](const Problem& problem, int,
              Context&) { scale(problem, problem.factor * (problem.x.size(0) > 4000 ? 1.5 : 1)); },
};
inline const Kernel<Problem> kPlain{
    .name = "plain",
    .supports = support_cpu,
    .run =
        [](const Problem& problem, int, Context&) {
          spin_microseconds(150);
          scale(problem, problem.factor);
        },
};
inline const Kernel<Problem> kReference{
    .name = "reference",
    .supports = support_cpu,
    .run = [](const Problem& problem, int, Context&) { scale(problem, problem.factor); },
};

inline std::span<const Kernel<Problem>> good_kernels() {
  static const Kernel<Problem> kList[] = {kFuture, kAligned, kPlain, kReference};
  return kList;
}
inline std::span<const Kernel<Problem>> mixed_kernels() {
  static const Kernel<Problem> kList[] = {kWrong, kThrowing, kPartial, kAligned, kPlain, kReference};
  return kList;
}
inline std::span<const Kernel<Problem>> failing_kernels() {
  static const Kernel<Problem> kList[] = {kWrong, kThrowing, kPartial, kReference};
  return kList;
}
inline std::span<const Kernel<Problem>> many_row_kernels() {
  static const Kernel<Problem> kList[] = {kManyRows, kReference};
  return kList;
}
inline std::span<const Kernel<Problem>> no_kernels() {
  static const Kernel<Problem> kList[] = {kFuture};
  return kList;
}

inline void describe(const Problem& problem, tuning::KeyBuilder& key) {
  key.field("rows", tuning::bucket(problem.x.size(0)));
  key.field("columns", problem.x.size(1));
  key.field("dtype", problem.x.dtype);
}
inline void visit(Problem& problem, void (*visit)(void*, std::string_view, Role, TensorView&), void* state) {
  visit(state, "x", Role::kInput, problem.x);
  visit(state, "output", Role::kOutput, problem.output);
}
inline Problem make(const ProblemRequest& request) {
  KP_CHECK(request.shape.size() == 2, "toy: the shape has ", request.shape.size(), " dimensions; it needs 2");
  Problem problem;
  problem.x = contiguous_view(nullptr, request.dtype, request.shape, request.device);
  problem.output = problem.x;
  return problem;
}
inline void check(Problem& problem, Device) {
  KP_CHECK(problem.x.dtype != DType::kInt64, "toy: x is ", problem.x.dtype, "; convert it to fp32");
}
inline Problem shrink(const Problem& problem, int64_t elements) {
  Problem smaller = problem;
  const int64_t rows = std::clamp<int64_t>(elements / std::max<int64_t>(1, problem.x.size(1)), 1, problem.x.size(0));
  smaller.x.sizes[0] = smaller.output.sizes[0] = rows;
  return smaller;
}
inline Cost cost(const Problem& problem) {
  return {2 * problem.x.byte_count(), problem.x.element_count()};
}
inline std::vector<ProblemRequest> shapes() {
  return {{{8, 64}, DType::kFloat32, {}, {}}};
}

inline Operation<Problem> make_operation(std::string_view name, std::span<const Kernel<Problem>> (*kernels)()) {
  return {.name = name,
          .kernels = kernels,
          .describe = describe,
          .visit_tensors = visit,
          .make = make,
          .check = check,
          .shrink = shrink,
          .cost = cost,
          .shapes = shapes};
}
inline const Operation<Problem> kGood = make_operation("toy_good", good_kernels);
inline const Operation<Problem> kMixed = make_operation("toy_mixed", mixed_kernels);
inline const Operation<Problem> kFailing = make_operation("toy_failing", failing_kernels);
inline const Operation<Problem> kMany = make_operation("toy_many", many_row_kernels);
inline const Operation<Problem> kNone = make_operation("toy_none", no_kernels);

}  // namespace kernel_pytorch::registry::toy
