#include "kernel_pytorch/ops/engines/gemm/sm90/split.h"

#include <string>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/engines/gemm/sm90/split_cuda.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::product {
namespace {

constexpr const char* kSplitSource = "kernel_pytorch/ops/engines/gemm/sm90/split.cuh";
constexpr int64_t kMostSplitBlocks = 65535;  // of k, and of batches

bool is_along(const TensorView& source) {
  return source.strides[2] == 1;
}

DeviceCode split_code(bool along, bool parts) {
  return {.source = kSplitSource,
          .entry = concat("kernel_pytorch::product::split_", along ? "along" : "across", "<", bool_name(parts), ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

}  // namespace

int64_t split_depth(int64_t k) {
  return divide_up(k, kSplitGroup) * kSplitGroup;
}

int64_t split_chunks(const TensorView& source) {
  return divide_up(source.sizes[2], is_along(source) ? kSplitChunk : kSplitEdge);
}

const char* split_obstacle(const TensorView& source) {
  const bool is_large = split_chunks(source) > kMostSplitBlocks || source.sizes[0] > kMostSplitBlocks;
  return is_large ? "splits fp32 operands of at most 65535 batches and 64 times as many steps of k" : nullptr;
}

TensorView split_operand(const SplitOperand& operand, Context& context) {
  static const std::string kLabel = "matmul fp32 parts";
  static KernelTable<4> kernels;
  const TensorView& source = operand.source;
  const bool along = is_along(source), is_expanded = source.strides[0] == 0;
  const int64_t batches = is_expanded ? 1 : source.sizes[0], rows = source.sizes[1], k = source.sizes[2];
  const int64_t depth = split_depth(k), line = operand.parts ? 2 * depth : depth;
  CUkern_st* kernel = kernels.get(along * 2 + operand.parts, context, [&] { return split_code(along, operand.parts); });
  auto* target = static_cast<float*>(context.scratch->allocate(static_cast<size_t>(batches * rows * line) * 4));
  SplitArguments arguments = {.data = source.as<float>(),
                              .batch = source.strides[0],
                              .stride = source.strides[along ? 1 : 2],
                              .target = target,
                              .row_sums = operand.row_sums,
                              .careful = operand.careful,
                              .rows = static_cast<int32_t>(rows),
                              .k = static_cast<int32_t>(k),
                              .depth = static_cast<int32_t>(depth)};
  cuda_device::LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(divide_up(rows, along ? kSplitRows : kSplitEdge));
  shape.grid_y = static_cast<unsigned>(split_chunks(source));
  shape.grid_z = static_cast<unsigned>(batches);
  shape.block_x = kSplitThreads;
  void* pointers[] = {&arguments};
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
  TensorView view = source;
  view.data = target;
  view.sizes = {source.sizes[0], rows, line};
  view.strides = {is_expanded ? 0 : rows * line, line, 1};
  return view;
}

std::vector<DeviceCode> split_device_code() {
  return {split_code(true, true), split_code(false, true), split_code(true, false), split_code(false, false)};
}

uint64_t split_source_hash() {
  return jit::source_hash(kSplitSource);
}

}  // namespace kernel_pytorch::product
