// The delta rule by chunks on Hopper: which instantiation takes a problem, and its two launches.
#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"
#include "kernel_pytorch/ops/linear_attention/delta/operation.h"
#include "kernel_pytorch/ops/linear_attention/delta/sm90/chunk_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention::delta {
namespace {

constexpr const char* kChunkSource = "kernel_pytorch/ops/linear_attention/delta/sm90/chunk.cuh";
constexpr const char* kPrepareSource = "kernel_pytorch/ops/linear_attention/delta/sm90/prepare.cuh";
constexpr const char* kGradientSource = "kernel_pytorch/ops/linear_attention/delta/sm90/gradient.cuh";
constexpr const char* kFinishSource = "kernel_pytorch/ops/linear_attention/delta/sm90/finish.cuh";
constexpr const char* kChannelSource = "kernel_pytorch/ops/linear_attention/delta/sm90/prepare_channels.cuh";
constexpr const char* kSizes = "takes 16 to 128 columns and values from 16 on, multiples of 8";
constexpr const char* kTypes = "takes bf16 and fp16; others go step by step";
constexpr const char* kSteps = "computes chunks; mode asks for single steps";
constexpr const char* kFewTokens = "pays from a chunk of 64 tokens on";
constexpr std::string_view kPassNames[] = {"kForward", "kStates", "kGradient"};
constexpr const char* kChannels =
    "takes one gate for each token and head; gradients with gates of channels go step by step";
constexpr const char* kNoTokens = "needs a token";

// The heads of [batch, tokens, heads, size] in front of its tokens.
TensorView with_heads_first(const TensorView& view) {
  TensorView turned = view;
  std::swap(turned.sizes[1], turned.sizes[2]);
  std::swap(turned.strides[1], turned.strides[2]);
  return turned;
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return obstacle;
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return missing;
  if (problem.query.dtype == DType::kFloat32) return kTypes;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value}) {
    if (view->sizes[3] % 8 != 0 || view->sizes[3] < 16) return kSizes;
    if (const char* obstacle = cuda_device::tensor_map_obstacle(*view)) return obstacle;
  }
  return problem.query.sizes[3] > 128 ? kSizes : nullptr;
}
registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  if (const char* obstacle = obstacle_of(problem, device)) return registry::Support::no(obstacle);
  if (problem.mode == Mode::kRecurrent) return registry::Support::no(kSteps);
  const bool has_few = problem.mode == Mode::kAuto && problem.value.sizes[1] < kChunkTokens;
  return registry::Support::unless(has_few ? kFewTokens : problem.value.sizes[1] == 0 ? kNoTokens : nullptr);
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  const char* obstacle = obstacle_of(problem, device);
  if (obstacle == nullptr && problem.channel_gate.is_present()) obstacle = kChannels;
  if (obstacle == nullptr && problem.value.sizes[1] < kChunkTokens) obstacle = kFewTokens;
  if (obstacle == nullptr) obstacle = cuda_device::tensor_map_obstacle(problem.grad_output);
  return registry::Support::unless(obstacle);
}

