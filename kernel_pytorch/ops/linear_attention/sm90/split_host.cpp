// Scans by chunks in three roles on Hopper (split.cuh): which configuration takes one.
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/linear_attention/sm90/segments.h"
#include "kernel_pytorch/ops/linear_attention/sm90/split_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/linear_attention/sm90/split.cuh";
constexpr const char* kTypes = "takes bf16 and fp16; others go step by step";
constexpr const char* kSteps = "computes chunks; mode asks for single steps";
constexpr const char* kPool =
    "finds states in the order of sequences; state_index picks them, which the steps' kernel takes";
constexpr const char* kFewTokens = "pays from a chunk of 64 tokens on";
constexpr const char* kScalarGates = "leaves gradients of gates of whole tokens and of decays to other kernels";
constexpr const char* kGatePairs =
    "reads gates of channels in pairs: they start at multiples of 8 bytes, with even strides";

const char* gate_obstacle(const TensorView& gate) {
  if (!gate.is_present()) return nullptr;
  const bool is_even = gate.strides[0] % 2 == 0 && gate.strides[1] % 2 == 0 && gate.strides[2] % 2 == 0;
  return is_even && reinterpret_cast<uintptr_t>(gate.data) % 8 == 0 ? nullptr : kGatePairs;
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return obstacle;
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return missing;
  if (problem.query.dtype == DType::kFloat32) return kTypes;
  if (problem.mode == Mode::kRecurrent) return kSteps;
  if (problem.mode == Mode::kAuto && problem.value.sizes[1] < kSm90Chunk) return kFewTokens;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value}) {
    if (const char* obstacle = tensor_obstacle(*view)) return obstacle;
  }
  if (const char* obstacle = gate_obstacle(problem.channel_gate)) return obstacle;
  return problem.query.sizes[3] > 128 ? kSm90Sizes : nullptr;
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  if (problem.state_index.is_present()) return registry::Support::no(kPool);
  return registry::Support::unless(obstacle_of(problem, device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  const char* obstacle = obstacle_of(problem, device);
  if (obstacle == nullptr) obstacle = tensor_obstacle(problem.grad_output);
  if (obstacle == nullptr && problem.value.sizes[3] > 128) obstacle = kSm90Sizes;
  const bool wants_scalar_gates = problem.grad_gate.is_present() || problem.grad_decay.is_present();
  if (obstacle == nullptr && wants_scalar_gates) obstacle = kScalarGates;
  return registry::Support::unless(obstacle);
}

std::string text_of(const SplitConfig& config) {
  const char* gates = config.gates == SplitGates::kScalar    ? "kScalar"
                      : config.gates == SplitGates::kColumns ? "kColumns"
                                                             : "kValues";
  return concat("kernel_pytorch::linear_attention::SplitConfig{", config.columns, ", ", config.warpgroups,
                ", kernel_pytorch::linear_attention::SplitGates::", gates, ", ", bool_name(config.only_states), "}");
}
DeviceCode code_of(const SplitConfig& config, DType dtype, DType out) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::linear_attention::scan_split<", element_type_name(dtype), ", ",
                          element_type_name(out), ", ", text_of(config), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}
DeviceCode join_code() {
  return {.source = kSource,
          .entry = "kernel_pytorch::linear_attention::join_split_segments",
          .minimum_capability = 90,
          .architecture_specific = true};
}

SplitConfig config_of(const Scan& scan, bool only_states) {
  return {.columns = scan.columns() <= 64 ? 64 : 128,
          .warpgroups = scan.values() <= 64 ? 1 : 2,
          .gates = !scan.channel_gate.is_present() ? SplitGates::kScalar
                   : scan.gates_values             ? SplitGates::kValues
                                                   : SplitGates::kColumns,
          .only_states = only_states};
}

CUkern_st* kernel_of(const SplitConfig& config, DType dtype, DType out, Context& context) {
  static KernelTable<96> table;
  const int index =
      (((config.columns == 128 ? 1 : 0) * 2 + config.warpgroups - 1) * 3 + static_cast<int>(config.gates)) * 8 +
      (config.only_states ? 4 : 0) + (dtype == DType::kFloat16 ? 2 : 0) + (out == dtype ? 0 : 1);
  return table.get(index, context, [&] { return code_of(config, dtype, out); });
}

void launch_scan(const Scan& scan, ChunkArguments& arguments, bool only_states, Context& context) {
  static const std::string kLabel = "linear_attention split chunks";
  const SplitConfig config = config_of(scan, only_states);
  const DType dtype = scan.query.dtype, out = only_states ? dtype : scan.output.dtype;
  CUkern_st* kernel = kernel_of(config, dtype, out, context);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(scan.sequences * scan.heads * arguments.segments);
  shape.grid_y = static_cast<unsigned>(divide_up(scan.values(), int64_t{config.warpgroups} * kSm90Values));
  shape.block_x = static_cast<unsigned>(split_threads(config));
  shape.shared_bytes = static_cast<unsigned>(split_shared_bytes(config));
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void launch_join(const Scan& scan, const JoinArguments& join, Context& context) {
  static const std::string kLabel = "linear_attention split segments";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, join_code);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(scan.sequences * scan.heads);
  shape.grid_y = static_cast<unsigned>(divide_up(scan.columns() * scan.values(), kJoinThreads));
  shape.block_x = kJoinThreads;
  SplitJoinArguments arguments{join, config_of(scan, true).gates == SplitGates::kValues};
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_split(const Scan& scan, Context& context) {
  const bool of_values = config_of(scan, true).gates == SplitGates::kValues;
  run_in_segments(scan, of_values ? scan.values() : scan.columns(), {launch_scan, launch_join}, context);
}

void run_forward(const Forward& problem, int, Context& context) {
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  run_split(forward_scan(problem), context);
}
void run_backward(const Backward& problem, int, Context& context) {
  run_backward_by(run_split, problem, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> forward_code() {
  constexpr DType kBf16 = DType::kBFloat16;
  std::vector<DeviceCode> codes{join_code()};
  for (int columns : {64, 128}) {
    for (int warpgroups : {1, 2}) {
      for (SplitGates gates : {SplitGates::kScalar, SplitGates::kColumns}) {
        for (bool only_states : {false, true}) {
          codes.push_back(code_of({columns, warpgroups, gates, only_states}, kBf16, kBf16));
        }
      }
    }
  }
  codes.push_back(code_of({128, 2, SplitGates::kColumns, false}, DType::kFloat16, DType::kFloat16));
  return codes;
}
std::vector<DeviceCode> backward_code() {
  constexpr DType kBf16 = DType::kBFloat16;
  std::vector<DeviceCode> codes = gate_code();
  for (int columns : {64, 128}) {
    for (int warpgroups : {1, 2}) {
      for (DType out : {kBf16, DType::kFloat32}) {
        codes.push_back(code_of({columns, warpgroups, SplitGates::kValues, false}, kBf16, out));
      }
      codes.push_back(code_of({columns, warpgroups, SplitGates::kValues, true}, kBf16, kBf16));
    }
  }
  codes.push_back(code_of({128, 2, SplitGates::kScalar, false}, kBf16, DType::kFloat32));
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardSm90Split{.name = "sm90_split",
                                                            .supports = supports_forward,
                                                            .run = run_forward,
                                                            .source_hash = source_hash,
                                                            .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardSm90Split{.name = "sm90_split",
                                                              .supports = supports_backward,
                                                              .run = run_backward,
                                                              .source_hash = source_hash,
                                                              .device_code = backward_code};

}  // namespace kernel_pytorch::linear_attention
