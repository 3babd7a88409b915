#include "kernel_pytorch/plan/float8_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/operations.h"
#include "kernel_pytorch/registry/any_problem.h"

namespace kernel_pytorch::plan {
namespace {

constexpr double kBf16Flops = 720e12, kTensorFlops = 1270e12, kBlockFlops = 990e12;  // a full H200, random data
constexpr double kBytesPerSecond = 3.05e12;                                          // of the casts
constexpr double kMultiprocessors = 132, kLaunchSeconds = 4e-6;                      // launch, with torch's call
constexpr int64_t kTileRows = 128, kTileColumns = 256;
constexpr int64_t kLeastGain = 5;  // percent, below which a layer stays

// A product at `rate`, slowed where its tiles leave multiprocessors idle in the last wave.
double product_seconds(int64_t m, int64_t n, int64_t k, double rate, double multiprocessors) {
  const auto tiles = static_cast<double>(((m + kTileRows - 1) / kTileRows) * ((n + kTileColumns - 1) / kTileColumns));
  const double waves = std::ceil(tiles / multiprocessors);
  const double flops = waves * multiprocessors * kTileRows * kTileColumns * 2 * static_cast<double>(k);
  return flops / (rate * multiprocessors / kMultiprocessors) + kLaunchSeconds;
}

double step_seconds(const LinearShape& shape, double rate, double multiprocessors) {
  const int64_t t = shape.tokens, i = shape.in_features, o = shape.out_features;
  return product_seconds(t, o, i, rate, multiprocessors) + product_seconds(t, i, o, rate, multiprocessors) +
         product_seconds(o, i, t, rate, multiprocessors);
}

// Time to cast x, weight and gradient: each is read as bf16 (twice if the scale is measured first) and written twice as
// codes.
double cast_seconds(const LinearShape& shape, Recipe recipe) {
  const auto elements = static_cast<double>(shape.tokens * shape.in_features + shape.in_features * shape.out_features +
                                            shape.tokens * shape.out_features);
  const bool measures = recipe == Recipe::kCurrent || recipe == Recipe::kRowwise;
  return elements * (measures ? 6 : 4) / kBytesPerSecond + 3 * (measures ? 3 : 1) * kLaunchSeconds;
}

std::string text_of(double seconds) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(seconds < 1e-4 ? 1 : 0) << seconds * 1e6 << " us";
  return text.str();
}

constexpr std::string_view kTensorCoreKernel = "sm90_wgmma";  // the one whose rates are known
constexpr std::string_view kOtherTensorCoreKernel = "cuda_mma";
constexpr int64_t kCodesPerVector = 16;

using Options = std::vector<std::pair<std::string, std::string>>;

// How a kernel is found for a part of a step: its name, or what each of them lacks.
struct Found {
  std::string kernel;
  std::string obstacles;
};

// A vendor's kernel takes less (no scales of rows, no amax), so it is not what a step can count on.
Found kernel_for(std::string_view op, std::vector<int64_t> shape, Options options, const DeviceInfo& device) {
  const registry::AnyOperation* operation = find_operation(op);
  KP_CHECK(operation != nullptr, "float8 plan: there is no op \"", op, "\"");
  const auto problem = operation->make_on(
      {.shape = std::move(shape), .dtype = DType::kBFloat16, .device = device.device, .options = std::move(options)},
      device);
  Found found;
  for (int i = 0; i < problem->kernel_count(); ++i) {
    if (problem->kernel_origin(i) == registry::Origin::kVendor) continue;
    const registry::Support support = problem->supports(i);
    if (support) return {std::string(problem->kernel_name(i)), {}};
    found.obstacles += concat(found.obstacles.empty() ? "" : "; ", problem->kernel_name(i), " ", support.reason());
  }
  found.obstacles = concat(op, " has no kernel there: ", found.obstacles);
  return found;
}

struct Granularities {
  const char *rows, *weights;  // of activations and gradients, and of weights
};
Granularities granularities_of(Recipe recipe) {
  if (recipe == Recipe::kRowwise) return {"row", "row"};
  return recipe == Recipe::kBlockwise ? Granularities{"1x128", "128x128"} : Granularities{"tensor", "tensor"};
}

// The kernel that takes the three products, the plain one where they differ, or what stands in the way.
Found step_kernel(const LinearShape& shape, Recipe recipe, const DeviceInfo& device) {
  const Granularities scales = granularities_of(recipe);
  const int64_t t = shape.tokens, i = shape.in_features, o = shape.out_features;
  const std::string given = recipe == Recipe::kDelayed ? "given" : "";
  struct Cast {
    int64_t rows, columns;
    const char* granularity;
  };
  for (const Cast& cast : {Cast{t, i, scales.rows}, Cast{o, i, scales.weights}, Cast{t, o, scales.rows}}) {
    const Found found = kernel_for("quantize", {cast.rows, cast.columns},
                                   {{"scales", given.empty() ? cast.granularity : given}, {"padded", "1"}}, device);
    if (found.kernel.empty()) return found;
  }
  struct Product {
    int64_t m, n, k;
  };
  Found slowest;
  for (const Product& product : {Product{t, o, i}, Product{t, i, o}, Product{o, i, t}}) {
    const int64_t padded_k = (product.k + kCodesPerVector - 1) / kCodesPerVector * kCodesPerVector;  // as codes lie
    const Found found = kernel_for("scaled_matmul", {product.m, product.n, padded_k},
                                   {{"scale_a", scales.rows}, {"scale_b", scales.weights}}, device);
    if (found.kernel.empty()) return found;
    if (slowest.kernel.empty() || found.kernel != kTensorCoreKernel) slowest = found;
  }
  return slowest;
}

std::string place_of(const DeviceInfo& device) {
  if (!device.is_cuda()) return "the CPU";
  if (device.is_amd()) return "an AMD GPU";
  return concat("a GPU of compute capability ", device.cuda.compute_major, ".", device.cuda.compute_minor);
}

}  // namespace

