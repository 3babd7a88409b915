// The delta rule on a GPU: which instantiation takes a state, and the ops by scans (scan_cuda.h).
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"
#include "kernel_pytorch/ops/linear_attention/delta/cuda/scan_cuda.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/linear_attention/delta/cuda/scan.cuh";
constexpr int kTypes = std::size(kCudaTypes);
constexpr int kRowCounts[] = {2, 4, 8};  // of a lane: 64, 128 and 256 rows
constexpr int64_t kMostRows = 256;
constexpr std::string_view kScanNames[] = {"kForward", "kGradient", "kReads", "kWrites"};
constexpr const char* kManyColumns = "holds a state of at most 256 columns, and gradients also of at most 256 values";

DeviceCode code_of(DType dtype, int rows, Scan scan) {
  return {
      .source = kSource,
      .entry = concat("kernel_pytorch::linear_attention::delta::scan_by_steps<", element_type_name(dtype), ", ", rows,
                      ", kernel_pytorch::linear_attention::delta::Scan::", kScanNames[static_cast<int>(scan)], ">"),
      .minimum_capability = 80,
      .architecture_specific = false};
}
DeviceCode finish_code_of(DType dtype) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::linear_attention::delta::finish_gradients<", element_type_name(dtype), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

template <class Problem>
registry::Support supports(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return registry::Support::no(obstacle);
  int64_t rows = problem.query.sizes[3];
  if constexpr (requires { problem.grad_output; }) rows = std::max(rows, problem.value.sizes[3]);
  return rows > kMostRows ? registry::Support::no(kManyColumns) : registry::Support::yes();
}

float* floats_of(const TensorView& view) {
  return view.is_present() ? view.as<float>() : nullptr;
}

template <class Problem>
DeltaArguments arguments_of(const Problem& problem, const Sizes& sizes) {
  DeltaArguments arguments{};
  arguments.query = tensor_of(problem.query, sizes.heads);
  arguments.key = tensor_of(problem.key, sizes.heads);
  arguments.value = tensor_of(problem.value, sizes.heads);
  arguments.beta = tensor_of(problem.beta, sizes.heads);
  arguments.gate = tensor_of(problem.gate, sizes.heads);
  arguments.channel_gate = tensor_of(problem.channel_gate, sizes.heads);
  arguments.output = tensor_of({}, sizes.heads);
  arguments.grad_output = tensor_of({}, sizes.heads);
  arguments.offsets = problem.cu_seqlens.data;
  arguments.offsets_are_wide = problem.cu_seqlens.dtype == DType::kInt64;
  arguments.tokens = sizes.tokens;
  arguments.rows = sizes.batch * sizes.tokens * sizes.heads;
  arguments.heads = static_cast<int32_t>(sizes.heads);
  arguments.columns = static_cast<int32_t>(sizes.columns);
  arguments.values = static_cast<int32_t>(sizes.values);
  arguments.scale = static_cast<float>(problem.scale);
  arguments.normalizes = problem.normalize_qk;
  arguments.beta_is_float = problem.beta.dtype == DType::kFloat32;
  return arguments;
}

