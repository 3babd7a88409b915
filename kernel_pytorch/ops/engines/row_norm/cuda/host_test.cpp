// The CUDA row norms as the host sees them, without a GPU: who takes which problem and why not, that every config a
// problem is offered can be launched, and that the rows are shared out without a gap.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "kernel_pytorch/ops/engines/row_norm/cuda/launch.h"
#include "kernel_pytorch/ops/engines/row_norm/operation.h"

namespace kernel_pytorch::row_norm {
namespace {

DeviceInfo make_device(int capability) {
  DeviceInfo device;
  device.device = {DeviceKind::kCuda, 0};
  device.cuda.compute_major = capability / 10;
  device.cuda.compute_minor = capability % 10;
  device.cuda.multiprocessors = capability >= 90 ? 132 : 108;
  device.cuda.shared_bytes_per_block = capability >= 90 ? 232448 : 166912;
  device.cuda.shared_bytes_per_multiprocessor = capability >= 90 ? 233472 : 167936;
  return device;
}

TensorView rows_view(DType dtype, int64_t rows, int64_t columns) {
  return contiguous_view(nullptr, dtype, {rows, columns}, {DeviceKind::kCuda, 0});
}

ForwardProblem forward_problem(DType dtype, int64_t rows, int64_t columns, Norm norm = Norm::kRms,
                               bool residual = false) {
  ForwardProblem problem;
  problem.norm = norm;
  problem.x = problem.output = rows_view(dtype, rows, columns);
  if (residual) problem.residual = problem.sum = problem.x;
  problem.weight = contiguous_view(nullptr, dtype, {columns}, {DeviceKind::kCuda, 0});
  return problem;
}

BackwardProblem backward_problem(DType dtype, int64_t rows, int64_t columns, Norm norm = Norm::kRms,
                                 bool grad_sum = false) {
  BackwardProblem problem;
  problem.norm = norm;
  problem.grad_output = problem.value = problem.grad_input = rows_view(dtype, rows, columns);
  if (grad_sum) problem.grad_sum = problem.value;
  problem.weight = problem.grad_weight = contiguous_view(nullptr, dtype, {columns}, {DeviceKind::kCuda, 0});
  return problem;
}

constexpr const registry::Kernel<ForwardProblem>* kForwardKernels[] = {
    &kForwardCudaWarp, &kForwardCudaBulk, &kForwardCudaBlock, &kForwardCudaCluster, &kForwardCudaAny};
constexpr const registry::Kernel<BackwardProblem>* kBackwardKernels[] = {
    &kBackwardCudaWarp, &kBackwardCudaBulk, &kBackwardCudaBlock, &kBackwardCudaCluster, &kBackwardCudaAny};

template <class Problem>
std::string first_that_supports(std::span<const registry::Kernel<Problem>* const> kernels, const Problem& problem,
                                const DeviceInfo& device) {
  for (const registry::Kernel<Problem>* kernel : kernels) {
    if (kernel->supports(problem, device)) return std::string(kernel->name);
  }
  return "none";
}
std::string chosen(const ForwardProblem& problem, int capability = 90) {
  return first_that_supports<ForwardProblem>(kForwardKernels, problem, make_device(capability));
}
std::string chosen(const BackwardProblem& problem, int capability = 90) {
  return first_that_supports<BackwardProblem>(kBackwardKernels, problem, make_device(capability));
}

TEST(RowNormCuda, WidthDecidesTheKernel) {
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 100000, 128)), "cuda_warp");
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 16384, 4096)), "cuda_bulk");
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 16384, 4096), 80), "cuda_block");
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 64, 4096)), "cuda_block");
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 2048, 131072)), "cuda_cluster");
  EXPECT_EQ(chosen(forward_problem(DType::kFloat32, 64, 262144, Norm::kLayer, true)), "cuda_cluster");
  EXPECT_EQ(chosen(forward_problem(DType::kBFloat16, 2048, 131072), 80), "cuda_any");
  EXPECT_EQ(chosen(backward_problem(DType::kBFloat16, 16384, 4096, Norm::kLayer, true)), "cuda_bulk");
  EXPECT_EQ(chosen(backward_problem(DType::kFloat32, 16384, 16384, Norm::kLayer)), "cuda_cluster");
  EXPECT_EQ(chosen(backward_problem(DType::kFloat32, 64, 262144, Norm::kLayer)), "cuda_any");
  EXPECT_EQ(chosen(forward_problem(DType::kFloat64, 64, 64)), "none");
  EXPECT_EQ(chosen(forward_problem(DType::kFloat32, 64, 64), 75), "none");
}

