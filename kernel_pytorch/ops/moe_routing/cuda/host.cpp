// Host side of the routing on the GPU: two launches, of as many blocks as there are multiprocessors, and one more for
// what is about all tokens; the gradient is one launch.
#include <algorithm>
#include <bit>

#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/moe_routing/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/moe_routing/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::moe_routing {
namespace {

constexpr const char* kChooseSource = "kernel_pytorch/ops/moe_routing/cuda/choose.cuh";
constexpr const char* kPlaceSource = "kernel_pytorch/ops/moe_routing/cuda/place.cuh";
constexpr const char* kBackwardSource = "kernel_pytorch/ops/moe_routing/cuda/backward.cuh";
constexpr int kSizes = 6;  // a lane's experts: 1 to 32, powers of two

const char* shared_obstacle(int64_t experts, const DeviceInfo& device) {  // AMD's 64 KiB
  const bool fits = place_shared_bytes(static_cast<int>(experts)) <= device.cuda.shared_bytes_per_block;
  return fits ? nullptr : "has more experts than a block's shared memory counts";
}
registry::Support supports_forward(const Forward& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.logits.dtype, device)) return registry::Support::no(obstacle);
  return registry::Support::unless(shared_obstacle(problem.logits.sizes[1], device));
}
registry::Support supports_backward(const Backward& problem, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(problem.logits.dtype, device));
}

int size_index(int64_t experts) {
  return std::bit_width(static_cast<uint64_t>(divide_up(experts, 32) - 1));
}

DeviceCode code_of(const char* source, std::string_view function, DType dtype, int size) {
  return {
      .source = source,
      .entry = concat("kernel_pytorch::moe_routing::", function, "<", element_type_name(dtype), ", ", 1 << size, ">"),
      .minimum_capability = 80,
      .architecture_specific = false};
}
DeviceCode place_code(std::string_view function) {
  return {.source = kPlaceSource,
          .entry = concat("kernel_pytorch::moe_routing::", function),
          .minimum_capability = 80,
          .architecture_specific = false};
}

template <class T>
T* scratch(Context& context, int64_t count) {
  return static_cast<T*>(context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)));
}

// Which tokens a block has: as many blocks as multiprocessors, at least a token for each warp.
struct Cut {
  int64_t each, blocks;
  Cut(int64_t tokens, const Context& context) {
    const int64_t most = std::max(context.info->cuda.multiprocessors, 1);
    each = std::max<int64_t>(divide_up(divide_up(tokens, most), kWarps) * kWarps, kWarps);
    blocks = divide_up(tokens, each);
  }
};

ForwardArguments arguments_of(const Forward& problem, const Cut& cut, Context& context) {
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1];
  return {.logits = problem.logits.data,
          .row_stride = problem.logits.strides[0],
          .bias = problem.bias.as<const float>(),
          .tokens = static_cast<int32_t>(tokens),
          .experts = static_cast<int32_t>(experts),
          .k = static_cast<int32_t>(problem.k),
          .groups = static_cast<int32_t>(problem.groups),
          .group_k = static_cast<int32_t>(problem.group_k),
          .group_top = static_cast<int32_t>(problem.group_top),
          .capacity = static_cast<int32_t>(std::min<int64_t>(problem.capacity, 1 << 30)),
          .block_tokens = static_cast<int32_t>(cut.each),
          .blocks = static_cast<int32_t>(cut.blocks),
          .is_sigmoid = problem.score == Score::kSigmoid,
          .renormalize = problem.renormalize,
          .scale = static_cast<float>(problem.scale),
          .weights = problem.weights.as<float>(),
          .chosen = problem.experts.as<int32_t>(),
          .offsets = problem.offsets.as<int32_t>(),
          .counts = problem.counts.as<int32_t>(),
          .token_of_row = problem.token_of_row.as<int32_t>(),
          .row_of_token = problem.row_of_token.as<int32_t>(),
          .dropped = problem.dropped.as<int32_t>(),
          .aux_loss = problem.aux_loss.as<float>(),
          .z_loss = problem.z_loss.as<float>(),
          .block_counts = scratch<int32_t>(context, cut.blocks * experts),
          .block_shares = scratch<float>(context, cut.blocks * experts),
          .block_squares = scratch<float>(context, cut.blocks)};
}

void launch(CUkern_st* kernel, int64_t blocks, int threads, int shared_bytes, ForwardArguments& arguments,
            Context& context, const std::string& label) {
  if (blocks == 0) return;
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(threads);
  shape.shared_bytes = static_cast<unsigned>(shared_bytes);
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, label);
}

void launch_place(ForwardArguments& arguments, Context& context) {
  static const std::string kLabel = "moe_route place";
  static KernelTable<1> table;
  CUkern_st* kernel = table.get(0, context, [] { return place_code("place"); });
  launch(kernel, arguments.blocks + 1, kThreads, place_shared_bytes(arguments.experts), arguments, context, kLabel);
}

void run_forward(const Forward& problem, int, Context& context) {
  static const std::string kLabel = "moe_route choose";
  static KernelTable<kSizes * std::size(kCudaTypes)> table;
  const Cut cut(problem.logits.sizes[0], context);
  ForwardArguments arguments = arguments_of(problem, cut, context);
  const int size = size_index(arguments.experts);
  const DType dtype = problem.logits.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype) * kSizes + size, context,
                                [&] { return code_of(kChooseSource, "choose", dtype, size); });
  const int threads = choose_threads(1 << size);
  launch(kernel, cut.blocks, threads, choose_shared_bytes(arguments.experts, threads / 32), arguments, context, kLabel);
  launch_place(arguments, context);
}

