// Host side of the lists on the GPU, a launch each. Lists of a map: a warp for each, of both directions. Selection: a
// few rows of one head for a block of threads.
#include <cmath>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/block_list/arguments_cuda.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::block_list {
namespace {

constexpr const char* kBuildSource = "kernel_pytorch/ops/block_list/cuda/kernel.cuh";

DeviceCode build_code() {
  return {.source = kBuildSource,
          .entry = "kernel_pytorch::block_list::build",
          .minimum_capability = 80,
          .architecture_specific = false};
}

registry::Support supports_build_cuda(const Build&, const DeviceInfo& device) {
  return registry::Support::unless(cuda_obstacle(device));
}

Side side_of(const List& partial, const List& full, int64_t lists, int64_t length, int64_t list_step, int64_t step) {
  return {.counts = partial.counts.as<int32_t>(),
          .blocks = partial.blocks.as<int32_t>(),
          .full_counts = full.counts.as<int32_t>(),
          .full_blocks = full.blocks.as<int32_t>(),
          .lists = static_cast<int32_t>(lists),
          .length = static_cast<int32_t>(length),
          .list_step = list_step,
          .step = step};
}

void run_build_cuda(const Build& problem, int, Context& context) {
  static const std::string kLabel = "block_list";
  static KernelTable<1> table;
  const TensorView& map = problem.map;
  const int64_t heads = map.sizes[0] * map.sizes[1], rows = map.sizes[2], columns = map.sizes[3];
  const bool by_row = problem.rows.is_present() || problem.full_rows.is_present();
  const bool by_column = problem.columns.is_present() || problem.full_columns.is_present();
  BuildArguments arguments{.map = map.as<const uint8_t>(),
                           .head_step = rows * columns,
                           .row_lists = by_row ? heads * rows : 0,
                           .column_lists = by_column ? heads * columns : 0,
                           .rows = side_of(problem.rows, problem.full_rows, rows, columns, columns, 1),
                           .columns = side_of(problem.columns, problem.full_columns, columns, rows, 1, columns)};
  const int64_t blocks = divide_up(arguments.row_lists + arguments.column_lists, kWarps);
  if (blocks == 0) return;
  KP_CHECK(blocks < int64_t{1} << 31, "block_list: map ", map, " has ", heads * (rows + columns), " lists; at most ",
           (int64_t{1} << 31) * kWarps, " are supported, split the batch");
  CUkern_st* kernel = table.get(0, context, build_code);
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t build_source_hash() {
  return jit::source_hash(kBuildSource);
}
std::vector<DeviceCode> all_build_code() {
  return {build_code()};
}

constexpr const char* kSelectSource = "kernel_pytorch/ops/block_list/cuda/select.cuh";

DeviceCode select_code(DType dtype, bool has_vectors) {
  return {.source = kSelectSource,
          .entry = concat("kernel_pytorch::block_list::select<", element_type_name(dtype), ", ", bool_name(has_vectors),
                          ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

// Scores and means of a block of threads.
int64_t shared_bytes(const Selection& selection) {
  const int64_t size = selection.has_scores() ? 0 : selection.given.query.sizes[3];
  return kSelectRows * (selection.grid.columns + size) * int64_t{4};
}

registry::Support supports_select_cuda(const Selection& selection, const DeviceInfo& device) {
  const DType dtype = selection.has_scores() ? DType::kFloat32 : selection.given.query.dtype;
  if (const char* obstacle = cuda_obstacle(dtype, device)) return registry::Support::no(obstacle);
  if (shared_bytes(selection) > device.cuda.shared_bytes_per_block) {
    return registry::Support::no("a row's scores do not fit into shared memory; make key blocks larger");
  }
  return registry::Support::yes();
}

bool has_vectors_for(const TensorView& key) {
  return has_aligned_rows(key) && key.sizes[3] * size_of(key.dtype) % kVectorBytes == 0;
}

SelectArguments arguments_of(const Selection& selection) {
  const Select& given = selection.given;
  SelectArguments arguments{};
  arguments.grid = selection.grid;
  arguments.query = given.query.data;
  arguments.key = given.key.data;
  arguments.scores = given.scores.as<const float>();
  arguments.query_batch = given.query.strides[0], arguments.query_head = given.query.strides[1];
  arguments.query_row = given.query.strides[2];
  arguments.key_batch = given.key.strides[0], arguments.key_head = given.key.strides[1];
  arguments.key_row = given.key.strides[2];
  arguments.scores_batch = given.scores.strides[0], arguments.scores_head = given.scores.strides[1];
  arguments.scores_row = given.scores.strides[2], arguments.scores_column = given.scores.strides[3];
  arguments.threshold = static_cast<float>(given.threshold);
  arguments.has_threshold = !(std::isinf(given.threshold) && given.threshold < 0);
  if (!selection.has_scores()) {
    arguments.size = static_cast<int32_t>(given.query.sizes[3]);
  }
  arguments.key_parts = static_cast<int32_t>(given.key_parts);
  arguments.heads = static_cast<int32_t>(selection.heads());
  arguments.group = static_cast<int32_t>(selection.group());
  arguments.row_groups = static_cast<int32_t>(divide_up(selection.grid.rows, kSelectRows));
  arguments.counts = given.rows.counts.as<int32_t>();
  arguments.blocks = given.rows.blocks.as<int32_t>();
  arguments.map = given.map.as<uint8_t>();
  return arguments;
}

DeviceCode grids_code() {
  return {.source = kSelectSource,
          .entry = "kernel_pytorch::block_list::find_grids",
          .minimum_capability = 80,
          .architecture_specific = false};
}
// Launches the kernel that reads the lengths.
const Grid* find_grids(const Selection& selection, Context& context) {
  static const std::string kLabel = "block_select grids";
  static KernelTable<1> table;
  const Select& given = selection.given;
  GridsArguments arguments{.grid = selection.grid,
                           .query_lengths = given.query_lengths.as<const int32_t>(),
                           .key_lengths = given.key_lengths.as<const int32_t>(),
                           .grids = nullptr,
                           .is_aligned = !given.causal_offset.has_value(),
                           .sparsity = given.sparsity};
  arguments.grids =
      static_cast<Grid*>(context.scratch->allocate(static_cast<size_t>(selection.batch()) * sizeof(Grid)));
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(selection.batch());
  shape.block_x = 32;
  cuda_device::launch(context, table.get(0, context, grids_code), shape, pointers, kLabel);
  return arguments.grids;
}

void run_select_cuda(const Selection& selection, int, Context& context) {
  static const std::string kLabel = "block_select";
  static KernelTable<std::size(kCudaTypes) * 2> table;
  SelectArguments arguments = arguments_of(selection);
  const int64_t blocks = selection.batch() * selection.heads() * arguments.row_groups;
  if (blocks == 0) return;
  KP_CHECK(blocks < int64_t{1} << 31, "block_select: ", selection.batch() * selection.heads(), " heads of ",
           selection.grid.rows, " rows; at most 2^31 - 1 groups of ", kSelectRows, " are supported, split the batch");
  if (selection.has_lengths()) arguments.grids = find_grids(selection, context);
  const DType dtype = selection.has_scores() ? DType::kFloat32 : selection.given.query.dtype;
  const bool vectors = selection.has_scores() || has_vectors_for(selection.given.key);
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype) * 2 + vectors, context, [&] { return select_code(dtype, vectors); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(blocks);
  shape.block_x = kThreads;
  shape.shared_bytes = static_cast<unsigned>(shared_bytes(selection));
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

uint64_t select_source_hash() {
  return jit::source_hash(kSelectSource);
}
std::vector<DeviceCode> all_select_code() {
  std::vector<DeviceCode> codes{grids_code()};
  for (DType dtype : kCudaTypes) {
    for (bool vectors : {false, true}) codes.push_back(select_code(dtype, vectors));
  }
  return codes;
}

}  // namespace

constinit const registry::Kernel<Build> kBuildCuda{.name = "cuda",
                                                   .supports = supports_build_cuda,
                                                   .run = run_build_cuda,
                                                   .source_hash = build_source_hash,
                                                   .device_code = all_build_code};
constinit const registry::Kernel<Selection> kSelectCuda{.name = "cuda",
                                                        .supports = supports_select_cuda,
                                                        .run = run_select_cuda,
                                                        .source_hash = select_source_hash,
                                                        .device_code = all_select_code};

}  // namespace kernel_pytorch::block_list
