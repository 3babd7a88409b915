#include "kernel_pytorch/ops/engines/gemm/sm90/host.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/tensor_map.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::product {

constexpr auto kSm90OperandsFields = config_fields<Sm90Operands>(
    config_field<&Sm90Operands::a>(), config_field<&Sm90Operands::b>(), config_field<&Sm90Operands::a_rows>(),
    config_field<&Sm90Operands::b_columns>(), config_field<&Sm90Operands::b_pairs>(),
    config_field<&Sm90Operands::b_halves>(), config_field<&Sm90Operands::grouping>(),
    config_field<&Sm90Operands::gathers_a>(), config_field<&Sm90Operands::gathers_b>());
constexpr ConfigFields fields_of(const Sm90Operands&) {
  return kSm90OperandsFields;
}
constexpr auto kSm90EpilogueFields = config_fields<Sm90Epilogue>(
    config_field<&Sm90Epilogue::form>(), config_field<&Sm90Epilogue::kind>(), config_field<&Sm90Epilogue::bias>(),
    config_field<&Sm90Epilogue::residual>(), config_field<&Sm90Epilogue::preactivation>(),
    config_field<&Sm90Epilogue::float_bias>(), config_field<&Sm90Epilogue::float_residual>(),
    config_field<&Sm90Epilogue::float_saved>(), config_field<&Sm90Epilogue::whole_vectors>(),
    config_field<&Sm90Epilogue::scaling>(), config_field<&Sm90Epilogue::promoted>(),
    config_field<&Sm90Epilogue::amax>(), config_field<&Sm90Epilogue::grouped>(),
    config_field<&Sm90Epilogue::clamped>());
constexpr ConfigFields fields_of(const Sm90Epilogue&) {
  return kSm90EpilogueFields;
}

namespace {

constexpr const char* kSource = "kernel_pytorch/ops/engines/gemm/sm90/kernel.cuh";
constexpr const char* kTooLarge = "a size is 2^30 or more, or there are more than 2^27 tiles";

// Behind a row, bf16 on an H200: the rate against cuBLAS' at 4096 and 8192 cubed, or the time of 128 x 4096 x 4096.
constexpr Sm90Config kWide[] = {
    {.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2},                   // 0.98, 1.00
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 2, .share_a = true},  // 0.96, 0.99
    {.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 1},                   // 0.97, 0.995
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1},                   // 23.4 us
    {.tile_m = 128, .tile_n = 128, .stages = 5, .cluster = 2, .splits = true},   // 16.9 us
    {.tile_m = 128, .tile_n = 128, .stages = 4, .cluster = 3, .splits = true},   // 16.7 us
    {.tile_m = 128, .tile_n = 128, .stages = 4, .cluster = 4, .splits = true},   // 24.2 us
    {.tile_m = 128, .tile_n = 128, .stages = 4, .cluster = 8, .splits = true},   // 28.6 us
    // Last: of widths such as 768 and 2304, which it divides, it makes whole waves (4112 x 768 is 132 tiles).
    {.tile_m = 128, .tile_n = 192, .stages = 4, .cluster = 1},
};
// Behind a row: accurate sums of FP8 at 8192 cubed.
constexpr Sm90Config kNarrow[] = {
    {.tile_m = 128, .tile_n = 192, .stages = 4, .cluster = 2},                   // 1278 TFLOP/s
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 2, .share_a = true},  // 1145 TFLOP/s
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 2, .share_a = true},
};
constexpr Sm90Config kFactored[] = {
    {.tile_m = 128, .tile_n = 192, .stages = 5, .cluster = 2, .factors = true},
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 2, .share_a = true, .factors = true},
    {.tile_m = 128, .tile_n = 128, .stages = 5, .cluster = 2, .share_a = true, .factors = true},
};
// Of fp32 in parts, whose sums are promoted: never timed.
constexpr Sm90Config kParts[] = {
    {.tile_m = 128, .tile_n = 192, .stages = 4, .cluster = 2},
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 2, .share_a = true},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 2, .share_a = true},
    {.tile_m = 128, .tile_n = 128, .stages = 4, .cluster = 2, .splits = true},
    {.tile_m = 128, .tile_n = 128, .stages = 4, .cluster = 4, .splits = true},
};
// Of groups of rows: blocks of their own, since a cluster's rows would end in one group.
constexpr Sm90Config kGroupedRows[] = {
    {.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 1},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1},
};
// Of groups of k, with a gathered or none, and with b gathered, which is the shorter side of a large tile: blocks of a
// cluster share the other.
constexpr Sm90Config kGroupedDepth[] = {
    {.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 2},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1},
    {.tile_m = 128, .tile_n = 256, .stages = 4, .cluster = 1},
};
constexpr Sm90Config kGroupedDepthOfB[] = {
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 2, .share_a = true},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1},
    {.tile_m = 256, .tile_n = 128, .stages = 4, .cluster = 1},
};
constexpr Sm90Config kGroupedNarrow[] = {
    {.tile_m = 128, .tile_n = 192, .stages = 4, .cluster = 1},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1},
};
constexpr Sm90Config kGroupedFactored[] = {
    {.tile_m = 128, .tile_n = 192, .stages = 5, .cluster = 1, .factors = true},
    {.tile_m = 128, .tile_n = 128, .stages = 6, .cluster = 1, .factors = true},
};
static_assert(are_legal(kWide) && are_legal(kNarrow) && are_legal(kFactored) && are_legal(kParts));
static_assert(are_legal(kGroupedRows) && are_legal(kGroupedDepth) && are_legal(kGroupedDepthOfB) &&
              are_legal(kGroupedNarrow) && are_legal(kGroupedFactored));

