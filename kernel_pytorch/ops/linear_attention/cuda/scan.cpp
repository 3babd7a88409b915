#include "kernel_pytorch/ops/linear_attention/cuda/scan.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::linear_attention {

ScanTensor tensor_of(const TensorView& view, int64_t heads) {
  if (!view.is_present()) {
    ScanTensor absent{};
    absent.group = 1;
    return absent;
  }
  return {.data = view.data,
          .batch_stride = view.strides[0],
          .token_stride = view.strides[1],
          .head_stride = view.strides[2],
          .group = static_cast<int32_t>(heads / std::max<int64_t>(view.sizes[2], 1)),
          .is_float = view.dtype == DType::kFloat32};
}

unsigned grid_of(int64_t blocks) {
  KP_CHECK(blocks < int64_t{1} << 31, "linear_attention: the tensors need ", blocks,
           " blocks; at most 2^31 - 1 are supported, split the batch");
  return static_cast<unsigned>(blocks);
}

namespace {

constexpr const char* kGateSource = "kernel_pytorch/ops/linear_attention/cuda/gates.cuh";
constexpr int kTypes = std::size(kCudaTypes);

DeviceCode gate_code_of(std::string_view function, std::string_view type) {
  return {.source = kGateSource,
          .entry = type.empty() ? concat("kernel_pytorch::linear_attention::", function)
                                : concat("kernel_pytorch::linear_attention::", function, "<", type, ">"),
          .minimum_capability = 80,
          .architecture_specific = false};
}

void launch_gates(std::string_view function, DType dtype, unsigned grid_x, unsigned grid_y, GateArguments& arguments,
                  Context& context, KernelTable<kTypes>& table) {
  static const std::string kLabel = "linear_attention gates";
  CUkern_st* kernel =
      table.get(cuda_type_index(dtype), context, [&] { return gate_code_of(function, element_type_name(dtype)); });
  void* pointers[] = {&arguments};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_x;
  shape.grid_y = grid_y;
  shape.block_x = kGateThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

template <class T>
T* allocate(Context& context, int64_t count) {
  return static_cast<T*>(context.scratch->allocate(static_cast<size_t>(count) * sizeof(T)));
}

bool only_channels(const Backward& problem) {
  return problem.grad_channel_gate.is_present() && !problem.grad_gate.is_present() && !problem.grad_decay.is_present();
}

void run_gates(const Backward& problem, const BackwardScans& scans, Context& context) {
  static const std::string kLabel = "linear_attention decays";
  static KernelTable<kTypes> term_table;
  static KernelTable<1> decay_table;
  const Sizes sizes(problem);
  const DType dtype = problem.query.dtype;
  const int64_t rows = sizes.batch * sizes.tokens * sizes.heads, heads = sizes.sequences * sizes.heads;
  GateArguments arguments{
      .query = tensor_of(problem.query, sizes.heads),
      .key = tensor_of(problem.key, sizes.heads),
      .grad_query = scans.query.output.as<float>(),
      .grad_key = scans.key.output.as<const float>(),
      .grad_query_out = problem.grad_query.data,
      .grad_key_out = problem.grad_key.data,
      .terms = only_channels(problem) ? nullptr : allocate<float>(context, rows),
      .grad_gate = problem.grad_gate.data,
      .grad_channel_gate = problem.grad_channel_gate.data,
      .decay_sums = problem.grad_decay.is_present() ? allocate<float>(context, heads) : nullptr,
      .final_state = scans.query.final,
      .grad_final_state = problem.grad_final_state.is_present() ? problem.grad_final_state.as<float>() : nullptr,
      .offsets = problem.cu_seqlens.data,
      .tokens = sizes.tokens,
      .rows = rows,
      .heads = static_cast<int32_t>(sizes.heads),
      .columns = static_cast<int32_t>(sizes.columns),
      .values = static_cast<int32_t>(sizes.values),
      .offsets_are_wide = problem.cu_seqlens.dtype == DType::kInt64,
      .gate_is_float = problem.gate.dtype == DType::kFloat32,
      .channel_gate_is_float = problem.channel_gate.dtype == DType::kFloat32,
      .final_is_turned = false,  // the scan of queries stores its turned state turned: as states lie
      .has_initial = problem.initial_state.is_present()};
  if (only_channels(problem)) {  // one pass instead of two
    static KernelTable<kTypes> finish_table;
    launch_gates("finish_channel_gates", dtype, grid_of(heads),
                 static_cast<unsigned>(divide_up(arguments.columns, kGateColumns)), arguments, context, finish_table);
    return;
  }
  launch_gates("gate_terms", dtype, grid_of(divide_up(rows, kGateThreads / 32)), 1, arguments, context, term_table);
  sum_gate_terms(arguments, dtype, heads, context);
  if (!problem.grad_decay.is_present()) return;
  CUkern_st* kernel = decay_table.get(0, context, [&] { return gate_code_of("sum_decays", ""); });
  const float* sums = arguments.decay_sums;
  auto* grad_decay = problem.grad_decay.as<float>();
  int32_t sequences = static_cast<int32_t>(sizes.sequences), all_heads = static_cast<int32_t>(sizes.heads);
  void* pointers[] = {&sums, &grad_decay, &sequences, &all_heads};
  cuda_device::LaunchShape shape;
  shape.grid_x = grid_of(divide_up(sizes.heads, kGateThreads));
  shape.block_x = kGateThreads;
  cuda_device::launch(context, kernel, shape, pointers, kLabel);
}

}  // namespace

void sum_gate_terms(GateArguments& arguments, DType dtype, int64_t heads, Context& context) {
  static KernelTable<kTypes> gate_table, channel_table;
  if (arguments.grad_gate != nullptr || arguments.decay_sums != nullptr) {
    launch_gates("sum_gates", dtype, grid_of(heads), 1, arguments, context, gate_table);
  }
  if (arguments.grad_channel_gate != nullptr) {
    launch_gates("sum_channel_gates", dtype, grid_of(heads),
                 static_cast<unsigned>(divide_up(arguments.columns, kGateColumns)), arguments, context, channel_table);
  }
}

ScanArguments arguments_of(const Scan& scan) {
  return {.query = tensor_of(scan.query, scan.heads),
          .key = tensor_of(scan.key, scan.heads),
          .value = tensor_of(scan.value, scan.heads),
          .output = tensor_of(scan.output, scan.heads),
          .gate = tensor_of(scan.gate, scan.heads),
          .channel_gate = tensor_of(scan.channel_gate, scan.heads),
          .decay = scan.decay.is_present() ? scan.decay.as<const float>() : nullptr,
          .offsets = scan.offsets.data,
          .state_index = scan.state_index.data,
          .initial = scan.initial,
          .final = scan.final,
          .tokens = scan.value.sizes[1],
          .slots = scan.slots,
          .heads = static_cast<int32_t>(scan.heads),
          .columns = static_cast<int32_t>(scan.columns()),
          .values = static_cast<int32_t>(scan.values()),
          .query_scale = static_cast<float>(scan.query_scale),
          .key_scale = static_cast<float>(scan.key_scale),
          .offsets_are_wide = scan.offsets.dtype == DType::kInt64,
          .index_is_wide = scan.state_index.dtype == DType::kInt64,
          .backwards = scan.backwards,
          .gates_values = scan.gates_values,
          .initial_is_turned = scan.initial_is_turned,
          .final_is_turned = scan.final_is_turned};
}

void clear_unless_batch(const TensorView& output, const TensorView& offsets, Context& context) {
  if (!offsets.is_present() || !output.is_present() || output.element_count() == 0) return;
  cuda_device::fill_bytes(context.info->device.index, output.data, 0, static_cast<size_t>(output.byte_count()),
                          context.stream);
}

Scan forward_scan(const Forward& problem) {
  const Sizes sizes(problem);
  return {.query = problem.query,
          .key = problem.key,
          .value = problem.value,
          .output = problem.output,
          .gate = problem.gate,
          .channel_gate = problem.channel_gate,
          .decay = problem.decay,
          .offsets = problem.cu_seqlens,
          .state_index = problem.state_index,
          .initial = problem.initial_state.is_present() ? problem.initial_state.as<const float>() : nullptr,
          .final = problem.final_state.is_present() ? problem.final_state.as<float>() : nullptr,
          .query_scale = problem.scale,
          .heads = sizes.heads,
          .sequences = sizes.sequences,
          .slots = problem.state_index.is_present() ? problem.initial_state.sizes[0] : 0};
}

BackwardScans backward_scans(const Backward& problem, const TensorView& grad_query, const TensorView& grad_key) {
  const Sizes sizes(problem);
  const Scan common{.gate = problem.gate,
                    .channel_gate = problem.channel_gate,
                    .decay = problem.decay,
                    .offsets = problem.cu_seqlens,
                    .heads = sizes.heads,
                    .sequences = sizes.sequences};
  const float* grad_final =
      problem.grad_final_state.is_present() ? problem.grad_final_state.as<const float>() : nullptr;
  BackwardScans scans{common, common, common};
  scans.query.query = problem.grad_output;
  scans.query.key = problem.value;
  scans.query.value = problem.key;
  scans.query.output = grad_query;
  scans.query.initial = problem.initial_state.is_present() ? problem.initial_state.as<const float>() : nullptr;
  scans.query.initial_is_turned = scans.query.final_is_turned = scans.query.gates_values = true;
  scans.query.query_scale = problem.scale;
  scans.key.query = problem.value;
  scans.key.key = problem.grad_output;
  scans.key.value = problem.query;
  scans.key.output = grad_key;
  scans.key.initial = grad_final;
  scans.key.initial_is_turned = scans.key.gates_values = scans.key.backwards = true;
  scans.key.key_scale = problem.scale;
  scans.value.query = problem.key;
  scans.value.key = problem.query;
  scans.value.value = problem.grad_output;
  scans.value.output = problem.grad_value;
  scans.value.initial = grad_final;
  scans.value.final = problem.grad_initial_state.is_present() ? problem.grad_initial_state.as<float>() : nullptr;
  scans.value.backwards = true;
  scans.value.key_scale = problem.scale;
  return scans;
}

void run_backward_by(RunScan run, const Backward& problem, Context& context) {
  const Sizes sizes(problem);
  const bool wants_gates =
      problem.grad_gate.is_present() || problem.grad_channel_gate.is_present() || problem.grad_decay.is_present();
  TensorView grad_query = problem.grad_query, grad_key = problem.grad_key;
  if (wants_gates) {
    for (TensorView* view : {&grad_query, &grad_key}) {
      *view = contiguous_view(allocate<float>(context, view->element_count()), DType::kFloat32, view->shape(),
                              view->device);
    }
  }
  BackwardScans scans = backward_scans(problem, grad_query, grad_key);
  if (wants_gates && problem.grad_final_state.is_present()) {
    scans.query.final = allocate<float>(context, sizes.sequences * sizes.heads * sizes.columns * sizes.values);
  }
  for (const TensorView* view :
       std::initializer_list<const TensorView*>{&grad_query, &grad_key, &problem.grad_query, &problem.grad_key,
                                                &problem.grad_value, &problem.grad_gate, &problem.grad_channel_gate}) {
    clear_unless_batch(*view, problem.cu_seqlens, context);
  }
  run(scans.query, context);
  run(scans.key, context);
  run(scans.value, context);
  if (!wants_gates) return;
  if (sizes.sequences * sizes.heads == 0 || sizes.tokens == 0) {
    if (problem.grad_decay.is_present() && sizes.heads > 0) {
      cuda_device::fill_bytes(context.info->device.index, problem.grad_decay.data, 0,
                              static_cast<size_t>(problem.grad_decay.byte_count()), context.stream);
    }
    return;
  }
  run_gates(problem, scans, context);
}

std::vector<DeviceCode> gate_code() {
  std::vector<DeviceCode> codes;
  for (DType dtype : kCudaTypes) {
    for (std::string_view function : {"gate_terms", "sum_gates", "sum_channel_gates", "finish_channel_gates"}) {
      codes.push_back(gate_code_of(function, element_type_name(dtype)));
    }
  }
  codes.push_back(gate_code_of("sum_decays", ""));
  return codes;
}

}  // namespace kernel_pytorch::linear_attention
