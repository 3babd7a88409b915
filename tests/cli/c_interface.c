/* The C interface from C: every function once as meant, and the ways to misuse it that must be refused and not crash.
 * Compiled as C11 and run by test_c_interface.py; prints what failed, returns 1 if anything did. */
#include <stdio.h>
#include <string.h>

#include "kernel_pytorch/c/kernel_pytorch.h"
#include "kernel_pytorch/c/pages.h"

static int failures = 0;

static void expect(int condition, const char* what, int line) {
  if (condition) return;
  fprintf(stderr, "line %d: %s (last error: %s)\n", line, what, kp_last_error());
  ++failures;
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

/* The result of a call that must succeed has the word in it. */
static void expect_answer(kp_status status, char* result, const char* word, int line) {
  expect(status == KP_OK, "the call succeeds", line);
  expect(result != NULL && strstr(result, word) != NULL, word, line);
  kp_free(result);
}
#define EXPECT_ANSWER(call, word)                  \
  do {                                             \
    char* result = NULL;                           \
    const kp_status status = (call);               \
    expect_answer(status, result, word, __LINE__); \
  } while (0)

/* A call that must fail leaves the output NULL and its reason behind. */
#define EXPECT_REFUSED(call, wanted_status, word)    \
  do {                                               \
    char* result = (char*)"untouched";               \
    EXPECT((call) == (wanted_status));               \
    EXPECT(result == NULL);                          \
    EXPECT(strstr(kp_last_error(), (word)) != NULL); \
  } while (0)

static const char kProblem[] = "{\"op\": \"rms_norm_forward\", \"shape\": [16, 256], \"dtype\": \"fp32\"}";

static void count_progress(void* state, const char* progress) {
  EXPECT(strstr(progress, "\"best_us\"") != NULL);
  ++*(int*)state;
}
static int never(void* state) {
  (void)state;
  return 0;
}
static int at_once(void* state) {
  (void)state;
  return 1;
}

static void test_what_is_there(void) {
  EXPECT(strcmp(kp_last_error(), "") == 0);
  EXPECT(strchr(kp_version(), '.') != NULL);
  kp_free(NULL);
  EXPECT_ANSWER(kp_devices(&result), "\"cpu\"");
  EXPECT_ANSWER(kp_launches(&result), "{\"kernels\":0,\"fills\":0}");
  EXPECT_ANSWER(kp_options(&result), "KERNEL_PYTORCH_CACHE_DIR");
  EXPECT_ANSWER(kp_nvrtc(&result), "\"found\"");
  EXPECT_ANSWER(kp_kernels(NULL, &result), "layer_norm_backward");
  EXPECT_ANSWER(kp_kernels("", &result), "layer_norm_backward");
  EXPECT_ANSWER(kp_kernels("{\"op\": \"rms_norm\"}", &result), "rms_norm_backward");
  EXPECT(kp_set_nvrtc_directories("{\"directories\": []}") == KP_OK);
  EXPECT(kp_set_nvrtc_directories("{\"directories\": [3]}") == KP_INVALID_ARGUMENT);
  EXPECT(kp_set_nvrtc_directories("{\"directories\": [\"a:b\"]}") == KP_INVALID_ARGUMENT);
}

static void test_problems(void) {
  EXPECT_ANSWER(kp_explain(kProblem, &result), "\"tier\":\"heuristic\"");
  EXPECT_ANSWER(kp_verify(kProblem, &result), "\"failures\":[]");
  EXPECT_ANSWER(kp_bench("{\"op\": \"rms_norm_forward\", \"shape\": [16, 256], \"seconds\": 0.01}", &result),
                "\"copy_us\"");
  EXPECT_ANSWER(
      kp_compare("{\"before\": {\"format\": \"kernel_pytorch samples\", \"version\": 1, \"runs\": [{\"series\":"
                 " [{\"name\": \"a\", \"samples_us\": [1, 2]}]}]}, \"after\": {\"format\": \"kernel_pytorch "
                 "samples\", \"version\": 1, \"runs\": [{\"series\": [{\"name\": \"a\", \"samples_us\": [1, "
                 "2]}]}]}}",
                 &result),
      "\"too few samples\"");
}

static void test_tuning(void) {
  int calls = 0;
  EXPECT_ANSWER(kp_tune(kProblem, count_progress, never, &calls, &result), "\"complete\":true");
  EXPECT(calls > 0);
  EXPECT_ANSWER(kp_tune(kProblem, NULL, at_once, NULL, &result), "\"complete\":false");
  EXPECT_ANSWER(kp_explain(kProblem, &result), "\"tier\":\"memory\"");
  EXPECT_ANSWER(kp_cache_info(&result), "\"rows\":1");
  EXPECT_ANSWER(kp_cache_list(&result), "rms_norm_forward");
  EXPECT_ANSWER(kp_cache_verify(&result), "\"store\":[]");

  char* exported = NULL;
  int64_t rows = -1;
  EXPECT(kp_cache_export(&exported) == KP_OK);
  EXPECT_ANSWER(kp_cache_clear(NULL, &result), "\"rows_removed\":1");
  EXPECT(exported != NULL && kp_cache_import(exported, strlen(exported), &rows) == KP_OK);
  EXPECT(rows == 1);
  kp_free(exported);
  EXPECT(kp_cache_import("{", 1, &rows) == KP_INVALID_ARGUMENT && rows == 0);
  EXPECT(kp_cache_import(NULL, 0, &rows) == KP_INVALID_ARGUMENT);
  EXPECT_ANSWER(kp_cache_clear("{\"op\": \"rms_norm_forward\"}", &result), "\"rows_removed\":1");
}

static void test_choices(void) {
  int64_t first = 0, second = 0;
  EXPECT(kp_overlay_push("{\"entries\": [{\"op\": \"rms_norm_forward\", \"kernel\": \"reference\"}]}", &first) ==
         KP_OK);
  EXPECT(kp_overlay_push("{\"entries\": []}", &second) == KP_OK);
  EXPECT_ANSWER(kp_explain(kProblem, &result), "\"tier\":\"overlay\"");
  EXPECT(kp_overlay_pop(first) == KP_OK);
  EXPECT(kp_overlay_pop(second) == KP_OK);
  EXPECT(kp_overlay_pop(first) == KP_INVALID_ARGUMENT);
  EXPECT(kp_overlay_push("{\"entries\": [{\"op\": \"rms_norm_forward\", \"kernel\": \"none\"}]}", &first) ==
         KP_INVALID_ARGUMENT);
  EXPECT(strstr(kp_last_error(), "reference") != NULL);
  EXPECT(kp_overlay_push("{\"entries\": []}", NULL) == KP_INVALID_ARGUMENT);
  EXPECT(kp_autotune_push(NULL, NULL, NULL, NULL, &first) == KP_OK);
  EXPECT(kp_autotune_push("{\"budget_seconds\": 1, \"remembers\": false}", NULL, NULL, NULL, &second) == KP_OK);
  EXPECT_ANSWER(kp_autotune_pop(first, &result), "\"untuned\":[]");
  EXPECT_ANSWER(kp_autotune_pop(second, &result), "\"tuned\":[]");
  EXPECT_REFUSED(kp_autotune_pop(second, &result), KP_INVALID_ARGUMENT, "handle");
  EXPECT(kp_autotune_push("{\"budget_seconds\": -1}", NULL, NULL, NULL, &first) == KP_INVALID_ARGUMENT && first == 0);
  EXPECT(kp_autotune_push(NULL, NULL, NULL, NULL, NULL) == KP_INVALID_ARGUMENT);
  EXPECT(kp_set_recording(1) == KP_OK);
  EXPECT_ANSWER(kp_recorded(&result), "\"recording\":true");
  EXPECT(kp_set_recording(0) == KP_OK);
  EXPECT_ANSWER(kp_recorded(&result), "\"recording\":false");
}

static void test_refusals(void) {
  EXPECT(kp_devices(NULL) == KP_INVALID_ARGUMENT);
  EXPECT(kp_launches(NULL) == KP_INVALID_ARGUMENT);
  EXPECT_ANSWER(kp_float8_plan("{\"in_features\": 64, \"out_features\": 64}", &result), "\"pays\":false");
  EXPECT_REFUSED(kp_float8_plan("{\"in_features\": 64, \"out_features\": 64, \"recipe\": \"x\"}", &result),
                 KP_INVALID_ARGUMENT, "delayed");
  EXPECT_ANSWER(kp_bucket_plan("{\"lengths\": [10, 12, 100], \"counts\": [3, 1, 1], \"max_buckets\": 2}", &result),
                "\"buckets\":[12,100]");
  EXPECT_REFUSED(kp_bucket_plan("{\"lengths\": [10], \"counts\": []  , \"strategy\": \"x\"}", &result),
                 KP_INVALID_ARGUMENT, "geometric");
  EXPECT_REFUSED(kp_bucket_plan("{\"lengths\": [10, 2.5]}", &result), KP_INVALID_ARGUMENT, "2.5");
  EXPECT_ANSWER(kp_context_parallel_plan("{\"members\": 4, \"sequence\": 4096, \"size\": 64}", &result),
                "\"schedule\":");
  EXPECT_ANSWER(kp_graph_plan("{\"eager_us\": 5}", &result), "\"pays\":false");
  EXPECT_ANSWER(kp_memory_plan("{\"bytes\": [8, 4, -4], \"kinds\": [0, 4, 4]}", &result), "\"peak_bytes\":12");
  EXPECT_REFUSED(kp_memory_plan("{\"bytes\": [8], \"kinds\": [7]}", &result), KP_INVALID_ARGUMENT, "0 to 4");
  EXPECT_ANSWER(kp_activation_plan("{\"between\": 8, \"budget_bytes\": 9}", &result), "\"fits\":true");
  EXPECT_REFUSED(kp_activation_plan("{\"chain\": [{\"kind\": 1}]}", &result), KP_INVALID_ARGUMENT, "of kind 1");
  EXPECT_ANSWER(kp_batch_plan("{\"first_bytes\": 10, \"second_bytes\": 20, \"capacity_bytes\": 100}", &result),
                "\"batch\":8");
  EXPECT_REFUSED(kp_offload_plan("{\"elements\": 5}", &result), KP_INVALID_ARGUMENT, "all are positive");
  EXPECT_REFUSED(kp_explain(NULL, &result), KP_INVALID_ARGUMENT, "\"op\" is missing");
  EXPECT_REFUSED(kp_explain("{", &result), KP_INVALID_ARGUMENT, "not JSON");
  EXPECT_REFUSED(kp_explain("[]", &result), KP_INVALID_ARGUMENT, "array");
  EXPECT_REFUSED(kp_explain("{\"op\": 3}", &result), KP_INVALID_ARGUMENT, "string");
  EXPECT_REFUSED(kp_explain("{\"op\": \"rms_nrom_forward\", \"shape\": [1]}", &result), KP_INVALID_ARGUMENT,
                 "did you mean rms_norm_forward?");
  EXPECT_REFUSED(kp_explain("{\"op\": \"rms_norm\", \"shape\": [1, 8]}", &result), KP_INVALID_ARGUMENT, "say which");
  EXPECT_REFUSED(kp_explain("{\"op\": \"rms_norm_forward\", \"shape\": [1, 8], \"colour\": 1}", &result),
                 KP_INVALID_ARGUMENT, "known: device, dtype, kernel, op, options, shape");
  EXPECT_REFUSED(kp_explain("{\"op\": \"rms_norm_forward\", \"shape\": [1.5]}", &result), KP_INVALID_ARGUMENT, "1.5");
  EXPECT_REFUSED(kp_explain("{\"op\": \"rms_norm_forward\", \"shape\": [8, 8], \"device\": \"cuda:99\"}", &result),
                 KP_DEVICE, "cuda");
  EXPECT_REFUSED(
      kp_tune("{\"op\": \"rms_norm_forward\", \"shape\": [8, 8], \"budget_seconds\": -1}", NULL, NULL, NULL, &result),
      KP_INVALID_ARGUMENT, "budget_seconds");
  EXPECT_REFUSED(kp_compile("{\"architecture\": \"sm_90a\"}", NULL, NULL, &result), KP_INVALID_ARGUMENT, "output");
  EXPECT_REFUSED(kp_cache_clear("{\"store\": 1}", &result), KP_INVALID_ARGUMENT, "true or false");
}

static void test_ops(void) {
  float values[8] = {1, 2, 3, 4, 5, 6, 7, 8}, results[8] = {0};
  const int64_t sizes[] = {2, 4}, wide[] = {4, 1};
  const kp_device cpu = {KP_CPU, 0};
  const kp_tensor x = {values, KP_FLOAT32, cpu, 2, sizes, wide}, output = {results, KP_FLOAT32, cpu, 2, sizes, NULL};
  const kp_argument x_given = kp_tensor_argument("x", &x), output_given = kp_tensor_argument("output", &output);
  kp_context* context = NULL;
  EXPECT(kp_context_create(cpu, NULL, &context) == KP_OK);
  EXPECT(KP_CALL(context, "rms_norm", output_given, x_given, kp_integer_argument("eps", 0)) == KP_OK);
  EXPECT(results[0] > 0.36f && results[0] < 0.37f); /* 1 / sqrt(30 / 4) */
  EXPECT(KP_CALL(context, "rms_norm", x_given) == KP_INVALID_ARGUMENT);
  EXPECT(strstr(kp_last_error(), "rms_norm: output is missing") != NULL);
  EXPECT(kp_call(context, "rms_norm", NULL, 1) == KP_INVALID_ARGUMENT);
  EXPECT(kp_call(NULL, "rms_norm", NULL, 0) == KP_INVALID_ARGUMENT);
  kp_context_destroy(context);
  kp_context_destroy(NULL);
  const kp_device absent = {KP_CUDA, 99};
  EXPECT(kp_context_create(absent, NULL, &context) == KP_DEVICE);
  EXPECT(context == NULL);
}

static void test_pages(void) {
  const int32_t prompt[] = {1, 2, 3, 4, 5};
  int64_t request = 0, shared = -1, forked = 0, slots[5], counts[4], pages_of = 0;
  int32_t copy[3], table[4];
  kp_pages* pages = NULL;
  EXPECT(kp_pages_create(4, 2, &pages) == KP_OK);
  EXPECT(kp_pages_begin(pages, prompt, 5, &request, &shared) == KP_OK && shared == 0);
  EXPECT(kp_pages_reserve(pages, request, 1, copy) == KP_OK && copy[2] == 0);
  EXPECT(kp_pages_extend(pages, request, prompt, 5, slots, copy) == KP_OK && slots[1] == slots[0] + 1);
  EXPECT(kp_pages_table(pages, request, table, 4, &pages_of) == KP_OK && pages_of == 3 && table[3] == -1);
  EXPECT(kp_pages_fork(pages, request, &forked) == KP_OK);
  EXPECT(kp_pages_extend(pages, forked, prompt, 1, slots, copy) == KP_OK && copy[2] == 1);
  EXPECT(kp_pages_counts(pages, forked, 4, counts) == KP_OK && counts[0] == 0 && counts[1] == 2 && counts[3] == 2);
  EXPECT(kp_pages_extend(pages, forked, prompt, 5, slots, copy) == KP_DEVICE);
  EXPECT(strstr(kp_last_error(), "more pages") != NULL);
  EXPECT(kp_pages_release(pages, forked) == KP_OK);
  EXPECT(kp_pages_release(pages, forked) == KP_INVALID_ARGUMENT);
  EXPECT(kp_pages_table(NULL, request, table, 4, &pages_of) == KP_INVALID_ARGUMENT);
  EXPECT(kp_pages_extend(pages, request, NULL, 1, slots, copy) == KP_INVALID_ARGUMENT);
  kp_pages_destroy(pages);
  kp_pages_destroy(NULL);
  EXPECT(kp_pages_create(0, 2, &pages) == KP_INVALID_ARGUMENT && pages == NULL);
}

int main(void) {
  test_what_is_there();
  test_ops();
  test_problems();
  test_tuning();
  test_choices();
  test_refusals();
  test_pages();
  return failures == 0 ? 0 : 1;
}
