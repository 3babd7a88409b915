// The kernels of attention in FP8, best first, the reference last, and the problems they are tested on.
#include <algorithm>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/attention/check.h"
#include "kernel_pytorch/ops/attention/fp8/rounding.h"
#include "kernel_pytorch/ops/support/cpu_support.h"
#include "kernel_pytorch/ops/support/cuda_support.h"
#include "kernel_pytorch/registry/declared.h"

namespace kernel_pytorch::attention::fp8 {
namespace {

// Operands rounded to e4m3, then attention as it is: everywhere, right, and no faster than attention.
registry::Support supports_rounded(const Forward&, const DeviceInfo& device) {
  if (device.is_cpu()) return registry::Support::yes();
  return registry::Support::unless(float8_obstacle(device));
}
void run_rounded(const Forward& problem, int, Context& context) {
  const RoundedOperands rounded =
      context.info->is_cpu() ? round_on_host(problem, context) : round_on_gpu(problem, context);
  Context inner = context;  // the choice of this kernel is not attention's
  inner.kernel_override = {};
  check_and_run(attention_of(problem, rounded.query, rounded.key, rounded.value), inner);
}
uint64_t rounded_version() {
  return hash_text("attention_fp8 rounded 1");
}

void run_reference(const Forward& problem, int, Context& context) {
  const RoundedOperands rounded = round_on_host(problem, context);
  Context inner = context;
  inner.kernel_override = "reference";
  check_and_run(attention_of(problem, rounded.query, rounded.key, rounded.value), inner);
}
uint64_t reference_version() {
  return hash_text("attention_fp8 reference 1");
}

void describe(const Forward& problem, tuning::KeyBuilder& key) {
  key.field("lse", problem.lse.is_present());
  key.field("aligned", has_aligned_rows(problem.output));
  key.field("positive", *problem.scale > 0);
}

// Probabilities may be rounded to e4m3. The sums of scores have the 14 bits of the tensor core, and what is computed of
// them no more.
registry::Precision precision(const Forward&, std::string_view tensor, DType) {
  return tensor == "lse" ? registry::Precision{DType::kFloat16, 0x1p-9} : registry::Precision{DType::kFloat8E4M3};
}

int64_t flops(const Forward& problem) {
  const auto queries = static_cast<double>(problem.query.sizes[2]), keys = static_cast<double>(problem.key.sizes[2]);
  double pairs = queries * keys;
  if (problem.window_left >= 0 && problem.window_right >= 0) {
    pairs = queries * std::min(keys, static_cast<double>(problem.window_left + problem.window_right + 1));
  } else if (problem.causal && problem.window_left >= 0) {
    pairs = queries * std::min(keys, static_cast<double>(problem.window_left + 1));
  } else if (problem.causal) {
    pairs -= queries * std::min(queries, keys) / 2;
  }
  return static_cast<int64_t>(2 * pairs * static_cast<double>(problem.query.sizes[0] * problem.query.sizes[1]) *
                              static_cast<double>(problem.query.sizes[3] + problem.value.sizes[3]));
}

constexpr const char* kShapes = R"(
  # Head sizes and odd lengths; of keys=70 the first queries see nothing.
  fp32 bf16 fp16: 1x2x130x64; 1x2x257x128 1x1x50x256 causal=1; 1x1x200x128 keys=70 causal=1; 1x2x40x8 1x1x1x16
    2x3x65x64 keys=191 causal=1 heads_first=0; 1x2x77x96 keys=140 value_size=64 rotate=1; 1x3x60x20 keys=90 value_size=12
    2x8x90x64 key_heads=2 causal=1; 1x6x33x128 keys=129 key_heads=1 heads_first=0 rotate=1
    3x8x1x128 keys=300 key_heads=2 causal=1; 1x2x150x80 rotate=0,1
  bf16: 2x2x300x128 window_left=20 window_right=0; window_left=17 window_right=9 keys=400; window_right=5 return_lse=0
    causal=1 window_left=150 rotate=1; 1x4x700x128 keys=900 causal=1 key_heads=2 rotate=0,1; 1x2x515x64 keys=1300
    1x2x515x128 scale=1.5 causal=1; 1x2x130x64 scale=-0.3; 1x1x400x128 keys=640 scale=4
  # Nothing at all, in every dimension.
    0x2x16x64 2x0x16x64; 2x2x0x64 keys=16; 2x2x16x64 keys=0 causal=1
)";

}  // namespace

constinit const registry::Kernel<Forward> kRounded{.name = "rounded",
                                                   .supports = supports_rounded,
                                                   .run = run_rounded,
                                                   .source_hash = rounded_version,
                                                   .device_code = rounding_code,
                                                   .is_fallback = true};
constinit const registry::Kernel<Forward> kReference{
    .name = "reference", .supports = supports_on_cpu<Forward>, .run = run_reference, .source_hash = reference_version};

constinit const registry::Operation<Forward> kForward = registry::declared<Forward, kForwardFields, flops>(
    {.name = "attention_fp8_forward",
     .kernels = registry::kernel_list<kSm90, kRounded, kReference>,
     .describe = describe,
     .precision = precision,
     .request = {.shape = "batch heads queries size", .sizes = "keys=queries key_heads=heads value_size=size"},
     .check = check,
     .shapes = kShapes});

}  // namespace kernel_pytorch::attention::fp8
