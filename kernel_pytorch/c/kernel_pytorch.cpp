#include "kernel_pytorch/c/kernel_pytorch.h"

#include <mutex>
#include <set>

#include "kernel_pytorch/base/version.h"
#include "kernel_pytorch/c/border.h"
#include "kernel_pytorch/c/call.h"
#include "kernel_pytorch/c/declarations.h"
#include "kernel_pytorch/c/json.h"
#include "kernel_pytorch/c/plans/request.h"
#include "kernel_pytorch/c/report.h"
#include "kernel_pytorch/c/request.h"
#include "kernel_pytorch/c/sample_file.h"
#include "kernel_pytorch/device/cpu/thread_pool.h"
#include "kernel_pytorch/device/cuda/launch_counts.h"
#include "kernel_pytorch/device/workspace.h"
#include "kernel_pytorch/jit/jit.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/tuning/selection.h"
#include "kernel_pytorch/tuning/store.h"

namespace kernel_pytorch::c_interface {
namespace {

// pop_overlay ignores what it does not know; a C caller that pops twice has a bug worth hearing about.
class PushedHandles {
 public:
  void add(int64_t handle) {
    const std::lock_guard lock(mutex_);
    handles_.insert(handle);
  }
  bool remove(int64_t handle) {
    const std::lock_guard lock(mutex_);
    return handles_.erase(handle) > 0;
  }

 private:
  std::mutex mutex_;
  std::set<int64_t> handles_;
};

PushedHandles& pushed_overlays() {
  static PushedHandles* handles = new PushedHandles;
  return *handles;
}

// write_bundle's progress is a plain function; this hands it the caller's state.
struct CompileListener {
  kp_progress progress = nullptr;
  void* state = nullptr;
};
thread_local CompileListener compile_listener;

void report_compiled(const jit::CompiledKernel& kernel, int done, int total) {
  if (compile_listener.progress == nullptr) return;
  const Json json = {{"done", done}, {"total", total}, {"entry", kernel.entry}};
  compile_listener.progress(compile_listener.state, to_text(json).c_str());
}

std::string compile_bundle(const Json& request, kp_progress progress, void* state) {
  FieldReader fields(request, "compile");
  const std::string architecture = fields.required_text("architecture");
  const std::string output = fields.required_text("output");
  const std::string op = fields.text("op", "");
  fields.finish();
  compile_listener = {progress, state};
  const auto compiled =
      jit::write_bundle(device_code_of(matching_operations(op)), architecture, output, &report_compiled);
  return to_text({{"kernels", report_all(compiled)}});
}

std::string tune_problem(const Json& request, kp_progress progress, kp_interrupted interrupted, void* state) {
  FieldReader fields(request, "tune");
  const OperationRequest asked = read_operation(fields);
  tuning::TuneOptions options;
  options.budget_seconds = fields.number("budget_seconds", options.budget_seconds, 0, 1e6);
  fields.finish();
  if (progress != nullptr) {
    options.progress = [&](const tuning::TuneProgress& now) { progress(state, to_text(report(now)).c_str()); };
  }
  if (interrupted != nullptr) options.interrupted = [&] { return interrupted(state) != 0; };
  return to_text(report(asked.operation->tune(asked.problem, options)));
}

}  // namespace
}  // namespace kernel_pytorch::c_interface

using namespace kernel_pytorch;               // NOLINT: the functions below are the border itself
using namespace kernel_pytorch::c_interface;  // NOLINT

const char* kp_version(void) {
  return kVersion.data();
}

const char* kp_last_error(void) {
  return last_error.text;
}

void kp_free(char* text) {
  std::free(text);
}

kp_status kp_devices(char** result) {
  return answered(result, [] { return to_text(report_devices()); });
}

kp_status kp_launches(char** result) {
  return answered(result, [] {
    const cuda_device::LaunchCounts counts = cuda_device::launch_counts();
    return to_text({{"kernels", counts.kernels}, {"fills", counts.fills}});
  });
}

kp_status kp_options(char** result) {
  return answered(result, [] { return to_text(report_options()); });
}

kp_status kp_nvrtc(char** result) {
  return answered(result, [] { return to_text(report(jit::nvrtc_info())); });
}

kp_status kp_set_nvrtc_directories(const char* request) {
  return guarded([&] { jit::set_nvrtc_search_path(read_directories(parsed(request))); });
}

kp_status kp_kernels(const char* request, char** result) {
  return answered(result, [&] {
    const Json json = parsed(request);
    FieldReader fields(json, "kernels");
    const std::string op = fields.text("op", "");
    fields.finish();
    return to_text(report_kernels(matching_operations(op)));
  });
}

