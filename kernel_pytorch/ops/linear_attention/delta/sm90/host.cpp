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
constexpr const char* kChannelSource = "kernel_pytorch/ops/linear_attention/delta/sm90/prepare_channels.cuh";
constexpr const char* kSizes = "takes 16 to 128 columns and values from 16 on, multiples of 8";
constexpr const char* kTypes = "takes bf16 and fp16; others go step by step";
constexpr const char* kSteps = "computes chunks; mode asks for single steps";
constexpr const char* kFewTokens = "pays from a chunk of 64 tokens on";
constexpr const char* kNoTokens = "needs a token";

// The heads of [batch, tokens, heads, size] in front of its tokens.
TensorView with_heads_first(const TensorView& view) {
  TensorView turned = view;
  std::swap(turned.sizes[1], turned.sizes[2]);
  std::swap(turned.strides[1], turned.strides[2]);
  return turned;
}

registry::Support supports(const Forward& problem, const DeviceInfo& device) {
  const auto no = [](const char* reason) { return registry::Support::no(reason); };
  if (const char* obstacle = cuda_obstacle(problem.query.dtype, device)) return no(obstacle);
  if (const char* missing = feature_obstacle(device, CudaFeature::kWgmma)) return no(missing);
  if (problem.query.dtype == DType::kFloat32) return no(kTypes);
  if (problem.mode == Mode::kRecurrent) return no(kSteps);
  if (problem.mode == Mode::kAuto && problem.value.sizes[1] < kChunkTokens) return no(kFewTokens);
  if (problem.value.sizes[1] == 0) return no(kNoTokens);
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value}) {
    if (view->sizes[3] % 8 != 0 || view->sizes[3] < 16) return no(kSizes);
    if (const char* obstacle = cuda_device::tensor_map_obstacle(*view)) return no(obstacle);
  }
  return problem.query.sizes[3] > 128 ? no(kSizes) : registry::Support::yes();
}