// Rows and columns of a cluster's tile.
int64_t cluster_rows(const Sm90Config& config) {
  return int64_t{config.tile_m} * sm90_down(config);
}
int64_t cluster_columns(const Sm90Config& config) {
  return int64_t{config.tile_n} * sm90_across(config);
}
int64_t tile_count(const Sm90Config& config, const Sm90Sizes& sizes) {
  return divide_up(sizes.m, cluster_rows(config)) * divide_up(sizes.n, cluster_columns(config)) * sizes.batch;
}

// How close a tile comes to the best one's rate, as measured at 4096 and 8192; 128 x 128 is bound by shared memory.
// 192 columns are between 128 and 256, or the most where sums are promoted: 256 x 128 is the other one there.
int64_t permille_of_best(const Sm90Config& config, bool promoted) {
  if (config.tile_n == 192) return promoted ? 1100 : 930;
  if (config.tile_m + config.tile_n < 384) return 850;
  return config.cluster == 1 ? 970 : config.tile_n == 256 ? 1000 : 985;
}
constexpr int64_t kEndStages = 2;          // the end of a tile takes as long as this many stages
constexpr int64_t kExchangeCycles = 2500;  // until parts of k have met

// A cluster lies within one group of multiprocessors, of which each leaves some over; 32 clusters of 4 were seen to
// take two turns of 132 multiprocessors.
int64_t resident_blocks(const Sm90Config& config, int64_t multiprocessors) {
  return config.cluster <= 2 ? multiprocessors : multiprocessors * 7 / 8;
}

constexpr int64_t kGroupRows = 2048;  // of tiles that run together: as many as their columns

Sm90Order order_of(const Sm90Config& config, const Sm90Sizes& sizes) {
  return {.tiles_m = static_cast<int32_t>(divide_up(sizes.m, cluster_rows(config))),
          .tiles_n = static_cast<int32_t>(divide_up(sizes.n, cluster_columns(config))),
          .batches = static_cast<int32_t>(sizes.batch),
          .group = static_cast<int32_t>(kGroupRows / cluster_rows(config)),
          .total = static_cast<int32_t>(tile_count(config, sizes))};
}

std::string_view output_name(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return "kernel_pytorch::tile::Float8E4M3";
  if (dtype == DType::kFloat8E5M2) return "kernel_pytorch::tile::Float8E5M2";
  return element_type_name(dtype);
}

// Loaded kernels by everything that makes one: a warm launch is a look-up without a lock.
class LoadedKernels {
 public:
  CUkern_st* get(const Sm90Variant& variant, const Context& context) {
    const uint64_t key = key_of(variant, context.info->device.index);
    size_t place = key * 0x9e3779b97f4a7c15u >> 54;
    for (int tries = 0; tries < 16; ++tries, place = (place + 1) % kSlots) {
      Slot& slot = slots_[place];
      uint64_t found = slot.key.load(std::memory_order_acquire);
      if (found == 0) slot.key.compare_exchange_strong(found, key);
      if (found != 0 && found != key) continue;
      CUkern_st* kernel = slot.kernel.load(std::memory_order_acquire);
      if (kernel == nullptr) [[unlikely]] {
        kernel = load_kernel(sm90_code(variant), context);
        slot.kernel.store(kernel, std::memory_order_release);
      }
      return kernel;
    }
    return load_kernel(sm90_code(variant), context);
  }