kp_status kp_declarations(char** result) {
  return answered(result, [&] { return to_text(report_declarations()); });
}

kp_status kp_context_create(kp_device device, void* stream, kp_context** context) {
  if (context != nullptr) *context = nullptr;
  return guarded([&] {
    KP_CHECK(context != nullptr, "kp_context_create: the context pointer is NULL");
    *context = new kp_context{OwnContext(device_of(device), stream)};
  });
}

void kp_context_destroy(kp_context* context) {
  delete context;
}

kp_status kp_context_set_threads(kp_context* context, const kp_threads* threads) {
  return guarded([&] {
    KP_CHECK(context != nullptr, "kp_context_set_threads: the context is NULL");
    if (threads == nullptr) {
      context->own->threads = &cpu_device::own_threads();
      return;
    }
    KP_CHECK(threads->run != nullptr && threads->count > 0, "kp_context_set_threads: there are ", threads->count,
             " threads", threads->run == nullptr ? " and no function that runs on them" : "", "; give one or more");
    context->threads.set(*threads);
    context->own->threads = &context->threads;
  });
}

kp_status kp_call(kp_context* context, const char* op, const kp_argument* arguments, size_t count) {
  return guarded([&] {
    KP_CHECK(context != nullptr, "kp_call: the context is NULL");
    KP_CHECK(arguments != nullptr || count == 0, "kp_call: the arguments are NULL, but there are ", count);
    call_op(context->own, op, std::span(arguments, count));
  });
}

kp_status kp_call_with_workspace(kp_context* context, const char* op, const kp_argument* arguments, size_t count,
                                 void* workspace, size_t bytes) {
  return guarded([&] {
    KP_CHECK(context != nullptr, "kp_call_with_workspace: the context is NULL");
    KP_CHECK(arguments != nullptr || count == 0, "kp_call_with_workspace: the arguments are NULL, but there are ",
             count);
    Context given = context->own;
    WorkspaceScratch scratch(workspace, bytes, given);
    given.scratch = &scratch;
    call_op(given, op, std::span(arguments, count));
  });
}

kp_status kp_workspace_bytes(kp_device device, const char* op, const kp_argument* arguments, size_t count,
                             size_t* bytes) {
  if (bytes != nullptr) *bytes = 0;
  return guarded([&] {
    KP_CHECK(bytes != nullptr, "kp_workspace_bytes: the result pointer is NULL");
    KP_CHECK(arguments != nullptr || count == 0, "kp_workspace_bytes: the arguments are NULL, but there are ", count);
    *bytes = workspace_bytes(device_of(device), op, std::span(arguments, count));
  });
}

uint64_t kp_selection_generation(void) {
  return tuning::selection_generation();
}

kp_status kp_explain_call(kp_device device, const char* op, const kp_argument* arguments, size_t count, char** result) {
  return answered(result, [&] {
    KP_CHECK(arguments != nullptr || count == 0, "kp_explain_call: the arguments are NULL, but there are ", count);
    Json explanations = Json::array();
    for (const registry::Explanation& one : explain_call(device_of(device), op, std::span(arguments, count))) {
      explanations.push_back(report(one));
    }
    return to_text({{"explanations", explanations}});
  });
}

kp_status kp_explain(const char* request, char** result) {
  return answered(result, [&] {
    const Json json = parsed(request);
    FieldReader fields(json, "explain");
    const OperationRequest asked = read_operation(fields);
    const std::string kernel = fields.text("kernel", "");
    fields.finish();
    return to_text(report(asked.operation->explain(asked.problem, kernel)));
  });
}

kp_status kp_supports(const char* request, char** result) {
  return answered(result, [&] {
    const Json json = parsed(request);
    FieldReader fields(json, "supports");
    const OperationRequest asked = read_operation(fields);
    fields.finish();
    return to_text(Json{{"kernels", report_all(asked.operation->supports(asked.problem))}});
  });
}

kp_status kp_float8_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_float8_plan(parsed(request))); });
}

kp_status kp_bucket_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_bucket_plan(parsed(request))); });
}

kp_status kp_graph_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_graph_plan(parsed(request))); });
}

kp_status kp_memory_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_memory_plan(parsed(request))); });
}
kp_status kp_activation_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_activation_plan(parsed(request))); });
}
kp_status kp_context_parallel_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_context_parallel_plan(parsed(request))); });
}

kp_status kp_batch_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_batch_plan(parsed(request))); });
}
kp_status kp_precision_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_precision_plan(parsed(request))); });
}

kp_status kp_offload_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_offload_plan(parsed(request))); });
}