void run_permute(const Permute& problem, int, Context& context) {
  static const std::string kLabel = "moe_permute count";
  static KernelTable<1> table;
  const int64_t tokens = problem.experts.sizes[0];
  const Cut cut(tokens, context);
  ForwardArguments arguments{};
  arguments.tokens = static_cast<int32_t>(tokens);
  arguments.experts = static_cast<int32_t>(problem.num_experts);
  arguments.k = static_cast<int32_t>(problem.experts.sizes[1]);
  arguments.capacity = static_cast<int32_t>(std::min<int64_t>(problem.capacity, 1 << 30));
  arguments.block_tokens = static_cast<int32_t>(cut.each);
  arguments.blocks = static_cast<int32_t>(cut.blocks);
  arguments.chosen = problem.experts.as<int32_t>();
  arguments.offsets = problem.offsets.as<int32_t>();
  arguments.counts = problem.counts.as<int32_t>();
  arguments.token_of_row = problem.token_of_row.as<int32_t>();
  arguments.row_of_token = problem.row_of_token.as<int32_t>();
  arguments.dropped = problem.dropped.as<int32_t>();
  arguments.block_counts = scratch<int32_t>(context, cut.blocks * problem.num_experts);
  CUkern_st* kernel = table.get(0, context, [] { return place_code("count"); });
  launch(kernel, cut.blocks, kThreads, arguments.experts * 4, arguments, context, kLabel);
  launch_place(arguments, context);
}

void run_backward(const Backward& problem, int, Context& context) {
  static const std::string kLabel = "moe_route backward";
  static KernelTable<kSizes * std::size(kCudaTypes)> table;
  const int64_t tokens = problem.logits.sizes[0], experts = problem.logits.sizes[1];
  if (tokens == 0) return;
  BackwardArguments arguments{.logits = problem.logits.data,
                              .row_stride = problem.logits.strides[0],
                              .tokens = static_cast<int32_t>(tokens),
                              .experts = static_cast<int32_t>(experts),
                              .k = static_cast<int32_t>(problem.k),
                              .is_sigmoid = problem.score == Score::kSigmoid,
                              .renormalize = problem.renormalize,
                              .scale = static_cast<float>(problem.scale),
                              .grad_weights = problem.grad_weights.as<const float>(),
                              .grad_aux_loss = problem.grad_aux_loss.as<const float>(),
                              .grad_z_loss = problem.grad_z_loss.as<const float>(),
                              .chosen = problem.experts.as<const int32_t>(),
                              .counts = problem.counts.as<const int32_t>(),
                              .row_of_token = problem.row_of_token.as<const int32_t>(),
                              .grad_logits = problem.grad_logits.data};
  const int size = size_index(experts);
  const DType dtype = problem.logits.dtype;
  CUkern_st* kernel = table.get(cuda_type_index(dtype) * kSizes + size, context,
                                [&] { return code_of(kBackwardSource, "backward", dtype, size); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(tokens, kGradientThreads / 32));
  shape.block_x = kGradientThreads;
  shape.programmatic_dependent = has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t forward_hash() {
  return jit::source_hash(kChooseSource) ^ jit::source_hash(kPlaceSource);
}
uint64_t backward_hash() {
  return jit::source_hash(kBackwardSource);
}

std::vector<DeviceCode> all_code(const char* source, std::string_view function) {
  std::vector<DeviceCode> codes;
  for (int size = 0; size < kSizes; ++size) codes.push_back(code_of(source, function, DType::kFloat32, size));
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) codes.push_back(code_of(source, function, dtype, 3));
  return codes;
}
std::vector<DeviceCode> forward_code() {
  std::vector<DeviceCode> codes = all_code(kChooseSource, "choose");
  codes.push_back(place_code("place"));
  return codes;
}
uint64_t permute_hash() {
  return jit::source_hash(kPlaceSource);
}
std::vector<DeviceCode> permute_code() {
  return {place_code("count"), place_code("place")};
}
registry::Support supports_permute(const Permute& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(device)) return registry::Support::no(obstacle);
  return registry::Support::unless(shared_obstacle(problem.num_experts, device));
}
std::vector<DeviceCode> backward_code() {
  return all_code(kBackwardSource, "backward");
}

}  // namespace

constinit const registry::Kernel<Forward> kForwardCuda{.name = "cuda",
                                                       .supports = supports_forward,
                                                       .run = run_forward,
                                                       .source_hash = forward_hash,
                                                       .device_code = forward_code};
constinit const registry::Kernel<Backward> kBackwardCuda{.name = "cuda",
                                                         .supports = supports_backward,
                                                         .run = run_backward,
                                                         .source_hash = backward_hash,
                                                         .device_code = backward_code};
constinit const registry::Kernel<Permute> kPermuteCuda{.name = "cuda",
                                                       .supports = supports_permute,
                                                       .run = run_permute,
                                                       .source_hash = permute_hash,
                                                       .device_code = permute_code};

}  // namespace kernel_pytorch::moe_routing
