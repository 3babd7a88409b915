#include "kernel_pytorch/ops/attention/cuda_mma/tiles.h"

#include <algorithm>
#include <limits>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/device/cuda/capability.h"

namespace kernel_pytorch::attention {
namespace {

constexpr const char* kTooLong = "takes sequences of up to 2^30 rows";
constexpr int64_t kLongest = int64_t{1} << 30;

// Nothing but what tiles depend on.
DeviceInfo gpu_with(int shared_kib) {
  DeviceInfo gpu;
  gpu.device = {DeviceKind::kCuda, 0};
  gpu.cuda.shared_bytes_per_block = int64_t{shared_kib} << 10;
  if (shared_kib == kAmdGpu.shared_kib_per_block) gpu.cuda.gfx = "gfx";
  return gpu;
}

}  // namespace

std::vector<DeviceCode> codes_by_shared_memory(
    const std::function<std::vector<DeviceCode>(const DeviceInfo&)>& codes_of) {
  std::vector<int> sizes{kAmdGpu.shared_kib_per_block};
  for (const CudaCapability& row : kCudaCapabilities) {
    if (row.number >= 80) sizes.push_back(row.shared_kib_per_block);
  }
  std::ranges::sort(sizes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  std::vector<DeviceCode> all;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int least = i == 0 ? 0 : sizes[i];
    const int most = i + 1 < sizes.size() ? sizes[i] : std::numeric_limits<int>::max();
    for (DeviceCode& code : codes_of(gpu_with(sizes[i]))) {
      const auto smaller = std::ranges::find_if(all, [&](const DeviceCode& other) {
        return other.entry == code.entry && other.generated == code.generated && i > 0 &&
               other.most_shared_kib == sizes[i - 1];
      });
      if (smaller != all.end()) {
        smaller->most_shared_kib = most;
      } else {
        code.least_shared_kib = least, code.most_shared_kib = most;
        all.push_back(std::move(code));
      }
    }
  }
  return all;
}

Features mma_features_of(const Scoring& scoring, DType dtype, int64_t tile_queries, int64_t tile_keys) {
  Features features = features_of(scoring, tile_queries, tile_keys);
  features.exact_tanh = features.softcap || features.softcap_after;
  features.float_tanh = features.exact_tanh && dtype == DType::kFloat32;
  features.tf32 = scoring.allow_tf32 && dtype == DType::kFloat32;
  return features;
}

bool is_heavy(const Features& features, DType dtype) {
  return (dtype == DType::kFloat32 && features.packed) || features.segments || features.mask || features.mask_mod ||
         features.blocks || features.block_map || features.score_mod || features.dropout || has_bias(features);
}

const char* mma_obstacle(const TensorView& query, const TensorView& key, const TensorView& value,
                         const DeviceInfo& device) {
  if (const char* obstacle = cuda_obstacle(query.dtype, device)) return obstacle;
  if (query.size(2) > kLongest || key.size(2) > kLongest) return kTooLong;
  return std::max(query.size(3), value.size(3)) > 512 ? kMmaTooLarge : nullptr;
}

DeviceCode mma_code(std::string_view source, std::string_view function, const MmaVariant& variant,
                    const std::string& generated, std::string_view last_argument) {
  DeviceCode code;
  code.source = source;
  code.entry = concat("kernel_pytorch::attention::", function, "<", device_text(variant.features), ", ",
                      element_type_name(variant.dtype), ", ", device_text(variant.tile), ", ",
                      bool_name(variant.vectors), last_argument.empty() ? "" : ", ", last_argument, ">");
  code.generated = generated;
  return code;
}

bool fill_forward_arguments(const ForwardProblem& problem, const Features& features, Context& context,
                            MmaForwardArguments& arguments) {
  const Scoring& scoring = problem.scoring;
  if (scoring.is_packed() && !problem.accumulate) {
    clear_rows_past_sequences(problem.output, problem.lse, scoring.cu_seqlens_q, context);
  }
  arguments.scores = score_arguments_of(scoring, problem.query, problem.key, context);
  if (features.block_map) add_block_map(scoring, arguments.scores, context);
  arguments.query = row_tensor_of(problem.query);
  arguments.key = row_tensor_of(problem.key);
  arguments.value = row_tensor_of(problem.value);
  arguments.output = row_tensor_of(problem.output);
  arguments.lse = problem.lse.is_present() ? problem.lse.as<float>() : nullptr;
  arguments.size = static_cast<int32_t>(problem.query.size(3));
  arguments.value_size = static_cast<int32_t>(problem.value.size(3));
  arguments.float_results = has_float_results(problem);
  arguments.accumulates = problem.accumulate;
  bool vectors = true;
  for (const TensorView* view : {&problem.query, &problem.key, &problem.value, &problem.output}) {
    vectors = vectors && has_vector_rows(*view);
  }
  return vectors;
}

std::vector<DeviceCode> mma_codes(std::string_view source, std::string_view function, std::span<const MmaTile> tiles,
                                  std::span<const MmaTile> heavy_tiles, std::string_view last_argument) {
  std::vector<DeviceCode> codes;
  const auto add = [&](const Features& features, size_t tile, DType dtype, const std::string& generated) {
    const MmaVariant variant{features, dtype, (is_heavy(features) ? heavy_tiles : tiles)[tile], !codes.empty()};
    codes.push_back(mma_code(source, function, variant, generated, last_argument));
  };
  Features causal;
  causal.right_bound = true;
  for (size_t i = 0; i < tiles.size(); ++i) add(causal, i, i % 2 == 0 ? DType::kBFloat16 : DType::kFloat16, "");
  size_t turn = 0;
  for (const NamedFeatures& named : compiled_features()) {
    if (bits_of(named.features) == bits_of(causal)) continue;
    add(named.features, turn % tiles.size(), turn % 2 == 0 ? DType::kFloat16 : DType::kBFloat16, named.generated);
    ++turn;
  }
  return codes;
}

std::vector<DeviceCode> mma_float_codes(std::string_view source, std::string_view function,
                                        std::span<const MmaTile> tiles, std::span<const MmaTile> heavy_tiles, int size,
                                        std::string_view last_argument) {
  std::vector<DeviceCode> codes;
  const auto add = [&](const Features& features, const MmaTile& tile, const std::string& generated) {
    const MmaVariant variant{features, DType::kFloat32, tile, !codes.empty()};
    codes.push_back(mma_code(source, function, variant, generated, last_argument));
  };
  Features causal;
  causal.right_bound = true;
  for (const MmaTile& tile : tiles) add(causal, tile, "");
  causal.tf32 = true;
  add(causal, tiles.front(), "");
  for (NamedFeatures& named : compiled_features()) {
    const std::string_view name = named.name;
    if (name != "everything" && name != "score_mod" && name != "causal packed" && name != "softcap_after") continue;
    named.features.float_tanh = named.features.softcap || named.features.softcap_after;
    named.features.float_bias = has_bias(named.features);
    named.features.bias = false;
    const auto index = static_cast<size_t>(tile_for(tiles, size, size));
    add(named.features, (is_heavy(named.features, DType::kFloat32) ? heavy_tiles : tiles)[index], named.generated);
  }
  return codes;
}

}  // namespace kernel_pytorch::attention