TEST(RowNormCuda, WhateverIsNotVectorsGoesToAny) {
  ForwardProblem ragged = forward_problem(DType::kBFloat16, 1000, 4100);
  EXPECT_EQ(chosen(ragged), "cuda_any");
  ForwardProblem strided = forward_problem(DType::kBFloat16, 1000, 4096);
  strided.x.strides = {1, 1000};
  EXPECT_EQ(chosen(strided), "cuda_any");
  ForwardProblem shifted = forward_problem(DType::kBFloat16, 1000, 4096);
  shifted.x.data = reinterpret_cast<void*>(uintptr_t{0x1002});
  EXPECT_EQ(chosen(shifted), "cuda_any");
  ForwardProblem pitched = forward_problem(DType::kBFloat16, 1000, 4096);
  pitched.x.strides[0] = 4100;
  EXPECT_EQ(chosen(pitched), "cuda_any");
  pitched.x.strides[0] = 4104;
  EXPECT_EQ(chosen(pitched), "cuda_bulk");
  BackwardProblem weight = backward_problem(DType::kBFloat16, 1000, 4096);
  weight.weight.data = reinterpret_cast<void*>(uintptr_t{0x1004});
  EXPECT_EQ(chosen(weight), "cuda_any");
}

// Gradients of heads: [batch, sequence, heads, columns] whose memory is [batch, heads, sequence, columns].
TEST(RowNormCuda, RowsAlongThreeDimensionsKeepTheirVectors) {
  const auto with_heads = [](int64_t columns) {
    BackwardProblem problem = backward_problem(DType::kBFloat16, 4 * 2048 * 16, columns);
    const TensorView rows = contiguous_view(nullptr, DType::kBFloat16, {4, 2048, 16, columns}, {DeviceKind::kCuda, 0});
    problem.value = problem.grad_output = problem.grad_input = rows;
    problem.grad_output.strides = {16 * 2048 * columns, columns, 2048 * columns, 1};
    return problem;
  };
  EXPECT_EQ(chosen(with_heads(128)), "cuda_warp");
  EXPECT_EQ(chosen(with_heads(4096)), "cuda_block");
  BackwardProblem problem = with_heads(128);
  problem.grad_output.strides[2] += 4;
  EXPECT_EQ(chosen(problem), "cuda_any") << "rows that start at eight bytes";
  problem = with_heads(128);
  problem.grad_output.strides[3] = 2;
  EXPECT_EQ(chosen(problem), "cuda_any") << "columns apart from each other";
  EXPECT_EQ(chosen(with_heads(132)), "cuda_any") << "columns that are no whole vectors";
  const auto of_ring = kBackwardCudaBulk.supports(with_heads(4096), make_device(90));
  EXPECT_EQ(of_ring.reason(), kStridedRows);

  ForwardProblem forward = forward_problem(DType::kBFloat16, 1000, 4096);
  forward.x = forward.output = contiguous_view(nullptr, DType::kBFloat16, {10, 100, 4096}, {DeviceKind::kCuda, 0});
  forward.x.strides[0] += 4096;
  EXPECT_EQ(chosen(forward), "cuda_block");
  forward.x = forward.output = contiguous_view(nullptr, DType::kBFloat16, {2, 5, 10, 10, 4096}, {DeviceKind::kCuda, 0});
  EXPECT_EQ(chosen(forward), "cuda_any") << "four dimensions of rows";
}

// With fp32 rows, 16-bit tensors use the same kernel as fp32 alone if their rows start at multiples of sixteen bytes.
TEST(RowNormCuda, MixedPrecisionKeepsTheKernel) {
  ForwardProblem forward = forward_problem(DType::kFloat32, 8192, 768, Norm::kLayer, true);
  const std::string alone = chosen(forward);
  forward.output.dtype = forward.residual.dtype = DType::kBFloat16;
  EXPECT_EQ(chosen(forward), alone);
  BackwardProblem backward = backward_problem(DType::kFloat32, 8192, 768, Norm::kLayer, true);
  const std::string backward_alone = chosen(backward);
  backward.grad_output.dtype = DType::kFloat16;
  EXPECT_EQ(chosen(backward), backward_alone);
  ForwardProblem ragged = forward_problem(DType::kFloat32, 8192, 772, Norm::kLayer, true);
  EXPECT_NE(chosen(ragged), "cuda_any");
  ragged.output.dtype = DType::kBFloat16;
  EXPECT_EQ(chosen(ragged), "cuda_any");
  BackwardProblem wide = backward_problem(DType::kFloat32, 64, 16392, Norm::kRms);
  wide.grad_output.dtype = DType::kBFloat16;
  EXPECT_EQ(chosen(wide), "cuda_cluster");
}