kp_status kp_model_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_model_plan(parsed(request))); });
}

kp_status kp_tuning_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_tuning_plan(parsed(request))); });
}

kp_status kp_budget_plan(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_budget_plan(parsed(request))); });
}

kp_status kp_part_verdict(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_part_verdict(parsed(request))); });
}

kp_status kp_whole_verdict(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_whole_verdict(parsed(request))); });
}

kp_status kp_verify(const char* request, char** result) {
  return answered(result, [&] {
    const Json json = parsed(request);
    FieldReader fields(json, "verify");
    const OperationRequest asked = read_operation(fields);
    fields.finish();
    return to_text({{"failures", asked.operation->verify(asked.problem)}});
  });
}

kp_status kp_bench(const char* request, char** result) {
  return answered(result, [&] {
    const Json json = parsed(request);
    FieldReader fields(json, "bench");
    const OperationRequest asked = read_operation(fields);
    const bool every_kernel = fields.boolean("every_kernel", false);
    const double seconds = fields.number("seconds", 0.2, 0, 3600);
    fields.finish();
    return to_text(report(asked.operation->bench(asked.problem, every_kernel, seconds)));
  });
}

kp_status kp_compare(const char* request, char** result) {
  return answered(result, [&] { return to_text(answer_compare(request == nullptr ? "" : request)); });
}

kp_status kp_tune(const char* request, kp_progress progress, kp_interrupted interrupted, void* state, char** result) {
  return answered(result, [&] { return tune_problem(parsed(request), progress, interrupted, state); });
}

kp_status kp_overlay_push(const char* request, int64_t* handle) {
  if (handle != nullptr) *handle = 0;
  return guarded([&] {
    KP_CHECK(handle != nullptr, "kp_overlay_push: the handle pointer is NULL");
    *handle = tuning::push_overlay(read_overlay(parsed(request)));
    pushed_overlays().add(*handle);
  });
}

kp_status kp_overlay_pop(int64_t handle) {
  return guarded([&] {
    KP_CHECK(pushed_overlays().remove(handle), "kp_overlay_pop: no overlay has the handle ", handle);
    tuning::pop_overlay(handle);
  });
}

kp_status kp_autotune_push(const char* request, kp_progress progress, kp_interrupted interrupted, void* state,
                           int64_t* handle) {
  if (handle != nullptr) *handle = 0;
  return guarded([&] {
    KP_CHECK(handle != nullptr, "kp_autotune_push: the handle pointer is NULL");
    tuning::ScopeOptions options = read_autotune(parsed(request));
    if (progress != nullptr) {
      options.progress = [=](const tuning::ScopeProgress& now) { progress(state, to_text(report(now)).c_str()); };
    }
    if (interrupted != nullptr) options.interrupted = [=] { return interrupted(state) != 0; };
    *handle = tuning::push_autotune(std::move(options));
  });
}

kp_status kp_autotune_pop(int64_t handle, char** result) {
  return answered(result, [&] { return to_text(report(tuning::pop_autotune(handle))); });
}

kp_status kp_set_recording(int on) {
  return guarded([&] { tuning::set_recording(on != 0); });
}

kp_status kp_recorded(char** result) {
  return answered(result, [] { return to_text(report_recorded()); });
}

kp_status kp_cache_info(char** result) {
  return answered(result, [] { return to_text(report_cache_info()); });
}

kp_status kp_cache_list(char** result) {
  return answered(result, [] { return to_text(report_cache_list()); });
}

kp_status kp_cache_export(char** result) {
  return answered(result, [] { return tuning::export_store(); });
}

kp_status kp_cache_import(const char* text, size_t bytes, int64_t* rows_written) {
  if (rows_written != nullptr) *rows_written = 0;
  return guarded([&] {
    KP_CHECK(text != nullptr && rows_written != nullptr, "kp_cache_import: a pointer is NULL");
    *rows_written = tuning::import_store({text, bytes}, operation_names());
  });
}

kp_status kp_cache_verify(char** result) {
  return answered(result, [] { return to_text(report_cache_problems()); });
}

kp_status kp_cache_clear(const char* request, char** result) {
  return answered(result, [&] {
    const ClearRequest clear = read_clear(parsed(request));
    const int64_t rows = clear.store ? tuning::clear_store(clear.op) : 0;
    const int64_t files = clear.cubins ? jit::clear_cubin_cache() : 0;
    return to_text({{"rows_removed", rows}, {"files_removed", files}});
  });
}

kp_status kp_compile(const char* request, kp_progress progress, void* state, char** result) {
  return answered(result, [&] { return compile_bundle(parsed(request), progress, state); });
}
