#include "kernel_pytorch/plan/float8_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

#include "kernel_pytorch/base/error.h"

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

// Of x, weight and gradient, each read as bf16 (twice where the scale is measured first) and written twice as codes.
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
  if (!device.is_cuda() || device.cuda.capability() < 90) {
    return {.pays = false,
            .reason = concat(device.is_cuda() ? "this GPU" : "the CPU",
                             " has no product of FP8 here: codes are decoded and multiplied in fp32, which rounds as "
                             "the hardware does and is for trying a recipe, not for speed")};
  }
  if (shape.in_features % 16 != 0 || shape.out_features % 16 != 0) {
    return {.pays = false,
            .reason = concat("rows of ", shape.in_features, " and ", shape.out_features,
                             " codes are no multiples of 16 bytes, which the copy engine asks for")};
  }
  const double multiprocessors = std::max(device.cuda.multiprocessors, 1);
  const double rate = recipe == Recipe::kBlockwise ? kBlockFlops : kTensorFlops;
  const double plain = step_seconds(shape, kBf16Flops, multiprocessors);
  const double casts = cast_seconds(shape, recipe) * kMultiprocessors / multiprocessors;
  const double float8 = step_seconds(shape, rate, multiprocessors) + casts;
  const bool pays = plain > float8 * (100 + kLeastGain) / 100;
  std::ostringstream ratio;
  ratio << std::fixed << std::setprecision(2) << plain / float8;
  return {.pays = pays,
          .bf16_us = plain * 1e6,
          .float8_us = float8 * 1e6,
          .reason = concat("a step of ", shape.tokens, " tokens takes about ", text_of(plain), " in bf16 and ",
                           text_of(float8), " in FP8, ", text_of(casts), " of them casts: ", ratio.str(),
                           pays ? "x" : "x, not worth it")};
}

}  // namespace kernel_pytorch::plan
