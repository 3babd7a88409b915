// A scan on the GPU, as the host describes it (scan_cuda.h says what it computes): the forward is one, the backward
// three, with other tensors in its places.
#pragma once

#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/ops/linear_attention/cuda/scan_cuda.h"
#include "kernel_pytorch/ops/linear_attention/operation.h"

namespace kernel_pytorch::linear_attention {

struct Scan {
  TensorView query{}, key{}, value{}, output{};  // [batch, tokens, heads or a divisor, size]
  TensorView gate{}, channel_gate{}, decay{}, offsets{}, state_index{};
  const float* initial = nullptr;
  float* final = nullptr;
  double query_scale = 1, key_scale = 1;
  int64_t heads = 0, sequences = 0, slots = 0;  // slots: of a pool, which state_index picks from
  bool backwards = false, gates_values = false, initial_is_turned = false, final_is_turned = false;

  int64_t columns() const { return query.sizes[3]; }
  int64_t values() const { return value.sizes[3]; }
};

ScanArguments arguments_of(const Scan& scan);

// A tensor whose heads serve `heads` of a scan.
ScanTensor tensor_of(const TensorView& view, int64_t heads);
// A grid's size, which 31 bits must hold.
unsigned grid_of(int64_t blocks);
// The gates' gradients that `arguments` want, of terms that are there; `heads` of all sequences.
void sum_gate_terms(GateArguments& arguments, DType dtype, int64_t heads, Context& context);

// Rows in no sequence are zero.
void clear_unless_batch(const TensorView& output, const TensorView& offsets, Context& context);

// The forward as a scan, and the gradients of query, key and value; `grad_query` and `grad_key` may be fp32.
Scan forward_scan(const Forward& problem);
struct BackwardScans {
  Scan query, key, value;
};
BackwardScans backward_scans(const Backward& problem, const TensorView& grad_query, const TensorView& grad_key);

using RunScan = void (*)(const Scan& scan, Context& context);
// The whole backward by three scans, and the gates' gradients.
void run_backward_by(RunScan run, const Backward& problem, Context& context);

void run_by_steps(const Scan& scan, Context& context);
std::vector<DeviceCode> step_code();
std::vector<DeviceCode> gate_code();
inline constexpr int64_t kMostStepColumns = 256;

}  // namespace kernel_pytorch::linear_attention