TEST(RowNormCuda, EveryRefusalHasAReason) {
  const DeviceInfo old = make_device(75), hopper = make_device(90);
  for (const auto* kernel : kForwardKernels) {
    EXPECT_FALSE(kernel->supports(forward_problem(DType::kBFloat16, 8, 4096), old).reason().empty()) << kernel->name;
    EXPECT_FALSE(kernel->supports(forward_problem(DType::kFloat64, 8, 4096), hopper).reason().empty()) << kernel->name;
  }
}

// Sizes around every boundary of the configs, all dtypes and features: each config that is offered has a text of its
// own and the heuristic names one of them.
template <class Problem>
void expect_sound_configs(const registry::Kernel<Problem>& kernel, const Problem& problem, const DeviceInfo& device) {
  if (!kernel.supports(problem, device)) return;
  const std::vector<std::string> texts = kernel.configs(problem, device);
  ASSERT_FALSE(texts.empty()) << kernel.name;
  EXPECT_EQ(std::set<std::string>(texts.begin(), texts.end()).size(), texts.size()) << kernel.name;
  for (const std::string& text : texts) {
    if (kernel.name == "cuda_any") break;  // has configs of another type
    const auto config = parse_config<LaunchConfig>(text);
    ASSERT_TRUE(config.has_value()) << text;
    EXPECT_EQ(config_text(*config), text);
  }
  const int preferred = kernel.heuristic(problem, device);
  EXPECT_GE(preferred, 0);
  EXPECT_LT(preferred, static_cast<int>(texts.size()));
}

TEST(RowNormCuda, OfferedConfigsAreDistinctAndThePreferredIsOneOfThem) {
  for (int capability : {80, 90, 100}) {
    const DeviceInfo device = make_device(capability);
    for (DType dtype : kCudaTypes) {
      for (int64_t columns :
           {0, 8, 64, 128, 136, 512, 1024, 2048, 4096, 4104, 8192, 16384, 16392, 65536, 131072, 262144}) {
        for (int64_t rows : {1, 1000, 100000}) {
          for (bool feature : {false, true}) {
            for (Norm norm : {Norm::kRms, Norm::kLayer}) {
              for (const auto* kernel : kForwardKernels) {
                expect_sound_configs(*kernel, forward_problem(dtype, rows, columns, norm, feature), device);
              }
              for (const auto* kernel : kBackwardKernels) {
                expect_sound_configs(*kernel, backward_problem(dtype, rows, columns, norm, feature), device);
              }
            }
          }
        }
      }
    }
  }
}

TEST(RowNormCuda, RingsFitSharedMemoryAndUnitsCoverTheRows) {
  const DeviceInfo device = make_device(90);
  for (int blocks : {1, 2, 3, 4}) {
    for (int cluster : {1, 2, 8, 16}) {
      const LaunchConfig config{.rows = {.threads = 256,
                                         .row_threads = 256,
                                         .vectors = 4,
                                         .source = Source::kRing,
                                         .clustered = cluster > 1,
                                         .blocks = blocks},
                                .stages = 12,
                                .cluster = cluster};
      for (int64_t columns = 8; columns <= 131072; columns += 1000) {
        for (int64_t rows : {1, 131, 132, 133, 16384, 1 << 30}) {
          RowWork work{.rows = rows, .columns = columns, .element_bytes = 2, .tensors = 3};
          work.narrow = columns % 16 == 0;
          if (!fits(config, work, device, true)) continue;
          const cuda_device::LaunchShape shape = launch_shape(config, work, device);
          const RowShape row = make_shape(config, work, device);
          EXPECT_GE(row.stages, 2);
          EXPECT_LE(row.stages, kMaxStages);
          EXPECT_LE(shape.shared_bytes, 232448u - 1024u);
          EXPECT_LE((shape.shared_bytes + 2048) * blocks, 233472u);
          EXPECT_GE(static_cast<int64_t>(row.slice_vectors) * cluster, work.row_vectors());
          EXPECT_TRUE(!work.narrow || row.slice_vectors % 2 == 0);
          const int64_t units = unit_count(config, work, device);
          EXPECT_EQ(shape.grid_x, units * cluster);
          EXPECT_LE(units, rows);
          // Balanced: the longest share is at most one round longer than the shortest.
          EXPECT_LE((rows + units - 1) / units, rows / units + 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kernel_pytorch::row_norm