 private:
  struct Slot {
    std::atomic<uint64_t> key{0};
    std::atomic<CUkern_st*> kernel{nullptr};
  };
  static constexpr size_t kSlots = 1024;

  static uint64_t key_of(const Sm90Variant& variant, int device) {
    uint64_t key = 1;  // never 0
    const auto add = [&](auto value, int bits) { key = key << bits | static_cast<uint64_t>(value); };
    const Sm90Config& config = variant.config;
    const Sm90Epilogue& epilogue = variant.epilogue;
    add(config.tile_m / 128, 2), add(config.tile_n / 64, 3), add(config.stages, 4), add(config.cluster, 4);
    add(config.share_a, 1), add(config.factors, 1), add(config.splits, 1);
    add(variant.operands.a, 3), add(static_cast<int>(variant.operands.b) % 4, 2);  // b is fp32 where a is
    add(variant.operands.a_rows, 1), add(variant.operands.b_columns, 1), add(variant.operands.b_pairs, 1),
        add(epilogue.form, 3), add(epilogue.kind, 3);
    add(epilogue.bias, 1), add(epilogue.residual, 1), add(epilogue.preactivation, 1), add(epilogue.float_bias, 1);
    add(epilogue.float_residual, 1), add(epilogue.float_saved, 1), add(epilogue.whole_vectors, 1);
    add(epilogue.scaling, 3);
    add(epilogue.promoted, 1), add(epilogue.amax, 1), add(variant.output, 5), add(device, 8);
    add(variant.operands.b_halves, 1), add(variant.operands.grouping, 2), add(variant.operands.gathers_a, 1);
    add(variant.operands.gathers_b, 1), add(epilogue.grouped, 1), add(epilogue.clamped, 1);
    return key;
  }
  std::array<Slot, kSlots> slots_{};
};

// The same matrix for every batch is one matrix.
TensorView one_if_expanded(TensorView view) {
  if (view.strides[0] == 0) view.sizes[0] = 1;
  return view;
}

}  // namespace

std::span<const Sm90Config> sm90_configs(bool promoted, bool factors, bool takes_192) {
  if (factors) return kFactored;
  if (promoted) return kNarrow;
  const std::span<const Sm90Config> wide = kWide;
  return takes_192 ? wide : wide.first(wide.size() - 1);
}

std::span<const Sm90Config> sm90_parts_configs() {
  return kParts;
}

std::span<const Sm90Config> sm90_grouped_configs(const Sm90Operands& operands, bool promoted, bool factors) {
  if (factors) return kGroupedFactored;
  if (promoted) return kGroupedNarrow;
  if (operands.grouping == Sm90Grouping::kDepth) {
    return operands.gathers_b ? std::span<const Sm90Config>(kGroupedDepthOfB) : kGroupedDepth;
  }
  return kGroupedRows;
}

int sm90_heuristic(std::span<const Sm90Config> configs, const Sm90Sizes& sizes, int64_t element_bytes,
                   int multiprocessors) {
  const int64_t stages = divide_up(sizes.k * element_bytes, kSm90StageBytes);
  const bool promoted = std::ranges::none_of(configs, [](const Sm90Config& one) { return one.tile_n == 256; });
  int best = 0;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < configs.size(); ++i) {
    const Sm90Config& config = configs[i];
    const int64_t clusters = std::max<int64_t>(resident_blocks(config, multiprocessors) / config.cluster, 1);
    const int64_t waves = divide_up(tile_count(config, sizes), clusters);
    const int64_t area = int64_t{config.tile_m} * config.tile_n / 32;  // cycles of the tensor cores for a stage
    const int64_t of_part = divide_up(stages, sm90_parts(config));
    const int64_t each = of_part * area * 1000 / permille_of_best(config, promoted) + kEndStages * area;
    const int64_t time = waves * (each + (config.splits ? kExchangeCycles : 0));
    if (time < least) {
      least = time;
      best = static_cast<int>(i);
    }
  }
  return best;
}

