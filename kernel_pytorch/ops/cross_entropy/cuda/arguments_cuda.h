// What host and device agree on for cross entropy.
#pragma once

#include "kernel_pytorch/ops/support/any_rows_cuda.h"

namespace kernel_pytorch::cross_entropy {

struct Arguments {
  AnyShape shape;
  AnyTensor logits;
  const void* target;
  const void* weight;  // of the whole vocabulary; null: ones
  const float* given_lse;
  const float* grad_loss;
  float* loss;  // null: not wanted, likewise below
  float* lse;
  float* total;
  float* partials;
  void* gradient;         // contiguous
  const double* counted;  // the mean's divisor; null: every block counts for itself
  uint32_t* arrived;      // zero; with total
  int64_t grad_loss_step;
  int64_t ignore_index;
  int64_t vocabulary;
  int64_t first_column;
  float label_smoothing;
  float share;  // label_smoothing / vocabulary
  float z_loss;
  float softcap;  // 0: none
  float gradient_scale;
  int32_t slice_vectors;  // of a row that one block of a cluster takes
  int32_t stages;         // rows that wait in shared memory
  int32_t held_vectors;   // of a row that cuda_block keeps in shared memory, a multiple of its threads
  bool target_is_wide;    // int64, not int32
  bool is_mean;
  bool weight_is_float;
  bool has_vectors;  // rows of logits and gradient lie alike to 16 bytes, their columns side by side
};

inline constexpr int kCountThreads = 1024;

inline constexpr int kThreadsOnMultiprocessor = 1024;  // of cuda_block

// cuda_cluster: warps that compute, and one that asks for rows.
struct ClusterConfig {
  int consumers = 32;  // threads
  int blocks = 1;      // resident per multiprocessor, which limits registers
};
inline constexpr int kMaxStages = 8;
inline constexpr int kFetchThreads = 32;

KP_SHARED_CODE constexpr bool is_legal(const ClusterConfig& config) {
  const int threads = config.consumers + kFetchThreads;
  return config.consumers > 0 && config.consumers % 32 == 0 && threads <= 1024 && threads * config.blocks <= 2048;
}

struct RescaleArguments {
  void* tensor;
  int64_t elements;
  const float* scale;
};
inline constexpr int kRescaleThreads = 256;
inline constexpr int kRescaleVectors = 4;  // that a thread has under way

}  // namespace kernel_pytorch::cross_entropy
