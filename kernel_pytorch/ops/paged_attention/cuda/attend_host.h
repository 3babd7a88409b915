// What the hosts of the kernels by tensor cores share: arguments, names of device code, and how work is shared out.
#pragma once

#include <string>
#include <string_view>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/paged_attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/paged_attention/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::paged_attention {

inline constexpr auto kTileFields = config_fields<Tile>(
    config_field<&Tile::size>(), config_field<&Tile::value_size>(), config_field<&Tile::row_warps>(),
    config_field<&Tile::keys>(), config_field<&Tile::stages>(), config_field<&Tile::bytes>(),
    config_field<&Tile::heads>(), config_field<&Tile::warps>(), config_field<&Tile::rows>());
constexpr ConfigFields fields_of(const Tile&) {
  return kTileFields;
}

// Query heads of a key head.
int64_t group_of(const Attend& problem);
int64_t most_queries(const Attend& problem);

// Null, or why no kernel by tensor cores takes the problem.
const char* tensor_core_obstacle(const Attend& problem, const DeviceInfo& device);
const char* size_obstacle(const Attend& problem);
inline int float8_capability(DType cache) {
  return cache == DType::kFloat8E4M3 ? 89 : 80;
}
inline const char* cache_type_obstacle(DType cache, const DeviceInfo& device) {
  return feature_obstacle(device, cache == DType::kFloat8E4M3 ? CudaFeature::kFloat8 : CudaFeature::kMma);
}

CacheArguments cache_arguments(const TensorView& cache, const TensorView& scale);
AttendArguments attend_arguments(const Attend& problem);

std::string_view cache_type_name(DType dtype);
DeviceCode code_of(std::string_view function, std::string_view arguments, const char* source, int capability = 80,
                   bool architecture_specific = false);
DeviceCode plan_code(const Tile& tile);
DeviceCode combine_code(DType dtype, const Tile& tile);

template <class Arguments>
void launch(Context& context, CUkern_st* kernel, int64_t blocks, int threads, int shared, Arguments& arguments,
            const std::string& label, bool follows = false, int cluster = 1) {
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = static_cast<unsigned>(threads);
  shape.cluster_x = static_cast<unsigned>(cluster);
  shape.shared_bytes = static_cast<unsigned>(shared);
  shape.programmatic_dependent = follows && has_feature(*context.info, CudaFeature::kDependentLaunch);
  cuda_device::launch(context, kernel, shape, pointers, label);
}

// Sets how work is shared out among `blocks`, and allocates what pieces need.
void set_workers(WorkArguments& work, const Attend& problem, const Tile& tile, int64_t blocks, Context& context);

}  // namespace kernel_pytorch::paged_attention
