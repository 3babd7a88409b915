/* The C interface of KernelPyTorch: what ctypes and other languages call. Ops on tensors, devices, kernels,
 * explanations, tuning, caches.
 *
 * Ops take tensors and options by name (kp_call). Everything else speaks JSON: requests and results are UTF-8. A
 * request is at most 1 MiB and 32 levels deep; a field that is not known is an error that names the known ones. NULL
 * where a request may be absent stands for {}.
 *
 * Every call that can fail returns a kp_status. When it is not KP_OK, kp_last_error() has one line for a person,
 * outputs are set to NULL or 0, and nothing needs to be freed. No C++ exception crosses this header.
 *
 * Ownership: a char* written to an output belongs to the caller, who hands it to kp_free(). A const char* returned by
 * kp_version() and kp_last_error() belongs to the library; so does the text that a callback gets, for that call alone.
 *
 * Threads: every function may be called from any thread at any time. kp_last_error() is the calling thread's own.
 * Overlays, autotuning and recording hold for the whole process. Callbacks run on the thread that made the call and
 * must not unwind (throw, longjmp) through the library.
 */
#ifndef KERNEL_PYTORCH_C_KERNEL_PYTORCH_H
#define KERNEL_PYTORCH_C_KERNEL_PYTORCH_H

#include <stddef.h>
#include <stdint.h>

#define KP_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kp_status {
  KP_OK = 0,
  KP_INVALID_ARGUMENT = 1, /* the caller can change an argument */
  KP_UNSUPPORTED = 2,      /* no kernel for this on this device */
  KP_DEVICE = 3,           /* a driver, compiler or memory failure */
  KP_INTERNAL = 4          /* a bug in the library */
} kp_status;

KP_API const char* kp_version(void); /* "0.5.0"; never NULL */
KP_API const char* kp_last_error(
    void);                       /* of this thread's latest failure, "" before the first; valid until its next call */
KP_API void kp_free(char* text); /* what an output gave; NULL is fine */

/* ---- what is there ---- */

/* {"devices": [{"device": "cpu", "name", "memory_bytes", "fingerprint", "cpu": {...}} or {"device": "cuda:0", ...,
 * "cuda": {...}}], "cuda_absence": "" or why there is no CUDA device} */
KP_API kp_status kp_devices(char** result);

/* {"kernels", "fills"}: CUDA kernels that this process has launched through this library so far, and driver calls that
 * filled memory for them. What a CUDA graph captures is counted once, at its capture. */
KP_API kp_status kp_launches(char** result);

/* {"options": [{"variable", "value", "from_environment", "meaning"}]} */
KP_API kp_status kp_options(char** result);

/* {"found", "version", "path", "how", "absence"} of NVRTC; looks for it. */
KP_API kp_status kp_nvrtc(char** result);

/* Folders in which to look for libnvrtc, before the system's: {"directories": ["..."]}. For front ends that know where
 * their packages keep it. Later calls replace earlier ones; after NVRTC was loaded it changes nothing. */
KP_API kp_status kp_set_nvrtc_directories(const char* request);

/* Request: {"op": NAME} or NULL for all; "rms_norm" stands for rms_norm_forward and rms_norm_backward.
 * {"operations": [{"op", "kernels": ["name", ...] in order, best first}]} */
KP_API kp_status kp_kernels(const char* request, char** result);

/* The ops of the front ends. {"declarations": [{"name", "schema" (torch's), "leading" (the argument whose sizes lead),
 * "arguments": [{"name", "kind": "tensor", "tensors", "number", "integer", "flag", "text", "choice", "wanted" (a flag
 * that asks for an output) or "type" (of an output), "optional", "updated" (in place), "shape": ["...", "columns", 2],
 * "choices", "from"}], "outputs": [{"name", "saved" (for the backward alone), "shape", "dtype" (a type, or the argument
 * that has it), "fixed_dtype", "statistic" (fp32, or fp64 for fp64), "dtype_option", "when", "wanted"}]}]} */
KP_API kp_status kp_declarations(char** result);

/* ---- ops on tensors ---- */

