// Scans by chunks on Hopper: which configuration takes one, and into how many segments its sequences are cut so that
// the device is full.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"
#include "kernel_pytorch/ops/linear_attention/sm90/chunk_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention {
namespace {

constexpr const char* kSource = "kernel_pytorch/ops/linear_attention/sm90/chunk.cuh";
constexpr const char* kSizes = "takes 16 to 128 columns and values of the state, multiples of 8";
constexpr const char* kTypes = "takes bf16 and fp16; others go step by step";
constexpr const char* kChannels = "takes one gate for each token and head; gates of channels go step by step";
constexpr const char* kSteps = "computes chunks; mode asks for single steps";
constexpr const char* kFewTokens = "pays from a chunk of 64 tokens on";
constexpr int64_t kLeastSegmentChunks = 4;

// The heads of [batch, tokens, heads, size] in front of its tokens.
TensorView heads_first(const TensorView& view) {
  TensorView turned = view;
  std::swap(turned.sizes[1], turned.sizes[2]);
  std::swap(turned.strides[1], turned.strides[2]);
  return turned;
}

const char* tensor_obstacle(const TensorView& view) {
  if (view.sizes[3] % 8 != 0 || view.sizes[3] < 16) return kSizes;
  return cuda_device::tensor_map_obstacle(view);
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return obstacle;
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return missing;
  if (problem.query.dtype == DType::kFloat32) return kTypes;
  if (problem.mode == Mode::kRecurrent) return kSteps;
  if (problem.channel_gate.is_present()) return kChannels;
  if (problem.mode == Mode::kAuto && problem.value.sizes[1] < 64) return kFewTokens;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value}) {
    if (const char* obstacle = tensor_obstacle(*view)) return obstacle;
  }
  return problem.query.sizes[3] > 128 ? kSizes : nullptr;
}

registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  return registry::Support::unless(obstacle_of(problem, device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  const char* obstacle = obstacle_of(problem, device);
  if (obstacle == nullptr) obstacle = tensor_obstacle(problem.grad_output);
  if (obstacle == nullptr && problem.value.sizes[3] > 128) obstacle = kSizes;
  if (obstacle == nullptr) obstacle = unchecked_gradient(problem);
  return registry::Support::unless(obstacle);
}

std::string text_of(const ChunkConfig& config) {
  const char* gates = config.gates == Gates::kNone ? "kNone" : config.gates == Gates::kDecay ? "kDecay" : "kToken";
  return concat("kernel_pytorch::linear_attention::ChunkConfig{", config.columns, ", ", config.warpgroups,
                ", kernel_pytorch::linear_attention::Gates::", gates, ", ", bool_name(config.only_states), "}");
}
DeviceCode code_of(const ChunkConfig& config, DType dtype, DType out) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::linear_attention::scan_by_chunks<", element_type_name(dtype), ", ",
                          element_type_name(out), ", ", text_of(config), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}
DeviceCode join_code() {
  return {.source = kSource,
          .entry = "kernel_pytorch::linear_attention::join_segments",
          .minimum_capability = 90,
          .architecture_specific = true};
}

ChunkConfig config_of(const Scan& scan, bool only_states) {
  return {.columns = scan.columns() <= 64 ? 64 : 128,
          .warpgroups = scan.values() <= 64 ? 1 : 2,
          .gates = scan.gate.is_present()    ? Gates::kToken
                   : scan.decay.is_present() ? Gates::kDecay
                                             : Gates::kNone,
          .only_states = only_states};
}

// How much of the device works while so many equal blocks run, one on a multiprocessor.
double share_of_device(int64_t blocks, int64_t processors) {
  return static_cast<double>(blocks) / static_cast<double>(divide_up(blocks, processors) * processors);
}
// Segments take a second pass over keys and values, half as long as the first.
int64_t segments_of(const Scan& scan, int64_t blocks, int64_t processors) {
  const int64_t tokens =
      scan.offsets.is_present() ? scan.value.sizes[1] / std::max<int64_t>(scan.sequences, 1) : scan.value.sizes[1];
  const int64_t most = std::min<int64_t>(tokens / (kLeastSegmentChunks * kSm90Chunk), 64);
  int64_t best = 1;
  double least = 1 / share_of_device(blocks, processors);
  for (int64_t segments = 2; segments <= most && blocks * segments <= 4 * processors; ++segments) {
    const double time = 1.55 / share_of_device(blocks * segments, processors);
    if (time < least) {
      least = time;
      best = segments;
    }
  }
  return best;
}

CUkern_st* kernel_of(const ChunkConfig& config, DType dtype, DType out, Context& context) {
  static KernelTable<96> table;
  const int index =
      (((config.columns == 128 ? 1 : 0) * 2 + config.warpgroups - 1) * 3 + static_cast<int>(config.gates)) * 8 +
      (config.only_states ? 4 : 0) + (dtype == DType::kFloat16 ? 2 : 0) + (out == dtype ? 0 : 1);
  return table.get(index, context, [&] { return code_of(config, dtype, out); });
}

