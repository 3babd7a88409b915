// The host's side of attention/cuda/arguments_cuda.h, shared by all CUDA kernels of attention: from a problem to the
// features that are compiled in and the arguments that they read; and the table that makes a warm launch a look-up.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/ops/attention/cuda/arguments_cuda.h"
#include "kernel_pytorch/ops/attention/problem.h"
#include "kernel_pytorch/ops/support/cuda_support.h"

namespace kernel_pytorch::attention {

inline constexpr auto kFeaturesFields = config_fields<Features>(
    config_field<&Features::right_bound>(), config_field<&Features::left_bound>(),
    config_field<&Features::key_lengths>(), config_field<&Features::packed>(), config_field<&Features::segments>(),
    config_field<&Features::mask>(), config_field<&Features::mask_mod>(), config_field<&Features::blocks>(),
    config_field<&Features::block_map>(), config_field<&Features::alibi>(),
    config_field<&Features::alibi_is_one_sided>(), config_field<&Features::bias>(),
    config_field<&Features::float_bias>(), config_field<&Features::bias_pairs>(), config_field<&Features::softcap>(),
    config_field<&Features::softcap_after>(), config_field<&Features::exact_tanh>(),
    config_field<&Features::score_mod>(), config_field<&Features::score_mod_adds>(), config_field<&Features::scaled>(),
    config_field<&Features::sinks>(), config_field<&Features::dropout>(), config_field<&Features::tf32>(),
    config_field<&Features::float_tanh>());
constexpr ConfigFields fields_of(const Features&) {
  return kFeaturesFields;
}

Features features_of(const Scoring& scoring);
// The same for a kernel whose tiles may not divide those of the block list: it then reads a map (add_block_map).
Features features_of(const Scoring& scoring, int64_t tile_queries, int64_t tile_keys);
uint32_t bits_of(const Features& features);  // one bit each

// Writes ranges of segment ids first where the features ask for them: launches, and takes scratch, in this call.
ScoreArguments score_arguments_of(const Scoring& scoring, const TensorView& query, const TensorView& key,
                                  Context& context);

// Finds what segment ids leave of the walks of a kernel with these tiles, where there are such: launches, and takes
// scratch.
struct WalkTiles {
  bool over_keys;  // by tiles of queries; else over queries, by tiles of keys
  int rows, columns;
};
void plan_segments(const Features& features, const WalkTiles& tiles, ScoreArguments& arguments, Context& context);
DeviceCode segment_plan_code(const Features& features, const WalkTiles& tiles);

// Finds in which order the tiles of block lists are taken, longest first; null where that is as they come. Launches,
// and takes scratch. Tiles of queries where they are walked over keys, else of keys, of every head that has them.
const int32_t* order_lists(const Features& features, const ScoreArguments& arguments, bool over_keys, int tile_rows,
                           int64_t section_units, Context& context);
DeviceCode list_order_code();

// Block lists; of packed sequences with counts of their own, which launches, and takes scratch.
void add_lists(const Scoring& scoring, ScoreArguments& arguments, Context& context);
void add_block_map(const Scoring& scoring, ScoreArguments& arguments, Context& context);

RowTensor row_tensor_of(const TensorView& view);
bool has_vector_rows(const TensorView& view);  // 16-byte vectors, begin at multiples of 16 bytes; or absent

// Packed tensors: zeros (and -inf for the lse, where there is one) in rows past the last offset.
void clear_rows_past_sequences(const TensorView& rows, const TensorView& lse, const TensorView& offsets,
                               Context& context);

// The text of the call's programs, for DeviceCode::generated; empty where it has none.
const std::string& program_text(const Options& options);

// The small kernels of attention/cuda/prepare.cuh; all of them, for a list of device code.
DeviceCode prepare_code(std::string_view function);
std::vector<DeviceCode> prepare_codes();

// Null, or why no CUDA kernel whose tiles are tile_queries x tile_keys takes the problem.
const char* scoring_obstacle(const Scoring& scoring, int64_t tile_queries, int64_t tile_keys);
const char* captured_obstacle(const Scoring& scoring);

// Null, or why kernels on the GPU do not take this part of a whole.
const char* part_obstacle(const Scoring& scoring);
// Results in fp32 of operands that are not, perhaps added to what is there: not every kernel has a way to store them.
bool has_float_results(const ForwardProblem& problem);
bool has_float_results(const BackwardProblem& problem);
inline constexpr const char* kNoFloatResults = "writes results in query's type only";
inline constexpr const char* kFloatPacks = "writes fp32 results of packed sequences only where it adds to them";

// Combinations that CI compiles in addition to each feature alone: what models use.
struct NamedFeatures {
  const char* name;
  Features features;
  std::string generated{};
};
std::vector<NamedFeatures> compiled_features();

// Loaded kernels by features, a variant of the caller's (head tile, type, ...) and device. Where a call's programs are
// part of the code, or the table is full, jit's own table answers.
class FeatureKernels {
 public:
  template <class MakeCode>
  CUkern_st* get(const Features& features, uint32_t variant, const Context& context, const MakeCode& make_code) {
    if (features.score_mod || features.mask_mod) return load_kernel(make_code(), context);
    const uint64_t device = static_cast<uint64_t>(context.info->device.index);
    const uint64_t key = (uint64_t{bits_of(features)} << 32 | variant << 8 | device) + 1;
    Slot* slot = find(key);
    if (slot == nullptr) return load_kernel(make_code(), context);
    CUkern_st* kernel = slot->kernel.load(std::memory_order_acquire);
    if (kernel == nullptr) [[unlikely]] {
      kernel = load_kernel(make_code(), context);
      slot->kernel.store(kernel, std::memory_order_release);
    }
    return kernel;
  }

 private:
  struct Slot {
    std::atomic<uint64_t> key{0};
    std::atomic<CUkern_st*> kernel{nullptr};
  };
  static constexpr size_t kSlots = 256;

  // Claims an empty slot for a new key; null where none is left near its place.
  Slot* find(uint64_t key) {
    size_t place = key * 0x9e3779b97f4a7c15u >> 56;
    for (int tries = 0; tries < 16; ++tries, place = (place + 1) % kSlots) {
      uint64_t found = slots_[place].key.load(std::memory_order_acquire);
      if (found == 0 && slots_[place].key.compare_exchange_strong(found, key)) return &slots_[place];
      if (found == key) return &slots_[place];
    }
    return nullptr;
  }
  std::array<Slot, kSlots> slots_{};
};

}  // namespace kernel_pytorch::attention