typedef enum kp_dtype {
  KP_FLOAT32 = 0,
  KP_FLOAT64 = 1,
  KP_BFLOAT16 = 2,
  KP_FLOAT16 = 3,
  KP_FLOAT8_E4M3 = 4,
  KP_FLOAT8_E5M2 = 5,
  KP_INT8 = 6,
  KP_INT32 = 7,
  KP_INT64 = 8,
  KP_BOOL = 9
} kp_dtype;

typedef enum kp_device_kind { KP_CPU = 0, KP_CUDA = 1 } kp_device_kind;

typedef struct kp_device {
  int32_t kind;  /* kp_device_kind */
  int32_t index; /* of a GPU, as CUDA counts them; 0 for the CPU */
} kp_device;

/* Memory that the caller owns, for the length of the call; on a GPU until its stream has come by. */
typedef struct kp_tensor {
  void* data;
  int32_t dtype; /* kp_dtype */
  kp_device device;
  int32_t rank; /* at most 8 */
  const int64_t* sizes;
  const int64_t* strides; /* in elements; NULL: row-major */
} kp_tensor;

typedef enum kp_kind {
  KP_TENSOR = 0,  /* value.tensors, one of them */
  KP_TENSORS = 1, /* value.tensors, `count` of them */
  KP_NUMBER = 2,
  KP_INTEGER = 3, /* also where a number or a flag is meant */
  KP_FLAG = 4,    /* value.integer, 0 or 1 */
  KP_TEXT = 5     /* value.text: a text, or the name of a choice */
} kp_kind;

typedef struct kp_argument {
  const char* name;
  int32_t kind; /* kp_kind */
  size_t count; /* of KP_TENSORS */
  union {
    const kp_tensor* tensors;
    double number;
    int64_t integer;
    const char* text;
  } value;
} kp_argument;

/* A device, a stream, and memory that is kept from call to call. For one thread at a time; others have their own. The
 * stream is a CUstream (cudaStream_t) that outlives the context; NULL is the default stream, and all that the CPU has.
 */
typedef struct kp_context kp_context;
KP_API kp_status kp_context_create(kp_device device, void* stream, kp_context** context);
KP_API void kp_context_destroy(kp_context* context); /* NULL is fine */

/* A caller's threads. `run` calls work(work_state, worker) once for each worker from 0 to `workers` - 1, of which there
 * are at most `count`, possibly one after another on fewer threads, and returns when all are done. */
typedef struct kp_threads {
  int32_t count;
  void (*run)(void* state, int32_t workers, void (*work)(void* work_state, int worker), void* work_state);
  void* state;
} kp_threads;
/* CPU kernels of this context run on these threads from now on; NULL: on the library's own, which is how a context
 * begins. What it points to outlives the calls. */
KP_API kp_status kp_context_set_threads(kp_context* context, const kp_threads* threads);

/* Computes an op: "rms_norm", or any other that kp_declarations lists, with its arguments by name in any order. Inputs
 * and outputs are tensors on the context's device. Inputs that may be absent, lists next to other lists (which are then
 * empty) and options (which then have the op's defaults) may be left out. Outputs are given by the caller, of the sizes
 * and types that kp_declarations says; those that are wanted, depend on an absent input or are only for the backward
 * are computed where they are given. On a GPU the call returns before the work is done. What is refused names the op,
 * the argument and the cure, and nothing was written. Every op also takes the text "kernel": "name" or "name config",
 * the kernel that this call has to use (kp_explain lists them). */
KP_API kp_status kp_call(kp_context* context, const char* op, const kp_argument* arguments, size_t count);

/* kp_call whose scratch memory is the caller's: `bytes` bytes on the context's device, as long-lived as the tensors.
 * For calls that a CUDA graph captures: the context's own memory goes on to the next call, which a replay of the graph
 * would disturb. What it lacks is taken from the context, or, in a capture, allocated for good, with a warning. */
KP_API kp_status kp_call_with_workspace(kp_context* context, const char* op, const kp_argument* arguments, size_t count,
                                        void* workspace, size_t bytes);

/* Bytes of workspace for such a call on this device; 0 on the CPU, whose kernels use the context's memory. The op's
 * checks are passed, its kernels are chosen, compiled and loaded, and nothing is computed: tensors' data may be NULL.
 * It holds while kp_selection_generation does: a kernel that is tuned between this and the call may take more. */
