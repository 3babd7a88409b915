// Attention of heads that share one latent row of keys and values (MLA), by tensor cores (mma.m16n8k16). A key is its
// latent row (value_size columns) followed by its rope row; the latent row is the value too, read once. A block has
// tile_rows rows and walks over steps of keys in three phases that it shares out differently: scores by keys, softmax
// by rows, values by columns. In codes (e4m3) a latent row has a scale for each 128 columns: products.cuh says how
// codes become numbers, the scales go into scores and into copies of the weights, one for each 128 columns.
#pragma once

#include "kernel_pytorch/cuda/ptx/async_copy.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/products.cuh"
#include "kernel_pytorch/ops/paged_attention/cuda/work.cuh"
#include "kernel_pytorch/ops/paged_attention/latent/memory.cuh"

namespace kernel_pytorch::paged_attention {

template <class Element, class Cache, Tile kTile>
class LatentAttention : LatentMemory<kTile> {
  static constexpr int kRows = tile_rows(kTile), kKeys = kTile.keys, kStages = kTile.stages, kWarpCount = kTile.warps;
  static constexpr int kThreadCount = 32 * kWarpCount, kRowTiles = kTile.row_warps;
  static constexpr int kRope = kTile.size - kTile.value_size,
                       kChunk = 64;  // columns of keys that are multiplied at once
  static constexpr int kLatentChunks = kTile.value_size / kChunk;
  static constexpr int kKeyTiles = kKeys / 8, kSplits = kWarpCount / kKeyTiles;  // of scores: warps of the same keys
  using Memory = LatentMemory<kTile>;
  using Memory::kLatentPitch, Memory::kRopePitch, Memory::kQueryPitch, Memory::kWeightPitch, Memory::kScorePitch;
  using Memory::largests, Memory::sums, Memory::offsets, Memory::pages;
  using Memory::stage, Memory::rope, Memory::scales, Memory::queries, Memory::scores, Memory::weights, Memory::rescale;
  static constexpr int kColumns = kTile.value_size / kWarpCount, kColumnTiles = kColumns / 8;  // of a warp's values
  static constexpr int kCopies = latent_copies(kTile), kRowsOfWarp = kRows / kWarpCount, kPerLane = kKeys / 32;
  static constexpr bool kCodes = kIsCode<Cache>;
  using Power = Powers<Element, Cache>;
  static_assert(kSplits >= 1 && kSplits <= 2 && kRope == kChunk && kPerLane >= 1 && kColumns == 64);

 public:
  __device__ __forceinline__ LatentAttention(const WorkArguments& work, char* shared)
      : Memory(shared), work_(work), arguments_(work.attend) {}

  __device__ __forceinline__ void run() {
    const Workers workers(work_, work_.plan);
    for (int64_t worker = blockIdx.x; worker < workers.count; worker += gridDim.x) {
      const int64_t end = workers.begin(worker + 1);
      segment_ = segment_of<kTile>(work_, work_.plan, workers.begin(worker));
      for (int64_t unit = workers.begin(worker); unit < end;) {
        const int64_t after = segment_.first_unit + segment_.units, last = after < end ? after : end;
        begin(static_cast<int32_t>(unit - segment_.first_unit), static_cast<int32_t>(last - segment_.first_unit));
        load_queries();
        walk();
        const bool is_whole = unit == segment_.first_unit && last == after;
        store(is_whole ? nullptr : piece_at<kTile>(work_, place_of_piece(work_, workers, worker, segment_.first_unit)));
        __syncthreads();  // before memory is used for another piece
        unit = last;
        if (unit < end) next_segment<kTile>(work_, segment_);
      }
    }
  }