Recipe recipe_of(std::string_view word) {
  constexpr std::string_view kWords[] = {"delayed", "current", "rowwise", "blockwise"};
  const auto found = std::ranges::find(kWords, word);
  KP_CHECK(found != std::end(kWords), "float8 plan: recipe is \"", word,
           "\"; known are delayed, current, rowwise and blockwise");
  return static_cast<Recipe>(found - kWords);
}

Float8Plan plan_float8(const LinearShape& shape, Recipe recipe, const DeviceInfo& device) {
  KP_CHECK(shape.tokens > 0 && shape.in_features > 0 && shape.out_features > 0, "float8 plan: the layer has ",
           shape.tokens, " tokens, ", shape.in_features, " and ", shape.out_features,
           " features; all must be positive");
  const Found step = step_kernel(shape, recipe, device);
  if (step.kernel.empty()) return {.reason = concat(place_of(device), " cannot train it in FP8: ", step.obstacles)};
  if (shape.in_features % kCodesPerVector != 0 || shape.out_features % kCodesPerVector != 0) {
    return {.runs = true,
            .kernel = step.kernel,
            .reason = concat("rows of ", shape.in_features, " and ", shape.out_features, " codes are no multiples of ",
                             kCodesPerVector,
                             " bytes: codes are padded to them, and what such products reach was not measured")};
  }
  if (step.kernel == kOtherTensorCoreKernel) {
    return {.runs = true,
            .kernel = step.kernel,
            .reason = concat(place_of(device), " multiplies codes by ", step.kernel, ", whose speed was not measured")};
  }
  if (step.kernel != kTensorCoreKernel) {
    return {.runs = true,
            .kernel = step.kernel,
            .reason =
                concat(place_of(device), " has no product of FP8 here: codes are decoded and multiplied in fp32 (",
                       step.kernel, "), which rounds as the hardware does and is for trying a recipe, not for speed")};
  }
  const double multiprocessors = std::max(device.cuda.multiprocessors, 1);
  const double rate = recipe == Recipe::kBlockwise ? kBlockFlops : kTensorFlops;
  const double plain = step_seconds(shape, kBf16Flops, multiprocessors);
  const double casts = cast_seconds(shape, recipe) * kMultiprocessors / multiprocessors;
  const double float8 = step_seconds(shape, rate, multiprocessors) + casts;
  const bool pays = plain > float8 * (100 + kLeastGain) / 100;
  std::ostringstream ratio;
  ratio << std::fixed << std::setprecision(2) << plain / float8;
  return {.runs = true,
          .pays = pays,
          .bf16_us = plain * 1e6,
          .float8_us = float8 * 1e6,
          .kernel = step.kernel,
          .reason = concat("a step of ", shape.tokens, " tokens takes about ", text_of(plain), " in bf16 and ",
                           text_of(float8), " in FP8, ", text_of(casts), " of them casts: ", ratio.str(),
                           pays ? "x" : "x, not worth it")};
}

}  // namespace kernel_pytorch::plan