KP_API kp_status kp_workspace_bytes(kp_device device, const char* op, const kp_argument* arguments, size_t count,
                                    size_t* bytes);

/* Grows with everything that may change which kernel a call takes (measurements, overlays, tuning): what was asked
 * about a call, its workspace for one, holds while this number stands. */
KP_API uint64_t kp_selection_generation(void);

/* Which kernels such a call takes and why, as kp_explain says it: {"explanations": [...]} in the order in which the op
 * chooses them. Nothing is computed or measured: tensors' data may be NULL. */
KP_API kp_status kp_explain_call(kp_device device, const char* op, const kp_argument* arguments, size_t count,
                                 char** result);

static inline kp_argument kp_tensors_argument(const char* name, const kp_tensor* tensors, size_t count) {
  kp_argument argument;
  argument.name = name;
  argument.kind = KP_TENSORS;
  argument.count = count;
  argument.value.tensors = tensors;
  return argument;
}
static inline kp_argument kp_tensor_argument(const char* name, const kp_tensor* tensor) {
  kp_argument argument = kp_tensors_argument(name, tensor, 1);
  argument.kind = KP_TENSOR;
  return argument;
}
static inline kp_argument kp_integer_argument(const char* name, int64_t value) {
  kp_argument argument = kp_tensors_argument(name, NULL, 0);
  argument.kind = KP_INTEGER;
  argument.value.integer = value;
  return argument;
}
static inline kp_argument kp_flag_argument(const char* name, int value) {
  kp_argument argument = kp_integer_argument(name, value != 0);
  argument.kind = KP_FLAG;
  return argument;
}
static inline kp_argument kp_number_argument(const char* name, double value) {
  kp_argument argument = kp_tensors_argument(name, NULL, 0);
  argument.kind = KP_NUMBER;
  argument.value.number = value;
  return argument;
}
static inline kp_argument kp_text_argument(const char* name, const char* value) {
  kp_argument argument = kp_tensors_argument(name, NULL, 0);
  argument.kind = KP_TEXT;
  argument.value.text = value;
  return argument;
}

#ifndef __cplusplus
/* KP_CALL(context, "rms_norm", kp_tensor_argument("x", &x), kp_tensor_argument("output", &output)) */
#define KP_CALL(context, op, ...)                              \
  kp_call((context), (op), (const kp_argument[]){__VA_ARGS__}, \
          sizeof((const kp_argument[]){__VA_ARGS__}) / sizeof(kp_argument))
#endif

/* ---- one problem ----
 * A problem is {"op": "rms_norm_forward", "shape": [1024, 4096], "dtype": "bf16", "device": "cuda:0",
 * "options": {"residual": 1}}; device defaults to "cpu", dtype to "fp32", options to {}. Functions add fields to it. */

/* Adds "kernel": "name" or "name config", as for one call. {"op", "device", "key", "candidates": [{"kernel", "origin",
 * "supported", "reason", "fallback", "configs", "heuristic_config"}], "kernel", "config", "tier", "measured_us",
 * "parts": of an op that is composed of others their explanations, in the order of their calls} */
KP_API kp_status kp_explain(const char* request, char** result);

/* Which kernels would run a problem on its device, in the order in which they are asked: {"kernels": [{"kernel",
 * "origin", "supported", "reason": why not, "fallback": it takes what faster kernels do not, so that a caller who has a
 * vendor's kernel had better use that}]}. A problem that the op itself refuses is an error, with the op's message. */
KP_API kp_status kp_supports(const char* request, char** result);

/* Whether a linear layer can be trained in FP8 ("runs"), and is worth it ("pays"). {"tokens": 8192, "in_features",
 * "out_features", "device": "cuda:0", "recipe": "delayed" (usual), "current", "rowwise" or "blockwise"} -> {"runs",
 * "pays", "bf16_us", "float8_us", "kernel", "reason"} */
KP_API kp_status kp_float8_plan(const char* request, char** result);

