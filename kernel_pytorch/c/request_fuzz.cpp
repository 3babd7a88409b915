// libFuzzer entry for the requests of the C interface, plans among them, the words of the command line and files of
// timings: whatever the bytes, every reader returns or throws one Error that blames the caller. Two ops without kernels
// and one processor stand in for the library's ops and the machine's devices.
// clang-format off
// kp-fuzz-with: kernel_pytorch/c/json.cpp kernel_pytorch/c/plans/request.cpp kernel_pytorch/c/plans/activation.cpp kernel_pytorch/c/plans/precision.cpp kernel_pytorch/c/request.cpp kernel_pytorch/c/names.cpp kernel_pytorch/c/sample_file.cpp kernel_pytorch/tuning/comparison.cpp kernel_pytorch/tuning/mann_whitney.cpp kernel_pytorch/tuning/row_check.cpp kernel_pytorch/plan/activation_menu.cpp kernel_pytorch/plan/activation_plan.cpp kernel_pytorch/plan/bucket_plan.cpp kernel_pytorch/plan/context_parallel_plan.cpp kernel_pytorch/plan/graph_plan.cpp kernel_pytorch/plan/memory_plan.cpp kernel_pytorch/plan/offload_plan.cpp kernel_pytorch/plan/precision_plan.cpp kernel_pytorch/plan/optimize/budget_plan.cpp kernel_pytorch/plan/optimize/model_plan.cpp kernel_pytorch/plan/optimize/tuning_plan.cpp kernel_pytorch/plan/optimize/verdict.cpp kernel_pytorch/base/device.cpp kernel_pytorch/base/dtype.cpp
// clang-format on
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/c/plans/request.h"
#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/c/sample_file.h"
#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/ops/operations.h"

namespace kernel_pytorch {

const std::vector<registry::AnyOperation>& operations() {
  static const auto* all = [] {
    auto* toys = new std::vector<registry::AnyOperation>(2);
    (*toys)[0].name = "toy_forward";
    (*toys)[1].name = "toy_backward";
    for (registry::AnyOperation& toy : *toys) toy.kernel_names = {"fast", "reference"};
    return toys;
  }();
  return *all;
}

const registry::AnyOperation* find_operation(std::string_view name) {
  for (const registry::AnyOperation& operation : operations()) {
    if (operation.name == name) return &operation;
  }
  return nullptr;
}

const DeviceInfo& device_info(Device device) {
  static const DeviceInfo* processor = new DeviceInfo;
  KP_CHECK(device == Device{}, "there is no ", device);
  return *processor;
}

}  // namespace kernel_pytorch

namespace {

template <class Read>
void read_or_refuse(const Read& read) {
  try {
    read();
  } catch (const kernel_pytorch::Error& error) {
    if (error.code() != kernel_pytorch::ErrorCode::kInvalidArgument) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kernel_pytorch::c_interface;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_or_refuse([&] {
    if (shape_from(request_shape_text(shape_from(text))) != shape_from(text)) std::abort();
  });
  read_or_refuse([&] { matching_operations(text); });
  read_or_refuse([&] {
    const std::vector<SampleRun> runs = sample_runs_from(text, "fuzz");
    compare_runs(runs, sample_runs_from(sample_file_text(runs), "again"), {});
  });
  read_or_refuse([&] {
    const Json json = parse_request(text);
    to_text(json);
    read_or_refuse([&] { read_overlay(json); });
    read_or_refuse([&] { read_directories(json); });
    read_or_refuse([&] { read_clear(json); });
    read_or_refuse([&] { read_autotune(json); });
    for (const auto answer :
         {answer_bucket_plan, answer_graph_plan, answer_memory_plan, answer_activation_plan, answer_batch_plan,
          answer_offload_plan, answer_precision_plan, answer_context_parallel_plan, answer_model_plan,
          answer_tuning_plan, answer_budget_plan, answer_part_verdict, answer_whole_verdict}) {
      read_or_refuse([&] { to_text(answer(json)); });
    }
    FieldReader fields(json, "fuzz");
    read_operation(fields);
    fields.number("budget_seconds", 1, 0, 10);
    fields.boolean("every_kernel", false);
    fields.finish();
  });
  return 0;
}
