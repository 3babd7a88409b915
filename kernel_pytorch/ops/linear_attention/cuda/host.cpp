// The kernel that goes step by step: which instantiation takes a state, and the ops by it.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/linear_attention/cuda/step.cuh";
constexpr int kTypes = std::size(kCudaTypes);
constexpr int kRowCounts[] = {8, 16, 32};  // of a warp: 64, 128 and 256 columns
constexpr const char* kManyColumns = "holds a state of at most 256 columns, and gradients also of at most 256 values";

// Values of a lane: 32 numbers of the state a thread.
int vector_of(int rows, bool has_vectors) {
  return has_vectors ? 32 / rows : 1;
}
DeviceCode code_of(DType dtype, DType out, int rows, bool has_vectors) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::linear_attention::scan_by_steps<", element_type_name(dtype), ", ",
                          element_type_name(out), ", ", rows, ", ", vector_of(rows, has_vectors), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (problem.query.sizes[3] > kMostStepColumns) return registry::Support::no(kManyColumns);
  return registry::Support::yes();
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  if (std::max(problem.query.sizes[3], problem.value.sizes[3]) > kMostStepColumns) {
    return registry::Support::no(kManyColumns);
  }
  return registry::Support::yes();
}

void run_forward(const Forward& problem, int, Context& context) {
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  run_by_steps(forward_scan(problem), context);
}
void run_backward(const Backward& problem, int, Context& context) {
  run_backward_by(run_by_steps, problem, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes = step_code();
  for (DeviceCode& code : gate_code()) codes.push_back(std::move(code));
  return codes;
}

}  // namespace

void run_by_steps(const Scan& scan, Context& context) {
  static const std::string kLabel = "linear_attention steps";
  static KernelTable<kTypes * 2 * 3 * 2> table;
  const int64_t heads = scan.sequences * scan.heads;
  if (heads == 0) return;
  KP_CHECK(heads < int64_t{1} << 31, "linear_attention: ", heads,
           " heads of sequences; at most 2^31 - 1 are supported, split the batch");
  const DType dtype = scan.query.dtype, out = scan.output.dtype;
  const int rows = scan.columns() <= 64 ? 0 : scan.columns() <= 128 ? 1 : 2;
  // States may be read and written four at a time where they lie so.
  const bool has_vectors = scan.values() % 4 == 0 && reinterpret_cast<uintptr_t>(scan.initial) % 16 == 0 &&
                           reinterpret_cast<uintptr_t>(scan.final) % 16 == 0 && scan.values() > 32;
  const int entry = ((cuda_type_index(dtype) * 2 + (out == dtype ? 0 : 1)) * 3 + rows) * 2 + (has_vectors ? 1 : 0);
  CUkern_st* kernel = table.get(entry, context, [&] { return code_of(dtype, out, kRowCounts[rows], has_vectors); });
  ScanArguments arguments = arguments_of(scan);
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(heads);
  shape.grid_y = static_cast<unsigned>(divide_up(scan.values(), 32 * vector_of(kRowCounts[rows], has_vectors)));
  shape.block_x = kStepThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

std::vector<DeviceCode> step_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (int rows : kRowCounts) {
      for (bool has_vectors : {false, true}) {
        codes.push_back(code_of(dtype, dtype, rows, has_vectors));
        if (dtype != DType::kFloat32) codes.push_back(code_of(dtype, DType::kFloat32, rows, has_vectors));
      }
    }
  }
  return codes;
}

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda_step",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = step_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda_step",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::linear_attention