/* Which lengths to pad to. {"lengths": [...], "counts": [...] (1 each), "strategy": "optimal", "memory_optimal",
 * "hardware_aware", "adaptive", "geometric" or "linear", "max_buckets": 32, "alignment": 1, "longest": 0, "cost":
 * {"floor", "linear", "quadratic", "bucket"}, "current": [...] in use, "least_gain": 0.05, "device": "cpu"} ->
 * {"buckets", "cost", "unpadded_cost", "padding_overhead", "current_cost", "changes", "reason"} */
KP_API kp_status kp_bucket_plan(const char* request, char** result);

/* Whether a CUDA graph pays for a module at one shape. {"device": "cuda:0", "eager_us", "device_us", "launches",
 * "copies", "copy_bytes", "capture_us", "calls", "least_gain"} -> {"pays", "graph_us", "break_even_calls" (null:
 * never), "reason"} */
KP_API kp_status kp_graph_plan(const char* request, char** result);

/* The peak of allocations and releases in order. {"bytes": [...] (below 0: given back), "kinds": [...] (0 parameters,
 * 1 gradients, 2 optimizer, 3 inputs, 4 activations)} -> {"peak_bytes", "at_peak": {kind: bytes}, "left_bytes"} */
KP_API kp_status kp_memory_plan(const char* request, char** result);

/* Which tensors of a training step to keep for backward, to make again or to move to the host under a budget of its
 * peak (plan/activation_plan.h says what the numbers are). {"kinds": [{"activations": [{"bytes", "op": -1, "dies",
 * "recompute_us", "can_recompute": false, "can_move": false, "inputs": [...], "reads": [...]}], "forward_us",
 * "backward_us", "forward_bytes": [...], "backward_at": [...], "backward_greatest": [...]}], "chain": [{"kind",
 * "forward_start", "backward_start"}], "between", "outside", "budget_bytes", "to_host", "to_device" (bytes per second),
 * "step_us"} -> {"fits", "is_exact", "peak_bytes", "step_us", "recompute_us", "stall_us", "kept_bytes", "moved_bytes",
 * "least_bytes", "everything_bytes", "reason", "blocks": [{"treatments": ["none", "keep", "move" or "recompute"],
 * "held_bytes", "moved_bytes", "recompute_us"}]} */
KP_API kp_status kp_activation_plan(const char* request, char** result);

/* The batch to take, from the peaks of two. {"first_batch", "second_batch", "first_bytes", "second_bytes",
 * "capacity_bytes", "reserve": 0.1, "fixed_us", "sample_us"} -> {"batch", "fits", "reason"} */
KP_API kp_status kp_batch_plan(const char* request, char** result);

/* How CPU and device share a step of an optimizer whose states are in the host's memory. {"elements",
 * "subgroup_elements", "device_share": -1 (chosen), "rates": {"up", "down", "host_memory" (bytes), "cpu", "device"
 * (elements)} (by the second), "on_device": {"up", "down", "host_memory"}, "on_cpu": {...} (bytes per element)} ->
 * {"subgroups", "on_device", "bound_seconds", "bound_share", "predicted_seconds", "limit", "reason"} */
KP_API kp_status kp_offload_plan(const char* request, char** result);

/* One format for each layer, so that the sum of errors is least within a budget of bytes (plan/precision_plan.h).
 * {"layers": [{"bytes": [...], "errors": [...]}, ...], "budget_bytes"} -> {"fits", "is_exact", "choices": [an index for
 * each layer], "bytes", "error", "least_bytes", "reason"} */
KP_API kp_status kp_precision_plan(const char* request, char** result);

/* How the members of a group share attention of one sequence. {"members", "batch": 1, "sequence", "heads", "key_heads",
 * "size", "value_size", "element_bytes": 2, "causal": false, "backward": false, "window": -1, "flops_per_second",
 * "link_bytes_per_second", "memory_bytes_per_second", "message_us", "free_bytes": 0 (not known)} -> {"schedule":
 * "ring", "zigzag", "allgather" or "ulysses", "reason", "schedules": [{"schedule", "us", "work_us", "exposed_us",
 * "merge_us", "sent_bytes", "memory_bytes", "obstacle"}]} */
KP_API kp_status kp_context_parallel_plan(const char* request, char** result);

