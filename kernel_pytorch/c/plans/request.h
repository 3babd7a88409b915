// Plans about models by JSON: FP8 layers, buckets, graphs, memory, activations, batches, offloaded states,
// replacements, tuning, and what `optimize` decides by its timings. Reads a request, asks kernel_pytorch/plan, answers.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/c/json.h"

namespace kernel_pytorch::c_interface {

KP_EXPORT Json answer_float8_plan(const Json& request);
KP_EXPORT Json answer_bucket_plan(const Json& request);
KP_EXPORT Json answer_graph_plan(const Json& request);
KP_EXPORT Json answer_memory_plan(const Json& request);
KP_EXPORT Json answer_activation_plan(const Json& request);
KP_EXPORT Json answer_batch_plan(const Json& request);
KP_EXPORT Json answer_offload_plan(const Json& request);
KP_EXPORT Json answer_precision_plan(const Json& request);
KP_EXPORT Json answer_context_parallel_plan(const Json& request);
KP_EXPORT Json answer_model_plan(const Json& request);
KP_EXPORT Json answer_tuning_plan(const Json& request);
KP_EXPORT Json answer_budget_plan(const Json& request);
KP_EXPORT Json answer_part_verdict(const Json& request);
KP_EXPORT Json answer_whole_verdict(const Json& request);

}  // namespace kernel_pytorch::c_interface