DeviceCode prepare_code(int width, bool by_channel, DType dtype) {
  return {.source = by_channel ? kChannelSource : kPrepareSource,
          .entry = concat("kernel_pytorch::linear_attention::delta::prepare_", by_channel ? "channels" : "chunks", "<",
                          element_type_name(dtype), ", ", width, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode chunk_code(const DeltaConfig& config, DType dtype) {
  return {.source = kChunkSource,
          .entry = concat("kernel_pytorch::linear_attention::delta::delta_by_chunks<", element_type_name(dtype),
                          ", kernel_pytorch::linear_attention::delta::DeltaConfig{", config.columns, ", ",
                          config.warpgroups, ", ", bool_name(config.by_channel), "}>"),
          .minimum_capability = 90,
          .architecture_specific = true};
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
  static KernelTable<8> table;
  const int entry = ((config.columns == 128 ? 1 : 0) * 2 + config.by_channel) * 2 + (dtype == DType::kFloat16 ? 1 : 0);
  CUkern_st* kernel = table.get(entry, context, [&] { return prepare_code(config.columns, config.by_channel, dtype); });
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
  static KernelTable<16> table;
  const int entry = (((config.columns == 128 ? 1 : 0) * 2 + config.warpgroups - 1) * 2 + config.by_channel) * 2 +
                    (dtype == DType::kFloat16 ? 1 : 0);
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

void run(const Forward& problem, int, Context& context) {
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype;
  clear_unless_batch(problem.output, problem.cu_seqlens, context);
  if (sizes.sequences * sizes.heads == 0) return;
  const bool is_packed = problem.cu_seqlens.is_present();
  const DeltaConfig config =
      config_of(sizes, problem.channel_gate.is_present(), std::max(context.info->cuda.multiprocessors, 1));
  const int64_t chunks = divide_up(sizes.tokens, kChunkTokens);
  const int64_t slots = is_packed ? sizes.tokens / kChunkTokens + sizes.sequences : sizes.sequences * chunks;
  const int64_t blocks = slots * sizes.heads;
  KP_CHECK(blocks * kChunkTokens < int64_t{1} << 31, "delta_rule: ", sizes.batch, " x ", sizes.tokens, " tokens of ",
           sizes.heads, " heads; at most 2^31 are supported, split the batch");
  const auto allocate = [&](int64_t bytes) { return context.scratch->allocate(static_cast<size_t>(bytes)); };

  PrepareArguments prepare{};
  prepare.query = tensor_of(problem.query, sizes.heads);
  prepare.key = tensor_of(problem.key, sizes.heads);
  prepare.beta = tensor_of(problem.beta, sizes.heads);
  prepare.gate = tensor_of(problem.gate, sizes.heads);
  prepare.channel_gate = tensor_of(problem.channel_gate, sizes.heads);
  prepare.matrices = allocate(blocks * kMatrixBytes);
  prepare.weights = allocate(blocks * kMatrixBytes);
  prepare.factors = static_cast<float*>(allocate(blocks * kFactorBytes));
  prepare.offsets = problem.cu_seqlens.data;
  prepare.tokens = sizes.tokens;
  prepare.sequences = sizes.sequences;
  prepare.chunks = chunks;
  prepare.heads = static_cast<int32_t>(sizes.heads);
  prepare.columns = static_cast<int32_t>(sizes.columns);
  prepare.scale = static_cast<float>(problem.scale);
  prepare.offsets_are_wide = problem.cu_seqlens.dtype == DType::kInt64;
  prepare.normalizes = problem.normalize_qk;

  DeltaChunkArguments arguments{};
  const auto encode = [](const TensorView& view, tile::TensorMap& map) {
    cuda_device::encode_tensor_map(view, kChunkTokens, map.words);
  };
  if (config.by_channel) {
    const auto prepared = [&](void*& rows, tile::TensorMap& map) {
      rows = allocate(blocks * delta_row_bytes(config));
      encode(contiguous_view(rows, dtype, {1, 1, blocks * kChunkTokens, config.columns}, problem.query.device), map);
    };
    prepared(prepare.read_query, arguments.query);
    prepared(prepare.read_key, arguments.key);
    prepared(prepare.written_key, arguments.written_key);
  } else {
    encode(with_heads_first(problem.query), arguments.query);
    encode(with_heads_first(problem.key), arguments.key);
  }
  encode(with_heads_first(problem.value), arguments.value);
  run_prepare(prepare, config, blocks, dtype, context);

  arguments.output = tensor_of(problem.output, sizes.heads);
  arguments.matrices = prepare.matrices;
  arguments.weights = prepare.weights;
  arguments.factors = prepare.factors;
  arguments.offsets = prepare.offsets;
  if (problem.state_index.is_present()) {
    arguments.state_index = problem.state_index.data;
    arguments.index_is_wide = problem.state_index.dtype == DType::kInt64;
    arguments.slots = problem.initial_state.sizes[0];
  }
  arguments.initial = state_of(problem.initial_state);
  arguments.final = state_of(problem.final_state);
  arguments.tokens = sizes.tokens;
  arguments.chunks = chunks;
  arguments.heads = prepare.heads;
  arguments.columns = prepare.columns;
  arguments.values = static_cast<int32_t>(sizes.values);
  arguments.query_group = prepare.query.group;
  arguments.key_group = prepare.key.group;
  arguments.offsets_are_wide = prepare.offsets_are_wide;
  run_chunks(arguments, config, sizes, dtype, context);
}

uint64_t source_hash() {
  return jit::source_hash(kChunkSource) ^ jit::source_hash(kPrepareSource) * 3 ^ jit::source_hash(kChannelSource) * 5;
}
std::vector<DeviceCode> device_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (int columns : {64, 128}) {
      for (bool by_channel : {false, true}) {
        codes.push_back(prepare_code(columns, by_channel, dtype));
        for (int warpgroups : {1, 2}) codes.push_back(chunk_code({columns, warpgroups, by_channel}, dtype));
      }
    }
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardSm90{
    .name = "sm90_chunk", .supports = supports, .run = run, .source_hash = source_hash, .device_code = device_code};

}  // namespace kernel_pytorch::linear_attention::delta