/* Which parts of a model are worth replacing. {"sites": [{"path", "pattern", "kind": 0 (equal numbers share a
 * measurement), "before": {"bytes", "flops", "launches"}, "after": {...}, "pointwise": false, "approximate": false}],
 * "copy_bytes_per_second", "matmul_flops_per_second", "is_cuda": false, "tolerant": false, "compiled": false,
 * "budget_seconds": 60} -> {"decisions": [{"site" (its index), "tries", "only_as_a_whole", "before_us", "after_us",
 * "measure_seconds", "reason"}], "notes"} */
KP_API kp_status kp_model_plan(const char* request, char** result);

/* Which problems of a model's step are worth tuning, and for how long. {"problems": [{"op", "problem", "calls": 1,
 * "candidates", "bytes", "flops", "decided": false (by hand or by a measurement)}], "step_us", "copy_bytes_per_second",
 * "matmul_flops_per_second", "is_cuda": false, "budget_seconds"} -> {"decisions": [{"problem" (its index), "tunes",
 * "listed" (worth a word in a report), "share" (of the step, predicted), "seconds", "reason"}]} */
KP_API kp_status kp_tuning_plan(const char* request, char** result);

/* How the seconds of one `optimize` are shared. {"seconds", "step_seconds" (of one run of the model), "passed_seconds":
 * 0}
 * -> {"is_too_small", "final_runs" and "final_seconds" (kept back for the end), "enough_seconds", "stages": {name:
 * {"until_seconds" (nothing of the stage starts later), "measure_seconds" (of a measurement that starts now)}}} */
KP_API kp_status kp_budget_plan(const char* request, char** result);

/* Which way of replacing a part stays. A timing is {"median_us", "low_us", "high_us"} (quartiles); "sure_gain" is what
 * turns side by side leave no doubt of. {"ways": [{"clocks": [{"before": timing, "after": timing, "sure_gain": 0}] (the
 * one that decides first, that of calls last; [] where the way is wrong)}], "predicted_us": 0 (that it saves)}
 * -> {"way" (-1: none), "maybe" (-1: none), "costs_calls"} */
KP_API kp_status kp_part_verdict(const char* request, char** result);

/* Whether a change of the whole model is worth keeping. {"before": timing, "after": timing, "sure_gain": 0,
 * "expected_us": 0 (that tuned problems save by themselves)} -> {"pays", "is_faster", "confirms_tuning"} */
KP_API kp_status kp_whole_verdict(const char* request, char** result);

/* Runs every supported kernel and config against the reference. {"failures": ["..."]}, empty when all are right. */
KP_API kp_status kp_verify(const char* request, char** result);

/* Adds "every_kernel": false, "seconds": 0.2 for each row. {"op", "device", "cost": {"bytes", "flops"}, "copy_us",
 * "rows": [{"kernel", "config", "tier", "median_us", "spread_us", "gigabytes_per_second", "roof_share",
 * "launches", "fills"}]}; the last two are of one run on a GPU, as kp_launches counts them. */
KP_API kp_status kp_bench(const char* request, char** result);

/* Whether timings changed, by the Mann-Whitney test on interleaved samples. {"before": FILE, "after": FILE,
 * "threshold": 0.05 (smaller changes are none), "significance": 0.01 (of all series together)}; FILE is what `kpt bench
 * --save` writes:
 * {"format": "kernel_pytorch samples", "version": 1, "runs": [{"date", "device", "fingerprint", "library_version",
 * "series": [{"name", "kernel", "samples_us": [...], "control_us": [...] or []}]}]}. At most 128 MiB.
 * {"rows": [{"name", "kernel", "change": "none", "faster", "slower", "machine" (the control changed as much) or "too
 * few samples", "before_us", "after_us", "ratio", "control_ratio", "p", "exact"}], "slower": how many, "only_before":
 * [names], "only_after": [names]} */
KP_API kp_status kp_compare(const char* request, char** result);

/* {"done", "total", "candidate", "candidate_us", "best", "best_us"} after each candidate. */
typedef void (*kp_progress)(void* state, const char* progress);
/* Asked often while work goes on; not 0: stop and keep what was measured. */
typedef int (*kp_interrupted)(void* state);