DeviceCode prepare_code(int width, bool by_channel, DType dtype, bool for_gradient) {
  return {.source = by_channel ? kChannelSource : kPrepareSource,
          .entry = concat("kernel_pytorch::linear_attention::delta::prepare_", by_channel ? "channels" : "chunks", "<",
                          element_type_name(dtype), ", ", width,
                          by_channel     ? ">"
                          : for_gradient ? ", true>"
                                         : ", false>"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode chunk_code(const DeltaConfig& config, DType dtype) {
  const bool is_gradient = config.pass == Pass::kGradient;
  return {.source = is_gradient ? kGradientSource : kChunkSource,
          .entry = concat(
              "kernel_pytorch::linear_attention::delta::", is_gradient ? "gradient" : "delta", "_by_chunks<",
              element_type_name(dtype), ", kernel_pytorch::linear_attention::delta::DeltaConfig{", config.columns, ", ",
              config.warpgroups, ", ", bool_name(config.by_channel),
              ", kernel_pytorch::linear_attention::delta::Pass::", kPassNames[static_cast<int>(config.pass)], "}>"),
          .minimum_capability = 90,
          .architecture_specific = true};
}

DeviceCode finish_code(int width, DType dtype) {
  return {.source = kFinishSource,
          .entry = concat("kernel_pytorch::linear_attention::delta::finish_chunks<", element_type_name(dtype), ", ",
                          width, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// A block is one multiprocessor's: where few heads leave some without, blocks of 64 values instead of 128 are as quick.
DeltaConfig config_of(const Sizes& sizes, bool by_channel, int64_t processors) {
  const int64_t small_blocks = sizes.sequences * sizes.heads * divide_up(sizes.values, kGroupValues);
  return {.columns = sizes.columns <= 64 ? 64 : 128,
          .warpgroups = sizes.values <= kGroupValues || small_blocks <= processors ? 1 : 2,
          .by_channel = by_channel};
}

void run_prepare(const PrepareArguments& arguments, const DeltaConfig& config, int64_t blocks, DType dtype,
                 Context& context) {
  static const std::string kLabel = "delta_rule preparation of chunks";
  static KernelTable<16> table;
  const int entry =
      (((config.columns == 128 ? 1 : 0) * 2 + config.by_channel) * 2 + (dtype == DType::kFloat16 ? 1 : 0)) * 2 +
      (config.pass != Pass::kForward);
  CUkern_st* kernel = table.get(entry, context, [&] {
    return prepare_code(config.columns, config.by_channel, dtype, config.pass != Pass::kForward);
  });
  void* pointers[] = {const_cast<PrepareArguments*>(&arguments)};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(blocks);
  shape.block_x = kPrepareThreads;
  if (config.by_channel) shape.shared_bytes = static_cast<unsigned>(channel_shared_bytes(config.columns));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

void run_chunks(const DeltaChunkArguments& arguments, const DeltaConfig& config, const Sizes& sizes, DType dtype,
                Context& context) {
  static const std::string kLabel = "delta_rule chunks";
  static KernelTable<48> table;
  const int entry = (((config.columns == 128 ? 1 : 0) * 2 + config.warpgroups - 1) * 2 + config.by_channel) * 2 +
                    (dtype == DType::kFloat16 ? 1 : 0) + 16 * static_cast<int>(config.pass);
  CUkern_st* kernel = table.get(entry, context, [&] { return chunk_code(config, dtype); });
  void* pointers[] = {const_cast<DeltaChunkArguments*>(&arguments)};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(sizes.sequences * sizes.heads);
  shape.grid_y = static_cast<unsigned>(divide_up(sizes.values, int64_t{config.warpgroups} * kGroupValues));
  shape.block_x = static_cast<unsigned>(delta_threads(config));
  shape.shared_bytes = static_cast<unsigned>(delta_shared_bytes(config));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

float* state_of(const TensorView& view) {
  return view.is_present() ? view.as<float>() : nullptr;
}

// What both ops need of a problem.
struct Plan {
  DeltaConfig config;
  int64_t chunks, blocks;  // of a sequence of a batch; of all heads
};
template <class Problem>
Plan plan_of(const Problem& problem, const Sizes& sizes, const Context& context) {
  const int64_t chunks = divide_up(sizes.tokens, kChunkTokens);
  const int64_t slots =
      problem.cu_seqlens.is_present() ? sizes.tokens / kChunkTokens + sizes.sequences : sizes.sequences * chunks;
  const int64_t blocks = slots * sizes.heads;
  KP_CHECK(blocks * kChunkTokens < int64_t{1} << 31, "delta_rule: ", sizes.batch, " x ", sizes.tokens, " tokens of ",
           sizes.heads, " heads; at most 2^31 are supported, split the batch");
  return {config_of(sizes, problem.channel_gate.is_present(), std::max(context.info->cuda.multiprocessors, 1)), chunks,
          blocks};
}
void* allocate(Context& context, int64_t bytes) {
  return context.scratch->allocate(static_cast<size_t>(bytes));
}
void encode(const TensorView& view, tile::TensorMap& map) {
  cuda_device::encode_tensor_map(view, kChunkTokens, map.words);
}

template <class Problem>
PrepareArguments prepare_arguments(const Problem& problem, const Sizes& sizes, const Plan& plan, Context& context) {
  PrepareArguments prepare{};
  prepare.query = tensor_of(problem.query, sizes.heads);
  prepare.key = tensor_of(problem.key, sizes.heads);
  prepare.beta = tensor_of(problem.beta, sizes.heads);
  prepare.gate = tensor_of(problem.gate, sizes.heads);
  prepare.channel_gate = tensor_of(problem.channel_gate, sizes.heads);
  prepare.matrices = allocate(context, plan.blocks * kMatrixBytes);
  prepare.weights = allocate(context, plan.blocks * kMatrixBytes);
  prepare.factors = static_cast<float*>(allocate(context, plan.blocks * kFactorBytes));
  prepare.offsets = problem.cu_seqlens.data;
  prepare.tokens = sizes.tokens;
  prepare.sequences = sizes.sequences;
  prepare.chunks = plan.chunks;
  prepare.heads = static_cast<int32_t>(sizes.heads);
  prepare.columns = static_cast<int32_t>(sizes.columns);
  prepare.scale = static_cast<float>(problem.scale);
  prepare.offsets_are_wide = problem.cu_seqlens.dtype == DType::kInt64;
  prepare.normalizes = problem.normalize_qk;
  return prepare;
}
DeltaChunkArguments chunk_arguments(const PrepareArguments& prepare, const Sizes& sizes) {
  DeltaChunkArguments arguments{};
  arguments.matrices = prepare.matrices;
  arguments.weights = prepare.weights;
  arguments.factors = prepare.factors;
  arguments.offsets = prepare.offsets;
  arguments.tokens = sizes.tokens;
  arguments.chunks = prepare.chunks;
  arguments.heads = prepare.heads;
  arguments.columns = prepare.columns;
  arguments.values = static_cast<int32_t>(sizes.values);
  arguments.query_group = prepare.query.group;
  arguments.key_group = prepare.key.group;
  arguments.offsets_are_wide = prepare.offsets_are_wide;
  return arguments;
}

void run_forward(const Forward& problem, int, Context& context) {
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype;
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  if (sizes.sequences * sizes.heads == 0) return;
  const Plan plan = plan_of(problem, sizes, context);
  PrepareArguments prepare = prepare_arguments(problem, sizes, plan, context);
  DeltaChunkArguments arguments = chunk_arguments(prepare, sizes);
  if (plan.config.by_channel) {
    const auto prepared = [&](void*& rows, tile::TensorMap& map) {
      rows = allocate(context, plan.blocks * delta_row_bytes(plan.config));
      encode(
          contiguous_view(rows, dtype, {1, 1, plan.blocks * kChunkTokens, plan.config.columns}, problem.query.device),
          map);
    };
    prepared(prepare.read_query, arguments.query);
    prepared(prepare.read_key, arguments.key);
    prepared(prepare.written_key, arguments.written_key);
  } else {
    encode(with_heads_first(problem.query), arguments.query);
    encode(with_heads_first(problem.key), arguments.key);
  }
  encode(with_heads_first(problem.value), arguments.value);
  run_prepare(prepare, plan.config, plan.blocks, dtype, context);
  arguments.output = tensor_of(problem.output, sizes.heads);
  if (problem.state_index.is_present()) {
    arguments.state_index = problem.state_index.data;
    arguments.index_is_wide = problem.state_index.dtype == DType::kInt64;
    arguments.slots = problem.initial_state.sizes[0];
  }
  arguments.initial = state_of(problem.initial_state);
  arguments.final = state_of(problem.final_state);
  run_chunks(arguments, plan.config, sizes, dtype, context);
}

void run_finish(const GradientArguments& arguments, int width, int64_t blocks, DType dtype, Context& context) {
  static const std::string kLabel = "delta_rule gradients of chunks";
  static KernelTable<4> table;
  const int entry = (width == 128 ? 2 : 0) + (dtype == DType::kFloat16 ? 1 : 0);
  CUkern_st* kernel = table.get(entry, context, [&] { return finish_code(width, dtype); });
  void* pointers[] = {const_cast<GradientArguments*>(&arguments)};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(blocks);
  shape.block_x = kGradientThreads;
  shape.shared_bytes = static_cast<unsigned>(gradient_shared_bytes(width));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

// The forward again, which keeps states and errors; the gradient of the state; then all chunks at once.
void run_backward(const Backward& problem, int, Context& context) {
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype;
  for (const TensorView* view :
       {&problem.grad_query, &problem.grad_key, &problem.grad_value, &problem.grad_beta, &problem.grad_gate}) {
    clear_unless_batch(*view, problem.cu_seqlens, context);
  }
  if (sizes.sequences * sizes.heads == 0) return;
  Plan plan = plan_of(problem, sizes, context);
  plan.config.pass = Pass::kStates;
  PrepareArguments prepare = prepare_arguments(problem, sizes, plan, context);
  prepare.turned_matrices = allocate(context, plan.blocks * kMatrixBytes);
  run_prepare(prepare, plan.config, plan.blocks, dtype, context);

  DeltaChunkArguments arguments = chunk_arguments(prepare, sizes);
  const int64_t tiles = plan.blocks * divide_up(sizes.values, kGroupValues);
  encode(with_heads_first(problem.query), arguments.query);
  encode(with_heads_first(problem.key), arguments.key);
  encode(with_heads_first(problem.value), arguments.value);
  arguments.states = allocate(context, tiles * delta_state_bytes(plan.config));
  arguments.rows = allocate(context, tiles * kGroupBytes);
  arguments.initial = state_of(problem.initial_state);
  run_chunks(arguments, plan.config, sizes, dtype, context);

  GradientArguments finish{};
  finish.states = arguments.states;
  finish.errors = arguments.rows;
  plan.config.pass = Pass::kGradient;
  encode(with_heads_first(problem.grad_output), arguments.value);
  arguments.matrices = prepare.turned_matrices;
  arguments.output = tensor_of(problem.grad_value, sizes.heads);
  arguments.states = allocate(context, tiles * delta_state_bytes(plan.config));
  arguments.rows = allocate(context, tiles * kGroupBytes);
  arguments.initial = state_of(problem.grad_final_state);
  arguments.final = state_of(problem.grad_initial_state);
  run_chunks(arguments, plan.config, sizes, dtype, context);

  finish.query = prepare.query;
  finish.key = prepare.key;
  finish.beta = prepare.beta;
  finish.gate = prepare.gate;
  finish.grad_output = tensor_of(problem.grad_output, sizes.heads);
  finish.grad_value = arguments.output;
  finish.grad_states = arguments.states;
  finish.grad_writes = arguments.rows;
  finish.grad_query = problem.grad_query.data;
  finish.grad_key = problem.grad_key.data;
  finish.grad_beta = problem.grad_beta.data;
  finish.grad_gate = problem.grad_gate.data;
  finish.offsets = prepare.offsets;
  finish.tokens = sizes.tokens;
  finish.sequences = sizes.sequences;
  finish.chunks = plan.chunks;
  finish.heads = prepare.heads;
  finish.columns = prepare.columns;
  finish.values = arguments.values;
  finish.scale = prepare.scale;
  finish.offsets_are_wide = prepare.offsets_are_wide;
  finish.normalizes = prepare.normalizes;
  finish.beta_is_float = problem.beta.dtype == DType::kFloat32;
  finish.gate_is_float = problem.gate.dtype == DType::kFloat32;
  finish.has_initial = problem.initial_state.is_present();
  run_finish(finish, plan.config.columns, plan.blocks, dtype, context);
}

uint64_t forward_hash() {
  return jit::source_hash(kChunkSource) ^ jit::source_hash(kPrepareSource) * 3 ^ jit::source_hash(kChannelSource) * 5;
}
uint64_t backward_hash() {
  return forward_hash() ^ jit::source_hash(kGradientSource) * 7 ^ jit::source_hash(kFinishSource) * 11;
}
std::vector<DeviceCode> forward_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int columns : {64, 128}) {
      for (bool by_channel : {false, true}) {
        codes.push_back(prepare_code(columns, by_channel, dtype, false));
        for (int warpgroups : {1, 2}) codes.push_back(chunk_code({columns, warpgroups, by_channel}, dtype));
      }
    }
  }
  return codes;
}
std::vector<DeviceCode> backward_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int columns : {64, 128}) {
      codes.push_back(prepare_code(columns, false, dtype, true));
      codes.push_back(finish_code(columns, dtype));
      for (int warpgroups : {1, 2}) {
        for (Pass pass : {Pass::kStates, Pass::kGradient}) {
          codes.push_back(chunk_code({columns, warpgroups, false, pass}, dtype));
        }
      }
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardSm90{.name = "sm90_chunk",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = forward_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardSm90{.name = "sm90_chunk",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = backward_hash,
                                                         .device_code = backward_code};

}  // namespace kernel_pytorch::linear_attention::delta