void run_scan(Scan scan, DType dtype, const Sizes& sizes, DeltaArguments arguments, const float* initial, float* final,
              Context& context) {
  static const std::string kLabel = "delta_rule scan";
  static KernelTable<kTypes * 3 * 4> table;
  if (sizes.sequences * sizes.heads == 0) return;
  const bool is_turned = scan == Scan::kReads || scan == Scan::kWrites;
  const int64_t rows = is_turned ? sizes.values : sizes.columns, columns = is_turned ? sizes.columns : sizes.values;
  const int count = rows <= 64 ? 0 : rows <= 128 ? 1 : 2;
  const int entry = (cuda_type_index(dtype) * 3 + count) * 4 + static_cast<int>(scan);
  CUkern_st* kernel = table.get(entry, context, [&] { return code_of(dtype, kRowCounts[count], scan); });
  arguments.initial = initial;
  arguments.final = final;
  // Rows of states may be read and written four values at a time where they lie so.
  arguments.has_vectors = sizes.values % 4 == 0 && reinterpret_cast<uintptr_t>(initial) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(final) % 16 == 0;
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(sizes.sequences * sizes.heads);
  shape.grid_y = static_cast<unsigned>(divide_up(columns, kWarpColumns * kScanWarps));
  shape.block_x = kScanThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_forward(const Forward& problem, int, Context& context) {
  const Sizes sizes(problem);
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  DeltaArguments arguments = arguments_of(problem, sizes);
  arguments.output = tensor_of(problem.output, sizes.heads);
  if (problem.state_index.is_present()) {
    arguments.state_index = problem.state_index.data;
    arguments.index_is_wide = problem.state_index.dtype == DType::kInt64;
    arguments.slots = problem.initial_state.sizes[0];
  }
  run_scan(Scan::kForward, problem.query.dtype, sizes, arguments, floats_of(problem.initial_state),
           floats_of(problem.final_state), context);
}

void run_finish(DType dtype, DeltaArguments& arguments, Context& context) {
  static const std::string kLabel = "delta_rule gradients";
  static KernelTable<kTypes> table;
  if (arguments.rows == 0) return;
  CUkern_st* kernel = table.get(cuda_type_index(dtype), context, [&] { return finish_code_of(dtype); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(divide_up(arguments.rows, kFinishThreads / 32));
  shape.block_x = kFinishThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_gates(const Backward& problem, const Sizes& sizes, const DeltaArguments& of, const float* final_state,
               Context& context) {
  if (sizes.sequences * sizes.heads == 0 || sizes.tokens == 0) return;
  GateArguments arguments{};
  arguments.query = of.query;
  arguments.key = of.key;
  arguments.grad_query = of.grad_query;
  arguments.terms = of.terms;
  arguments.grad_gate = problem.grad_gate.data;
  arguments.grad_channel_gate = problem.grad_channel_gate.data;
  arguments.final_state = final_state;
  arguments.grad_final_state = floats_of(problem.grad_final_state);
  arguments.offsets = of.offsets;
  arguments.offsets_are_wide = of.offsets_are_wide;
  arguments.tokens = of.tokens;
  arguments.rows = of.rows;
  arguments.heads = of.heads;
  arguments.columns = of.columns;
  arguments.values = of.values;
  arguments.gate_is_float = problem.gate.dtype == DType::kFloat32;
  arguments.channel_gate_is_float = problem.channel_gate.dtype == DType::kFloat32;
  arguments.has_initial = problem.initial_state.is_present();
  sum_gate_terms(arguments, problem.query.dtype, sizes.sequences * sizes.heads, context);
}

void run_backward(const Backward& problem, int, Context& context) {
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype;
  const bool wants_gates = problem.grad_gate.is_present() || problem.grad_channel_gate.is_present();
  DeltaArguments arguments = arguments_of(problem, sizes);
  arguments.grad_output = tensor_of(problem.grad_output, sizes.heads);
  // Scratch of tokens in no sequence is read: zeros.
  const auto scratch = [&](int64_t count) {
    auto* floats = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(float)));
    if (problem.cu_seqlens.is_present() && count > 0) {
      cuda_device::fill_bytes(context.info->device.index, floats, 0, static_cast<size_t>(count) * sizeof(float),
                              context.stream);
    }
    return floats;
  };
  arguments.errors = scratch(arguments.rows * sizes.values);
  arguments.grad_u = scratch(arguments.rows * sizes.values);
  arguments.grad_query = scratch(arguments.rows * sizes.columns);
  arguments.grad_key_read = scratch(arguments.rows * sizes.columns);
  arguments.grad_key_written = scratch(arguments.rows * sizes.columns);
  if (problem.normalize_qk) arguments.inverse_norms = scratch(arguments.rows * 2);
  if (wants_gates) arguments.terms = scratch(arguments.rows);
  float* final_state = nullptr;
  if (wants_gates && problem.grad_final_state.is_present()) {
    final_state = scratch(sizes.sequences * sizes.heads * sizes.columns * sizes.values);
  }
  arguments.grad_query_out = problem.grad_query.data;
  arguments.grad_key_out = problem.grad_key.data;
  arguments.grad_value_out = problem.grad_value.data;
  arguments.grad_beta_out = problem.grad_beta.data;
  clear_unless_batch(problem.grad_gate, problem.cu_seqlens, context);
  clear_unless_batch(problem.grad_channel_gate, problem.cu_seqlens, context);

  const float *initial = floats_of(problem.initial_state), *grad_final = floats_of(problem.grad_final_state);
  run_scan(Scan::kForward, dtype, sizes, arguments, initial, final_state, context);
  run_scan(Scan::kGradient, dtype, sizes, arguments, grad_final, floats_of(problem.grad_initial_state), context);
  run_scan(Scan::kReads, dtype, sizes, arguments, initial, nullptr, context);
  run_scan(Scan::kWrites, dtype, sizes, arguments, grad_final, nullptr, context);
  run_finish(dtype, arguments, context);
  if (wants_gates) run_gates(problem, sizes, arguments, final_state, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> scan_code(std::initializer_list<Scan> scans) {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (int rows : kRowCounts) {
      for (Scan scan : scans) codes.push_back(code_of(dtype, rows, scan));
    }
  }
  return codes;
}
std::vector<DeviceCode> forward_code() {
  return scan_code({Scan::kForward});
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes = scan_code({Scan::kForward, Scan::kGradient, Scan::kReads, Scan::kWrites});
  for (DType dtype : kCudaTypes) codes.push_back(finish_code_of(dtype));
  for (DeviceCode& code : gate_code()) codes.push_back(std::move(code));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda_step",
                                                       .supports = supports<Forward>,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda_step",
                                                         .supports = supports<Backward>,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::linear_attention::delta