/* Adds "budget_seconds": 10. Measures and remembers the winner. Either callback may be NULL; both get `state`.
 * {"key", "rows": [{"kernel", "config", "median_us", "spread_us", "failure", "samples"}], "complete",
 * "seconds"} */
KP_API kp_status kp_tune(const char* request, kp_progress progress, kp_interrupted interrupted, void* state,
                         char** result);

/* ---- choices of this process ---- */

/* {"entries": [{"op", "kernel", "config": "", "problem": "", "device": ""}]}; an empty config is the kernel's own
 * heuristic, an empty problem is every problem, an empty device (a fingerprint) every device. Later pushes win; pops
 * may come in any order. Popping an unknown handle is an error. */
KP_API kp_status kp_overlay_push(const char* request, int64_t* handle);
KP_API kp_status kp_overlay_pop(int64_t handle);

/* While pushed, a problem seen for the first time is tuned at its call. Of several scopes the newest is in charge; pops
 * may come in any order, and popping an unknown handle is an error.
 * {"budget_seconds": of all problems (absent: no limit), "problem_seconds": 10 of one, "only": [{"op", "problem": text
 * of the key, "seconds"}] (absent: every problem), "remembers": true (false: calls go on as they would have, and what
 * was found is in the answer of pop alone)}. Progress, on the thread that tunes, one at a time and not after pop: that
 * of kp_tune with {"op", "problem", "problems_done", "seconds", "budget_seconds" (null: no limit)}. Once interrupted
 * the scope tunes no more. */
KP_API kp_status kp_autotune_push(const char* request, kp_progress progress, kp_interrupted interrupted, void* state,
                                  int64_t* handle);
/* {"tuned": [{"key", "before": ROW (what would run untuned), "after": ROW (the fastest), "gains" (beyond the spread of
 * both), "candidates", "measured", "complete", "seconds"}], "untuned": [{"key", "reason"}], "seconds"}; rows are those
 * of kp_tune. */
KP_API kp_status kp_autotune_pop(int64_t handle, char** result);

/* Not 0: clears what was recorded and starts; 0 stops. */
KP_API kp_status kp_set_recording(int on);
/* {"recording", "decisions": [{"key", "kernel", "config", "tier", "candidates" (that tuning would measure), "bytes",
 * "flops" (of one call), "count"}]}, newest last. */
KP_API kp_status kp_recorded(char** result);

/* ---- what is kept on disk ---- */

/* {"store": {"path", "state", "schema_version", "rows"}, "cubins": {"directory", "writable", "files", "bytes"}} */
KP_API kp_status kp_cache_info(char** result);
/* {"measurements": [{"key", "kernel", "config", "median_us", "spread_us", "date", "library_version"}]} */
KP_API kp_status kp_cache_list(char** result);
/* The store as the text that kp_cache_import takes. */
KP_API kp_status kp_cache_export(char** result);
/* All or nothing: everything is validated before anything is written. At most 64 MiB. */
KP_API kp_status kp_cache_import(const char* text, size_t bytes, int64_t* rows_written);
/* {"store": ["problem", ...], "cubins": [{"file", "problem"}]}: only what is damaged is listed. */
KP_API kp_status kp_cache_verify(char** result);
/* Request: {"store": true, "cubins": true, "op": ""}; an op limits the store's part and leaves the cubins alone unless
 * they are named. {"rows_removed", "files_removed"} */
KP_API kp_status kp_cache_clear(const char* request, char** result);

/* ---- ahead of time ---- */

/* Compiles every CUDA kernel ("op" limits it) for one architecture into a folder that KERNEL_PYTORCH_BUNDLE can name:
 * {"architecture": "sm_90a", "output": "DIR", "op": ""}. Needs NVRTC, not a GPU.
 * {"kernels": [{"entry", "registers", "spill_bytes", "private_bytes", "warnings", "seconds", "bytes", "log"}]}.
 * Progress: {"done", "total", "entry"}. */
KP_API kp_status kp_compile(const char* request, kp_progress progress, void* state, char** result);

#ifdef __cplusplus
}
#endif

#endif
