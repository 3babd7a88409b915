// The ops of this folder as the registry sees them, and the kernels in their lists.
#pragma once

#include <vector>

#include "kernel_pytorch/ops/block_list/arguments_cuda.h"
#include "kernel_pytorch/ops/block_list/block_list.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch::block_list {

void check(const Build& problem, Device device);  // throws what build() throws

extern const registry::Operation<Build> kBuild;
extern const registry::Kernel<Build> kBuildReference, kBuildCpu, kBuildCuda;

// A checked selection: all tensors of rank 4, and the grid with the numbers that its sparsity allows.
struct Selection {
  Select given{};
  Grid grid{};

  bool has_scores() const { return given.scores.is_present(); }
  bool has_lengths() const { return given.query_lengths.is_present(); }
  int64_t batch() const { return given.rows.counts.sizes[0]; }
  int64_t heads() const { return given.rows.counts.sizes[1]; }
  int64_t group() const { return has_scores() ? 1 : heads() / given.key.sizes[1]; }
};
Selection selection_of(const Select& arguments);  // without the shares of its rows
void check(Selection& selection, Device device);  // throws what select() throws; sets the shares of its rows
void choose_share_of(Grid& grid, double sparsity);
// The grid of each batch entry, or one for all, from lengths in host memory.
std::vector<Grid> grids_of(const Selection& selection);

extern const registry::Operation<Selection> kSelect;
extern const registry::Kernel<Selection> kSelectReference, kSelectCpu, kSelectCuda;

}  // namespace kernel_pytorch::block_list
