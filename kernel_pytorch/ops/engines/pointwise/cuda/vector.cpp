// Host side of the vector kernels: cuda_vector walks the rows as one run of 16-byte vectors, cuda_columns in tiles of
// columns where a bias' gradient is wanted.
#include <algorithm>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/pointwise/cuda/launch.h"
#include "kernel_pytorch/ops/support/column_sums.h"

namespace kernel_pytorch::pointwise {
namespace {

constexpr const char* kForwardSource = "kernel_pytorch/ops/engines/pointwise/cuda/forward.cuh";
constexpr const char* kBackwardSource = "kernel_pytorch/ops/engines/pointwise/cuda/backward.cuh";
constexpr const char* kColumnsSource = "kernel_pytorch/ops/engines/pointwise/cuda/columns.cuh";
constexpr const char* kTooMany = "2^31 or more vectors of 16 bytes";
constexpr const char* kRagged = "the elements are not whole vectors of 16 bytes";
constexpr const char* kMisaligned = "a tensor does not start at a multiple of 16 bytes";
constexpr const char* kWantsSums = "a bias' gradient is a sum over rows: cuda_columns leaves partial rows";
constexpr const char* kWantsNoSums = "no bias' gradient is wanted: cuda_vector has less to hold";

struct VectorConfig {
  int vectors = 1;         // of 16 bytes, of each tensor, that a thread has in flight
  int threads = kThreads;  // of a block, at most kThreads
};
constexpr auto kVectorConfigFields =
    config_fields<VectorConfig>(config_field<&VectorConfig::vectors>(), config_field<&VectorConfig::threads>());
constexpr ConfigFields fields_of(const VectorConfig&) {
  return kVectorConfigFields;
}
// H200, 16384x4096 bf16, share of a copy: an activation, dropout.
constexpr VectorConfig kVectorConfigs[] = {
    {.vectors = 1},  // 97 %, 73 %
    {.vectors = 2},  // 91 %, 86 %
    {.vectors = 1, .threads = 128},
    {.vectors = 1, .threads = 64},
};
static_assert(std::ranges::all_of(kVectorConfigs, [](const VectorConfig& config) {
  return config.threads == kThreads || (config.vectors == 1 && config.threads < kThreads);  // block_threads
}));
constexpr int kVectorConfigCount = static_cast<int>(std::size(kVectorConfigs));

// Rows end to end in every tensor: one long row, whatever its shape.
bool rows_are_end_to_end(const TensorView& view) {
  if (!view.is_present()) return true;
  return view.rank == 2 && (view.sizes[1] <= 1 || view.strides[1] == 1) &&
         (view.sizes[0] <= 1 || view.strides[0] == view.sizes[1]);
}

struct VectorWork {
  int64_t rows = 0;
  int64_t row_vectors = 0;
  const char* obstacle = nullptr;
};

VectorWork work_of(std::initializer_list<const TensorView*> views, bool has_bias) {
  const TensorView& first = **views.begin();
  const int64_t bytes = size_of(first.dtype);
  if (!has_bias && std::ranges::all_of(views, [](const TensorView* view) { return rows_are_end_to_end(*view); })) {
    const int64_t total_bytes = first.element_count() * bytes;
    if (total_bytes % 16 != 0) return {.obstacle = kRagged};
    for (const TensorView* view : views) {
      if (!is_aligned(*view, kVectorBytes)) return {.obstacle = kMisaligned};
    }
    return {.rows = 1, .row_vectors = total_bytes / 16};
  }
  for (const TensorView* view : views) {
    if (const char* obstacle = vector_access_obstacle(*view)) return {.obstacle = obstacle};
  }
  return {.rows = first.sizes[0], .row_vectors = first.sizes[1] * bytes / 16};
}

VectorWork work_of(const ForwardProblem& problem) {
  return work_of({&problem.gate, &problem.up, &problem.residual, &problem.output},
                 problem.gate_bias.is_present() || problem.up_bias.is_present());
}
VectorWork work_of(const BackwardProblem& problem) {
  const bool has_bias = problem.gate_bias.is_present() || problem.up_bias.is_present() ||
                        problem.grad_gate_bias.is_present() || problem.grad_up_bias.is_present();
  return work_of({&problem.gate, &problem.up, &problem.grad_output, &problem.grad_gate, &problem.grad_up}, has_bias);
}

template <class Problem>
const char* obstacle_of(const Problem& problem, const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(problem.gate.dtype, device)) return obstacle;
  for (const TensorView* bias : {&problem.gate_bias, &problem.up_bias}) {
    if (const char* obstacle = parameter_obstacle(*bias)) return obstacle;
  }
  const VectorWork work = work_of(problem);
  if (work.obstacle != nullptr) return work.obstacle;
  return work.rows * work.row_vectors < int64_t{1} << 31 ? nullptr : kTooMany;
}

registry::Support answer(const char* obstacle) {
  return registry::Support::unless(obstacle);
}

VectorShape shape_of(const VectorWork& work) {
  return {.rows = work.rows,
          .vectors = static_cast<uint32_t>(work.rows * work.row_vectors),
          .row_vectors = make_divider(static_cast<uint32_t>(work.row_vectors))};
}

RowTensor row_tensor(const TensorView& view) {
  if (!view.is_present()) return {nullptr, 0};
  return {view.data, view.strides[0] * size_of(view.dtype)};
}

cuda_device::LaunchShape launch_shape(const VectorShape& shape, const VectorConfig& config) {
  const uint32_t per_block = static_cast<uint32_t>(config.threads * config.vectors);
  cuda_device::LaunchShape launch;
  launch.grid_x = (shape.vectors + per_block - 1) / per_block;
  launch.block_x = static_cast<unsigned>(config.threads);
  return launch;
}

template <class Problem>
std::vector<std::string> configs(const Problem&, const DeviceInfo&) {
  return config_texts(kVectorConfigs);
}

// Many threads with one vector each are nearest to a copy. Dropout's arithmetic wants two, one to compute on while the
// other is on its way.
template <class Problem>
int heuristic(const Problem& problem, const DeviceInfo& device) {
  const VectorWork work = work_of(problem);
  const bool fills_device = work.rows * work.row_vectors / kThreads >= 8 * device.cuda.multiprocessors;
  return problem.dropout > 0 && fills_device ? 1 : 0;
}

struct Variant {
  DType dtype;
  bool gated;
  bool fused;
  int index() const { return (cuda_type_index(dtype) * 2 + gated) * 2 + fused; }
};
constexpr int kVariants = 12;

DeviceCode code_of(const char* source, std::string_view function, const Variant& variant, int vectors) {
  return {.source = source,
          .entry = concat("kernel_pytorch::pointwise::", function, "<", element_type_name(variant.dtype), ", ",
                          bool_name(variant.gated), ", ", bool_name(variant.fused), ", ", vectors, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}
DeviceCode columns_code_of(DType dtype, bool gated) {
  return {.source = kColumnsSource,
          .entry = concat("kernel_pytorch::pointwise::backward_columns<", element_type_name(dtype), ", ",
                          bool_name(gated), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

std::vector<DeviceCode> vector_codes(const char* source, std::string_view function) {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (int flags = 0; flags < 4; ++flags) {
      for (const VectorConfig& config : kVectorConfigs) {
        if (config.threads != kThreads) continue;  // the same code
        codes.push_back(code_of(source, function, {dtype, (flags & 1) != 0, (flags & 2) != 0}, config.vectors));
      }
    }
  }
  return codes;
}

registry::Support supports_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  return answer(obstacle_of(problem, device));
}

void run_forward(const ForwardProblem& problem, int config, Context& context) {
  static const std::string kLabel = "pointwise forward_vectors";
  static KernelTable<kVectorConfigCount * kVariants> table;
  if (problem.gate.element_count() == 0) return;
  ForwardArguments arguments{.shape = shape_of(work_of(problem)),
                             .gate = row_tensor(problem.gate),
                             .up = row_tensor(problem.up),
                             .residual = row_tensor(problem.residual),
                             .output = row_tensor(problem.output),
                             .gate_bias = problem.gate_bias.data,
                             .up_bias = problem.up_bias.data,
                             .dropout = dropout_arguments(problem.dropout, problem.seed),
                             .kind = problem.kind,
                             .bias_is_float = bias_is_float(problem.gate_bias, problem.up_bias)};
  const bool fused = arguments.gate_bias != nullptr || arguments.up_bias != nullptr ||
                     arguments.residual.data != nullptr || arguments.dropout.seed != nullptr;
  const Variant variant{problem.gate.dtype, problem.up.is_present(), fused};
  CUkern_st* kernel = table.get(config * kVariants + variant.index(), context, [&] {
    return code_of(kForwardSource, "forward_vectors", variant, kVectorConfigs[config].vectors);
  });
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, launch_shape(arguments.shape, kVectorConfigs[config]), pointers, kLabel);
}

BackwardArguments backward_arguments(const BackwardProblem& problem) {
  return {.shape = shape_of(work_of(problem)),
          .grad_output = row_tensor(problem.grad_output),
          .gate = row_tensor(problem.gate),
          .up = row_tensor(problem.up),
          .grad_gate = row_tensor(problem.grad_gate),
          .grad_up = row_tensor(problem.grad_up),
          .gate_bias = problem.gate_bias.data,
          .up_bias = problem.up_bias.data,
          .dropout = dropout_arguments(problem.dropout, problem.seed),
          .gate_partial = nullptr,
          .up_partial = nullptr,
          .rows_per_block = 0,
          .kind = problem.kind,
          .bias_is_float = bias_is_float(problem.gate_bias, problem.up_bias)};
}

bool wants_sums(const BackwardProblem& problem) {
  return problem.grad_gate_bias.is_present() || problem.grad_up_bias.is_present();
}

registry::Support supports_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  return answer(wants_sums(problem) ? kWantsSums : obstacle_of(problem, device));
}
registry::Support supports_columns(const BackwardProblem& problem, const DeviceInfo& device) {
  return answer(!wants_sums(problem) ? kWantsNoSums : obstacle_of(problem, device));
}

void run_backward(const BackwardProblem& problem, int config, Context& context) {
  static const std::string kLabel = "pointwise backward_vectors";
  static KernelTable<kVectorConfigCount * kVariants> table;
  if (problem.gate.element_count() == 0) return;
  BackwardArguments arguments = backward_arguments(problem);
  const bool fused =
      arguments.gate_bias != nullptr || arguments.up_bias != nullptr || arguments.dropout.seed != nullptr;
  const Variant variant{problem.gate.dtype, problem.up.is_present(), fused};
  CUkern_st* kernel = table.get(config * kVariants + variant.index(), context, [&] {
    return code_of(kBackwardSource, "backward_vectors", variant, kVectorConfigs[config].vectors);
  });
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, launch_shape(arguments.shape, kVectorConfigs[config]), pointers, kLabel);
}

struct ColumnsConfig {
  int blocks = 4;  // of backward_columns per multiprocessor: many share the work evenly, few leave fewer partial rows
};
constexpr auto kColumnsConfigFields = config_fields<ColumnsConfig>(config_field<&ColumnsConfig::blocks>());
constexpr ConfigFields fields_of(const ColumnsConfig&) {
  return kColumnsConfigFields;
}
constexpr ColumnsConfig kColumnsConfigs[] = {{.blocks = 4}, {.blocks = 8}, {.blocks = 16}};

std::vector<std::string> columns_configs(const BackwardProblem&, const DeviceInfo&) {
  return config_texts(kColumnsConfigs);
}

// Two waves: four blocks are resident of a kernel without `up`, two of one with it.
int columns_heuristic(const BackwardProblem& problem, const DeviceInfo&) {
  return problem.up.is_present() ? 0 : 1;
}

void run_columns(const BackwardProblem& problem, int config, Context& context) {
  static const std::string kLabel = "pointwise backward_columns";
  static KernelTable<std::size(kCudaTypes) * 2> table;
  if (problem.gate.element_count() == 0) {
    return zero_column_sums(problem.grad_gate_bias, problem.grad_up_bias, context);
  }
  BackwardArguments arguments = backward_arguments(problem);
  const int64_t rows = arguments.shape.rows;
  const int64_t tiles = (arguments.shape.row_vectors.divisor + kTileVectors - 1) / kTileVectors;
  // Each block with rows enough to be worth a partial row.
  constexpr int64_t kStep = kTileRows * 2, kMostChunks = 32768;
  const int64_t blocks = int64_t{kColumnsConfigs[config].blocks} * context.info->cuda.multiprocessors;
  const int64_t wanted = std::clamp<int64_t>(blocks / tiles, 1, kMostChunks);
  const int64_t rows_per_block = std::max((rows + wanted - 1) / wanted + kStep - 1, 2 * kStep) / kStep * kStep;
  const int64_t chunks = (rows + rows_per_block - 1) / rows_per_block;
  const ColumnSums sums =
      allocate_column_sums(problem.grad_gate_bias, problem.grad_up_bias, columns_of(problem.gate), chunks, context);
  arguments.gate_partial = sums.partials[0];
  arguments.up_partial = sums.partials[1];
  arguments.rows_per_block = static_cast<int32_t>(rows_per_block);
  const DType dtype = problem.gate.dtype;
  const bool gated = problem.up.is_present();
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype) * 2 + gated, context, [&] { return columns_code_of(dtype, gated); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape launch;
  launch.grid_x = static_cast<unsigned>(tiles);
  launch.grid_y = static_cast<unsigned>(chunks);
  launch.block_x = kThreads;
  cuda_device::launch(context, kernel, launch, pointers, kLabel);
  add_column_sums(sums, context);
}

uint64_t forward_hash() {
  return jit::source_hash(kForwardSource);
}
uint64_t backward_hash() {
  return jit::source_hash(kBackwardSource);
}
uint64_t columns_hash() {
  HashMixer mixer;
  mixer.add(jit::source_hash(kColumnsSource));
  mixer.add(column_sums_source_hash());
  return mixer.value();
}

std::vector<DeviceCode> forward_code() {
  return vector_codes(kForwardSource, "forward_vectors");
}
std::vector<DeviceCode> backward_code() {
  return vector_codes(kBackwardSource, "backward_vectors");
}
std::vector<DeviceCode> columns_code() {
  std::vector<DeviceCode> codes = column_sums_device_code();
  for (DType dtype : kCudaTypes) {
    for (bool gated : {false, true}) codes.push_back(columns_code_of(dtype, gated));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<ForwardProblem> kForwardCudaVector{.name = "cuda_vector",
                                                                    .origin = registry::Origin::kOurs,
                                                                    .supports = supports_forward,
                                                                    .configs = configs<ForwardProblem>,
                                                                    .heuristic = heuristic<ForwardProblem>,
                                                                    .run = run_forward,
                                                                    .source_hash = forward_hash,
                                                                    .device_code = forward_code};
constinit const registry::Kernel<BackwardProblem> kBackwardCudaVector{.name = "cuda_vector",
                                                                      .origin = registry::Origin::kOurs,
                                                                      .supports = supports_backward,
                                                                      .configs = configs<BackwardProblem>,
                                                                      .heuristic = heuristic<BackwardProblem>,
                                                                      .run = run_backward,
                                                                      .source_hash = backward_hash,
                                                                      .device_code = backward_code};
constinit const registry::Kernel<BackwardProblem> kBackwardCudaColumns{.name = "cuda_columns",
                                                                       .origin = registry::Origin::kOurs,
                                                                       .supports = supports_columns,
                                                                       .configs = columns_configs,
                                                                       .heuristic = columns_heuristic,
                                                                       .run = run_columns,
                                                                       .source_hash = columns_hash,
                                                                       .device_code = columns_code};

}  // namespace kernel_pytorch::pointwise