 private:
  __device__ __forceinline__ int32_t thread() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ __forceinline__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x % 32); }
  __device__ __forceinline__ int32_t warp() const { return static_cast<int32_t>(threadIdx.x / 32); }

  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(arguments_.group_divider.divisor); }
  __device__ __forceinline__ int32_t row_count() const { return segment_.request.queries * group(); }
  __device__ __forceinline__ Row row_at(int32_t row) const {
    const int32_t query = static_cast<int32_t>(divide(static_cast<uint32_t>(row), arguments_.group_divider));
    return {query, row - query * group()};
  }
  __device__ __forceinline__ KeyRange range_of(int32_t row) const {
    return keys_seen(arguments_, segment_.request, segment_.request.position(row_at(row).query));
  }

  __device__ __forceinline__ void begin(int32_t first_unit, int32_t last_unit) {
    first_row_ = segment_.row_tile * kRows;
    last_row_ = min(first_row_ + kRows, row_count()) - 1;
    const KeyRange oldest = range_of(first_row_), newest = range_of(last_row_);
    all_first_ = newest.first;
    all_last_ = min(oldest.last, newest.last);
    const int32_t start = oldest.first / kKeys, end = (max(oldest.last, newest.last) + kKeys - 1) / kKeys;
    first_step_ = min(end, start + first_unit * work_.unit_tiles);
    last_step_ = min(end, start + last_unit * work_.unit_tiles);
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      largest_[i] = tile::minus_infinity();
      sum_[i] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (float& value : output_[m]) value = 0.0f;
    }
  }

  // Columns of the latent part stand as a thread's words of codes want them: four neighbours are its two pairs.
  static __device__ __forceinline__ int32_t query_column(int32_t place) {
    if (!kCodes || place >= kTile.value_size) return place;
    const int32_t inside = place % 16;
    return place - inside + inside % 8 / 2 * 4 + inside / 8 * 2 + inside % 2;
  }
  __device__ __forceinline__ void load_queries() {
    constexpr int kPairs = kTile.size / 2;
    for (int i = thread(); i < kRows * kPairs; i += kThreadCount) {
      const int32_t row = first_row_ + i / kPairs, place = i % kPairs * 2, column = query_column(place);
      const float power = place < kTile.value_size ? Power::kQuery : 1.0f;
      float pair[2] = {};
      if (row <= last_row_) {
        const Row at = row_at(row);
        const Element* from = static_cast<const Element*>(arguments_.query) +
                              (segment_.request.first_query + at.query) * arguments_.query_token_stride +
                              at.head * arguments_.query_head_stride;
        pair[0] = tile::to_float<Element>(from[column]) * power;
        pair[1] = tile::to_float<Element>(from[column + 1]) * power;
      }
      *reinterpret_cast<uint32_t*>(queries() + i / kPairs * kQueryPitch + place * 2) = tile::Word<Element>::pack(pair);
    }
  }

  __device__ __forceinline__ int32_t load_page(int32_t step) const {
    const int32_t key = step * kKeys + thread();
    const bool is_there = thread() < kKeys && step < last_step_ && key < segment_.request.keys;
    return is_there ? page_of(arguments_, segment_.request, key) : -1;
  }
  __device__ __forceinline__ void keep_page(int32_t step, int32_t page) const {
    if (thread() >= kKeys) return;
    const int32_t row = row_in_page(arguments_, step * kKeys + thread());
    pages(step)[thread()] = page;
    offsets(step, 0)[thread()] = offset_in(arguments_.key, max(page, 0), row, 0) * static_cast<int64_t>(sizeof(Cache));
    offsets(step, 1)[thread()] = offset_in(arguments_.value, max(page, 0), row, 0) * 2;
  }

  template <int kUnits, int kPitch>
  __device__ __forceinline__ void copy_rows(const void* data, int which, int32_t step, char* to) const {
#pragma unroll 4
    for (int i = thread(); i < kKeys * kUnits; i += kThreadCount) {
      const int row = i / kUnits, unit = i % kUnits;
      ptx::cp_async_cg_shared_global_16_fill(ptx::shared_address(to) + row * kPitch + unit * 16,
                                             static_cast<const char*>(data) + offsets(step, which)[row] + unit * 16,
                                             pages(step)[row] < 0 ? 0 : 16);
    }
  }
  __device__ __forceinline__ void copy_step(int32_t step) const {
    if (step < last_step_) {
      copy_rows<kTile.value_size* static_cast<int>(sizeof(Cache)) / 16, kLatentPitch>(arguments_.key.data, 0, step,
                                                                                      stage(step));
      copy_rows<kRope * 2 / 16, kRopePitch>(arguments_.value.data, 1, step, rope(step));
      if constexpr (kCodes) {
        const CacheArguments& cache = arguments_.key;
        for (int i = thread(); i < kKeys * kCopies; i += kThreadCount) {
          const int32_t page = pages(step)[i / kCopies], row = row_in_page(arguments_, step * kKeys + i / kCopies);
          const float* from = cache.scales + max(page, 0) * cache.scale_page_stride + row * cache.scale_row_stride +
                              i % kCopies * cache.scale_head_stride;
          ptx::cp_async_ca_shared_global_4_fill(ptx::shared_address(scales(step) + i), from, page < 0 ? 0 : 4);
        }
      }
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void walk() {
    for (int i = 0; i < kStages; ++i) keep_page(first_step_ + i, load_page(first_step_ + i));
    int32_t page = load_page(first_step_ + kStages);
    __syncthreads();  // queries and pages are there
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) copy_step(first_step_ + i);
    for (int32_t step = first_step_; step < last_step_; ++step) {
      ptx::cp_async_wait_group<kStages - 2>();
      __syncthreads();  // this step has come, all are done with the one before it
      copy_step(step + kStages - 1);
      keep_page(step + kStages, page);
      page = load_page(step + kStages + 1);
      multiply_keys(step);
      __syncthreads();
      soften(step);
      __syncthreads();
      multiply_values(step);
    }
    ptx::cp_async_wait_group<0>();
  }

  // Scores of eight keys of this warp with all rows; where two warps share keys, each has half of the latent columns
  // and the first the rope columns too.
  __device__ __forceinline__ void multiply_keys(int32_t step) {
    constexpr int kOwnChunks = kLatentChunks / kSplits;
    const int32_t key = warp() % kKeyTiles * 8, split = warp() / kKeyTiles, first = split * kOwnChunks;
    float score[kRowTiles][4] = {}, part[kRowTiles][4] = {};
    const uint32_t queries = ptx::shared_address(this->queries()) + lane() % 16 * kQueryPitch + lane() / 16 * 16;
    const uint32_t latent = ptx::shared_address(stage(step)) + first * kChunk * static_cast<int>(sizeof(Cache));
#pragma unroll
    for (int chunk = 0; chunk < kOwnChunks; ++chunk) {
      multiply_chunk<kCodes, kLatentPitch>(
          score, part, queries + (first + chunk) * kChunk * 2,
          latent + key * kLatentPitch + chunk * kChunk * static_cast<int>(sizeof(Cache)));
      if (kCodes && chunk % 2 == 1) {
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          factors[i] = scales(step)[(key + lane() % 4 * 2 + i) * kCopies + (first + chunk) / 2] * Power::kScore;
        }
        add_part(score, part, factors);
      }
    }
    if (split == 0) {
      multiply_chunk<false, kRopePitch>(score, part, queries + kTile.value_size * 2,
                                        ptx::shared_address(rope(step)) + key * kRopePitch);
    }
    add_part(score, part, {1.0f, 1.0f});
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = scores() + (split * kRows + m * 16 + lane() / 4 + 8 * half) * kScorePitch + key + lane() % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(score[m][2 * half], score[m][2 * half + 1]);
      }
    }
  }
  // 64 columns. Codes of 128 columns are added apart, in `part`; of numbers two sums shorten the chain of products.
  template <bool kAreCodes, int kPitch>
  __device__ __forceinline__ void multiply_chunk(float (&score)[kRowTiles][4], float (&part)[kRowTiles][4],
                                                 uint32_t queries, uint32_t keys) const {
#pragma unroll
    for (int pair = 0; pair < kChunk / 32; ++pair) {
      uint32_t right[4];
      if constexpr (kAreCodes) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t codes =
              __float_as_uint(ptx::ld_shared_f32(keys + lane() / 4 * kPitch + pair * 32 + i * 16 + lane() % 4 * 4));
          right[2 * i] = numbers_of<Element>(__byte_perm(codes, 0, 0x1404));
          right[2 * i + 1] = numbers_of<Element>(__byte_perm(codes, 0, 0x3424));
        }
      } else {
        ptx::ldmatrix_x4(right, keys + lane() % 8 * kPitch + pair * 64 + lane() / 8 * 16);
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t fragment[4];
          ptx::ldmatrix_x4(fragment, queries + m * 16 * kQueryPitch + (pair * 32 + i * 16) * 2);
          tile::multiply_fragments<Element>(kAreCodes || i == 1 ? part[m] : score[m], fragment, right[2 * i],
                                            right[2 * i + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ static void add_part(float (&score)[kRowTiles][4], float (&part)[kRowTiles][4],
                                                  const float (&factors)[2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[m][i] = fmaf(part[m][i], factors[i % 2], score[m][i]);
        part[m][i] = 0.0f;
      }
    }
  }

  // Scores become weights, row by row.
  __device__ __forceinline__ void soften(int32_t step) {
    const int32_t first_key = step * kKeys;
    const bool is_inside = first_key >= all_first_ && first_key + kKeys <= all_last_;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int32_t row = warp() * kRowsOfWarp + i;
      const KeyRange range = is_inside ? KeyRange{0, 0x7fffffff} : range_of(min(first_row_ + row, last_row_));
      float score[kPerLane], largest = tile::minus_infinity();
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int32_t place = lane() + 32 * j, key = first_key + place;
        score[j] = scores()[row * kScorePitch + place];
        if constexpr (kSplits == 2) score[j] += scores()[(kRows + row) * kScorePitch + place];
        score[j] *= arguments_.scale * tile::kLog2E;
        if (pages(step)[place] < 0 || key < range.first || key >= range.last) score[j] = tile::minus_infinity();
        largest = fmaxf(largest, score[j]);
      }
      largest = fmaxf(largest_[i], tile::max_lanes<32>(largest));
      const float base = largest == tile::minus_infinity() ? 0.0f : largest;
      const float shrink = ptx::ex2_approx_ftz_f32(largest_[i] - base);
      largest_[i] = largest;
      sum_[i] *= shrink;
      if (lane() == 0) rescale()[row] = shrink;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int32_t place = lane() + 32 * j;
        const float weight = ptx::ex2_approx_ftz_f32(score[j] - base);
        sum_[i] += weight;
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          float scaled = weight;
          if constexpr (kCodes) scaled *= scales(step)[place * kCopies + copy] * Power::kWeight;
          *reinterpret_cast<Element*>(weights() + (copy * kRows + row) * kWeightPitch + place * 2) =
              tile::from_float<Element>(scaled);
        }
      }
    }
  }

  // Columns of this warp.
  __device__ __forceinline__ void multiply_values(int32_t step) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float factors[2] = {rescale()[m * 16 + lane() / 4], rescale()[m * 16 + lane() / 4 + 8]};
      if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) output_[m][i] *= factors[i / 2 % 2];
      }
    }
    const int32_t copy = kCodes ? warp() * kColumns / 128 : 0;
    const uint32_t left =
        ptx::shared_address(weights()) + (copy * kRows + lane() % 16) * kWeightPitch + lane() / 16 * 16;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t row = ptx::shared_address(stage(step)) + (k * 16 + lane() % 16) * kLatentPitch +
                           warp() * kColumns * static_cast<int>(sizeof(Cache)) + lane() / 16 * 16;
      uint32_t fragment[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix_x4(fragment[m], left + m * 16 * kWeightPitch + k * 32);
#pragma unroll
      for (int n = 0; n < kColumns * static_cast<int>(sizeof(Cache)) / 32; ++n) {
        uint32_t right[4];
        ptx::ldmatrix_x4_trans(right, row + n * 32);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          auto* groups = reinterpret_cast<float(*)[4]>(output_[m]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const uint32_t lower = right[2 * j], upper = right[2 * j + 1];
            if constexpr (kCodes) {
              tile::multiply_fragments<Element>(groups[n * 4 + 2 * j], fragment[m], numbers_of<Element>(lower << 8),
                                                numbers_of<Element>(upper << 8));
              tile::multiply_fragments<Element>(groups[n * 4 + 2 * j + 1], fragment[m], numbers_of<Element>(lower),
                                                numbers_of<Element>(upper));
            } else {
              tile::multiply_fragments<Element>(groups[2 * n + j], fragment[m], lower, upper);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(float* piece) {
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const float sum = tile::sum_lanes<32>(sum_[i]);
      if (lane() != 0) continue;
      largests()[warp() * kRowsOfWarp + i] = largest_[i];
      sums()[warp() * kRowsOfWarp + i] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t place = m * 16 + lane() / 4 + 8 * half;
        if (first_row_ + place > last_row_) continue;
        const Row at = row_at(first_row_ + place);
        const int32_t token = segment_.request.first_query + at.query;
        const bool leads = warp() == 0 && lane() % 4 == 0;
        float factor = 1.0f;
        if (piece == nullptr) {
          const float lse = finish_row(arguments_, at.head, largests()[place], sums()[place], factor);
          if (leads && arguments_.lse != nullptr) arguments_.lse[at.head * arguments_.tokens + token] = lse;
        } else if (leads) {
          piece[kRows * kTile.value_size + place] = largests()[place];
          piece[kRows * (kTile.value_size + 1) + place] = sums()[place];
        }
        factor *= Power::kOutput;
        Element* output = static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                          at.head * arguments_.output_head_stride;
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) {
          if (i / 2 % 2 != half) continue;
          const int32_t column = warp() * kColumns + value_column<Cache>(lane(), i);
          if (piece == nullptr) {
            output[column] = tile::from_float<Element>(output_[m][i] * factor);
          } else {
            piece[place * kTile.value_size + column] = output_[m][i] * factor;
          }
        }
      }
    }
  }

  const WorkArguments& work_;
  const AttendArguments& arguments_;
  Segment segment_;
  int32_t first_row_, last_row_, first_step_, last_step_, all_first_, all_last_;
  float largest_[kRowsOfWarp], sum_[kRowsOfWarp];
  float output_[kRowTiles][kColumns / 2];
};

template <class Element, class Cache, Tile kTile>
__global__ void __launch_bounds__(32 * kTile.warps, latent_blocks(kTile))
    attend_latent(const __grid_constant__ WorkArguments work) {
  extern __shared__ __align__(16) char shared[];
  LatentAttention<Element, Cache, kTile>(work, shared).run();
}

}  // namespace kernel_pytorch::paged_attention