void launch_scan(const Scan& scan, ChunkArguments& arguments, bool only_states, Context& context) {
  static const std::string kLabel = "linear_attention chunks";
  const ChunkConfig config = config_of(scan, only_states);
  const DType dtype = scan.query.dtype, out = only_states ? dtype : scan.output.dtype;
  CUkern_st* kernel = kernel_of(config, dtype, out, context);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(scan.sequences * scan.heads * arguments.segments);
  shape.grid_y = static_cast<unsigned>(divide_up(scan.values(), int64_t{config.warpgroups} * kSm90Values));
  shape.block_x = static_cast<unsigned>(chunk_threads(config));
  shape.shared_bytes = static_cast<unsigned>(chunk_shared_bytes(config));
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void launch_join(const Scan& scan, JoinArguments& arguments, Context& context) {
  static const std::string kLabel = "linear_attention segments";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, join_code);
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(scan.sequences * scan.heads);
  shape.grid_y = static_cast<unsigned>(divide_up(scan.columns() * scan.values(), kJoinThreads));
  shape.block_x = kJoinThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_by_chunks(const Scan& scan, Context& context) {
  if (scan.sequences * scan.heads == 0) return;
  const int64_t heads = scan.sequences * scan.heads, processors = std::max(context.info->cuda.multiprocessors, 1);
  KP_CHECK(heads * 64 < int64_t{1} << 31 && scan.value.sizes[1] < int64_t{1} << 31, "linear_attention: ", heads,
           " heads of sequences, ", scan.value.sizes[1], " tokens; split the batch");
  ChunkArguments arguments{};
  arguments.scan = arguments_of(scan);
  arguments.segments = 1;
  cuda_device::encode_tensor_map(heads_first(scan.query), kSm90Chunk, arguments.query.words);
  cuda_device::encode_tensor_map(heads_first(scan.key), kSm90Chunk, arguments.key.words);
  cuda_device::encode_tensor_map(heads_first(scan.value), kSm90Chunk, arguments.value.words);
  const int64_t tiles = divide_up(scan.values(), scan.values() <= 64 ? 64 : 128);
  const int64_t segments = segments_of(scan, heads * tiles, processors);
  if (segments > 1) {
    const auto size = static_cast<size_t>(heads * segments * scan.columns() * scan.values()) * sizeof(float);
    auto* shares = static_cast<float*>(context.scratch->allocate(size));
    auto* starts = static_cast<float*>(context.scratch->allocate(size));
    auto* totals =
        static_cast<float*>(context.scratch->allocate(static_cast<size_t>(heads * segments) * sizeof(float)));
    arguments.segments = static_cast<int32_t>(segments);
    arguments.scan.initial = nullptr;
    arguments.scan.final = shares;
    arguments.scan.initial_is_turned = arguments.scan.final_is_turned = false;
    arguments.totals = totals;
    launch_scan(scan, arguments, true, context);
    JoinArguments join{.initial = scan.initial,
                       .final = scan.final,
                       .shares = shares,
                       .totals = totals,
                       .starts = starts,
                       .segments = arguments.segments,
                       .columns = static_cast<int32_t>(scan.columns()),
                       .values = static_cast<int32_t>(scan.values()),
                       .backwards = scan.backwards,
                       .initial_is_turned = scan.initial_is_turned,
                       .final_is_turned = scan.final_is_turned};
    launch_join(scan, join, context);
    arguments.scan.initial = starts;
    arguments.scan.final = nullptr;
    arguments.totals = nullptr;
  }
  launch_scan(scan, arguments, false, context);
}

void run_forward(const Forward& problem, int, Context& context) {
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  run_by_chunks(forward_scan(problem), context);
}
void run_backward(const Backward& problem, int, Context& context) {
  run_backward_by(run_by_chunks, problem, context);
}

uint64_t source_hash() {
  return jit::source_hash(kSource);
}
std::vector<DeviceCode> forward_code() {
  constexpr DType kBf16 = DType::kBFloat16;
  std::vector<DeviceCode> codes{join_code()};
  for (int columns : {64, 128}) {
    for (int warpgroups : {1, 2}) {
      for (Gates gates : {Gates::kNone, Gates::kDecay, Gates::kToken}) {
        for (bool only_states : {false, true}) {
          codes.push_back(code_of({columns, warpgroups, gates, only_states}, kBf16, kBf16));
        }
      }
    }
  }
  codes.push_back(code_of({128, 2, Gates::kToken, false}, DType::kFloat16, DType::kFloat16));
  return codes;
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes = gate_code();
  for (Gates gates : {Gates::kDecay, Gates::kToken}) {
    codes.push_back(code_of({128, 2, gates, false}, DType::kBFloat16, DType::kFloat32));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardSm90{.name = "sm90_chunk",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = source_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardSm90{.name = "sm90_chunk",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = source_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::linear_attention