Sm90Type sm90_type(DType dtype) {
  return dtype == DType::kBFloat16     ? Sm90Type::kBFloat16
         : dtype == DType::kFloat16    ? Sm90Type::kFloat16
         : dtype == DType::kFloat8E4M3 ? Sm90Type::kFloat8E4M3
         : dtype == DType::kFloat32    ? Sm90Type::kFloat32
                                       : Sm90Type::kFloat8E5M2;
}

const char* sm90_size_obstacle(const Sm90Sizes& sizes) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (std::max({sizes.batch, sizes.m, sizes.n, sizes.k}) > kMost) return kTooLarge;
  const double tiles = double(divide_up(sizes.m, 128)) * double(divide_up(sizes.n, 128)) * double(sizes.batch);
  return tiles > double(1 << 27) ? kTooLarge : nullptr;
}

DeviceCode sm90_code(const Sm90Variant& variant) {
  return {.source = kSource,
          .entry = concat("kernel_pytorch::product::sm90_product<", device_text(variant.config), ", ",
                          device_text(variant.operands), ", ", device_text(variant.epilogue), ", ",
                          output_name(variant.output), ">"),
          .minimum_capability = 90,
          .architecture_specific = true};
}

uint64_t sm90_source_hash() {
  return jit::source_hash(kSource);
}

TensorView sm90_batch_of_one(const TensorView& view) {
  if (!view.is_present()) return view;
  TensorView batch = view;
  batch.rank = 3;
  batch.sizes = {1, view.sizes[0], view.sizes[1]};
  batch.strides = {view.sizes[0] * view.strides[0], view.strides[0], 1};
  return batch;
}

void sm90_launch(const Sm90Variant& variant, const Sm90Tensors& tensors, const Sm90Sizes& sizes,
                 Sm90Arguments& arguments, Context& context, const std::string& label) {
  static LoadedKernels kernels;
  const Sm90Config& config = variant.config;
  CUkern_st* kernel = kernels.get(variant, context);
  const bool splits_operand = sm90_sharing(config) == 2, splits_a = splits_operand && config.share_a,
             splits_b = splits_operand && !config.share_a;
  const int rows_a = variant.operands.a_rows ? 64 : config.tile_m / (splits_a ? 2 : 1);
  const int rows_b = variant.operands.b_columns ? 64 : config.tile_n / (splits_b || variant.operands.b_halves ? 2 : 1);
  if (!variant.operands.gathers_a) {
    cuda_device::encode_tensor_map(one_if_expanded(tensors.a), rows_a, arguments.a.words);
  }
  if (variant.operands.gathers_b) {
    // By threads.
  } else if (variant.operands.b_pairs) {
    cuda_device::encode_tensor_map(tensors.b, 2, arguments.b.words, rows_b / 2);
  } else {
    cuda_device::encode_tensor_map(one_if_expanded(tensors.b), rows_b, arguments.b.words);
  }
  cuda_device::encode_tensor_map(tensors.output, kSm90BoxRows, arguments.output.words);
  if (tensors.preactivation.is_present()) {
    cuda_device::encode_tensor_map(tensors.preactivation, kSm90BoxRows, arguments.preactivation.words);
  }
  arguments.order = order_of(config, sizes);
  arguments.m = static_cast<int32_t>(sizes.m);
  arguments.n = static_cast<int32_t>(sizes.n);
  arguments.k_stages = static_cast<int32_t>(divide_up(sizes.k * size_of(tensors.a.dtype), kSm90StageBytes));
  arguments.a_batched = tensors.a.strides[0] != 0;
  arguments.b_batched = tensors.b.strides[0] != 0;
  const auto cluster = static_cast<unsigned>(config.cluster);
  const auto clusters = static_cast<unsigned>(std::max(context.info->cuda.multiprocessors, 2)) / cluster;
  cuda_device::LaunchShape shape;
  auto tiles = static_cast<unsigned>(arguments.order.total);
  if (variant.operands.grouping == Sm90Grouping::kRows) {  // at most one more of each group than its rows fill
    tiles += static_cast<unsigned>(arguments.groups.count * arguments.order.tiles_n);
  }
  shape.grid_x = (config.splits ? tiles : std::min(clusters, tiles)) * cluster;
  shape.block_x = kSm90Threads;
  shape.cluster_x = cluster;
  shape.shared_bytes = static_cast<unsigned>(sm90_shared_bytes(config));
  shape.programmatic_dependent = true;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, label);
}

}  // namespace kernel_pytorch::product
