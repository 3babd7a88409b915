// The gradients of a chunk, of the state S in front of it, the gradient D of the state behind it, the errors E, dU and
// dV, which the scans left (chunk.cuh, gradient.cuh). A block takes one chunk of one head. With q and k normalised, q
// with the scale, U = beta E, and for s < t X = (dO E^T)_ts beta_s e^(G_t - G_s), Z = -(dV E^T)_ts beta_s e^(G_t -
// G_s):
//
//   dq = e^G dO S^T + X k;   dk = [Z k - e^G dV S^T] + [X^T q + Z^T k + e^(G_last - G) beta E D^T]
//   dbeta_t = dU_t E_t - sum over s > t of A'_st (dV E^T)_st
//
// and the diagonal of dO E^T beta, which no gate reaches. The gradient of the gate of t is the sum over its and later
// tokens of q dq + k [read] - k [written], and of the state behind the chunk times D. sm_80.
#pragma once

#include "kernel_pytorch/ops/linear_attention/delta/sm90/finish_parts.cuh"

namespace kernel_pytorch::linear_attention::delta {

template <class T, int kWidth>
class ChunkGradient {
  static constexpr int kPitch = prepared_row_bytes(kWidth), kHalf = kWidth / 2, kGroups = kHalf / 8;
  using Columns = float[kGroups][4];  // a warp's 16 rows and half of the columns
  using Tokens = float[4][4];         // a warp's 16 rows and half of the tokens

 public:
  struct Shared {
    float sums[kChunkTokens], beta[kChunkTokens], key_norms[kChunkTokens], query_norms[kChunkTokens];
    float diagonal[kChunkTokens], column_sums[4][kChunkTokens], row_sums[3][2][kChunkTokens];
    float parts[kGradientThreads], state_sums[kGradientThreads / 32];
  };

  __device__ __forceinline__ ChunkGradient(const GradientArguments& arguments, const ChunkPlace& place, Shared& shared,
                                           unsigned char* memory)
      : arguments_(arguments),
        place_(place),
        shared_(shared),
        memory_(memory),
        keys_(ptx::shared_address(memory)),
        queries_(keys_ + kChunkTokens * kPitch),
        stages_(queries_ + kChunkTokens * kPitch),
        head_(static_cast<int>(blockIdx.x % arguments.heads)),
        lane_(threadIdx.x % 32),
        rows_(threadIdx.x / 32 % 4),
        half_(threadIdx.x / 128) {}

  __device__ __forceinline__ void run() {
    const int tiles = (arguments_.values + kGroupValues - 1) / kGroupValues;
    load_rows<T, kWidth, kGradientThreads>(arguments_.key, place_, head_, arguments_.columns, keys_);
    load_rows<T, kWidth, kGradientThreads>(arguments_.query, place_, head_, arguments_.columns, queries_);
    load_stage<T, kWidth>(arguments_, place_, head_, 0, tiles, stages_);
    if (threadIdx.x < 32) sum_gates<T>(arguments_, place_, head_, shared_.sums);
    if (threadIdx.x >= kGradientThreads - kChunkTokens) {
      const int row = threadIdx.x - (kGradientThreads - kChunkTokens);
      shared_.beta[row] =
          row < place_.count ? element_of<T>(arguments_.beta, place_.batch, place_.first + row, head_, 0) : 0.0f;
      shared_.key_norms[row] = shared_.query_norms[row] = 1;
    }
    Columns grad_query = {}, read = {}, written = {};
    Tokens of_output = {}, of_values = {};
    float error_sum = 0, state_sum = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles) {
        load_stage<T, kWidth>(arguments_, place_, head_, tile + 1, tiles, stages_);
        ptx::cp_async_wait_group<1>();
      } else {
        ptx::cp_async_wait_group<0>();
      }
      __syncthreads();
      multiply_values(tile, grad_query, read, written, of_output, of_values);
      add_dots(tile, error_sum, state_sum);
      __syncthreads();
    }
    if (arguments_.normalizes) {
      inverse_norms<T, kWidth, kGradientThreads>(memory_, shared_.parts, shared_.key_norms);
      inverse_norms<T, kWidth, kGradientThreads>(memory_ + kChunkTokens * kPitch, shared_.parts, shared_.query_norms);
    }
    weigh(of_output, of_values);
    state_sum *= ptx::ex2_approx_ftz_f32(shared_.sums[kChunkTokens - 1]);
    scale(grad_query, read, written, state_sum);
    __syncthreads();
    multiply_tokens(grad_query, read, written);
    sum_rows(grad_query, read, written, state_sum);
    __syncthreads();  // keys and queries are read but for what a thread itself replaces
    store(grad_query, read, written, error_sum);
  }

 private:
  static constexpr int kMatrixPitch = kGradientPitch;
  __device__ __forceinline__ uint32_t matrix(int which) const {
    return stages_ + which * kChunkTokens * kMatrixPitch;
  }
  // Token and column of an accumulator.
  __device__ __forceinline__ int row_of_sum(int i) const {
    return 16 * rows_ + lane_ / 4 + i / 2 * 8;
  }
  __device__ __forceinline__ int column_of_sum(int group, int i) const {
    return half_ * kHalf + 8 * group + lane_ % 4 * 2 + i % 2;
  }
  __device__ __forceinline__ T* element(int which, int row, int column) const {
    return reinterpret_cast<T*>(memory_ + which * kChunkTokens * kPitch + row * kPitch) + column;
  }
  __device__ __forceinline__ float key_at(int row, int column) const {
    return tile::to_float<T>(*element(0, row, column));
  }
  __device__ __forceinline__ float query_at(int row, int column) const {
    return tile::to_float<T>(*element(1, row, column));
  }

  __device__ __forceinline__ void multiply_values(int tile, Columns& grad_query, Columns& read, Columns& written,
                                                  Tokens& of_output, Tokens& of_values) {
    const GradientStage stage(stages_ + tile % 2 * gradient_stage_bytes(kWidth), kWidth);
#pragma unroll 1
    for (int value = 0; value < kGroupValues; value += 16) {
      uint32_t output[4], values[4], errors[4], others[4];
      load_fragment<false, kGradientPitch>(output, stage.grad_output, 16 * rows_, value);
      load_fragment<false, kGradientPitch>(values, stage.grad_value, 16 * rows_, value);
      load_fragment<false, kGradientPitch>(errors, stage.errors, 16 * rows_, value);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        load_fragment<true, kGradientPitch>(others, stage.errors, 32 * half_ + 16 * block, value);
        multiply_pair<T>(of_output[2 * block], of_output[2 * block + 1], output, others);
        multiply_pair<T>(of_values[2 * block], of_values[2 * block + 1], values, others);
      }
#pragma unroll
      for (int block = 0; block < kGroups / 2; ++block) {
        const int row = half_ * kHalf + 16 * block;
        load_fragment<true, kGradientPitch>(others, stage.states, row, value);
        multiply_pair<T>(grad_query[2 * block], grad_query[2 * block + 1], output, others);
        multiply_pair<T>(read[2 * block], read[2 * block + 1], values, others);
        load_fragment<true, kGradientPitch>(others, stage.grad_states, row, value);
        multiply_pair<T>(written[2 * block], written[2 * block + 1], errors, others);
      }
    }
  }

  // dU E of a thread's quarter of row threadIdx.x / 4, and S D of its elements.
  __device__ __forceinline__ void add_dots(int tile, float& error_sum, float& state_sum) {
    const GradientStage stage(stages_ + tile % 2 * gradient_stage_bytes(kWidth), kWidth);
    const auto dot = [](uint32_t one, uint32_t other) {
      float of_one[8], of_other[8], sum = 0;
      tile::load_from_shared<T>(one).unpack(of_one);
      tile::load_from_shared<T>(other).unpack(of_other);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += of_one[i] * of_other[i];
      return sum;
    };
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int place = thread / 4 * kGradientPitch + (thread % 4 * 2 + i) * 16;
      error_sum += dot(stage.grad_writes + place, stage.errors + place);
    }
    for (int i = thread; i < kWidth * 8; i += kGradientThreads) {
      const int place = i / 8 * kGradientPitch + i % 8 * 16;
      state_sum += dot(stage.states + place, stage.grad_states + place);
    }
  }

  // X and Z into shared memory, each with the factors of its two uses; the diagonal; what A' gives to betas.
  __device__ __forceinline__ void weigh(const Tokens& of_output, const Tokens& of_values) {
    Tokens of_keys = {};
#pragma unroll 1
    for (int column = 0; column < kWidth; column += 16) {
      uint32_t own[4], others[4];
      load_fragment<false, kPitch>(own, keys_, 16 * rows_, column);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        load_fragment<true, kPitch>(others, keys_, 32 * half_ + 16 * block, column);
        multiply_pair<T>(of_keys[2 * block], of_keys[2 * block + 1], own, others);
      }
    }
#pragma unroll
    for (int group = 0; group < 4; ++group) {
      float column_sums[2] = {};
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int t = row_of_sum(i);
        float pairs[4][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int s = 32 * half_ + 8 * group + lane_ % 4 * 2 + k;
          const float decay = s < t ? ptx::ex2_approx_ftz_f32(shared_.sums[t] - shared_.sums[s]) : 0.0f;
          const float x = of_output[group][i + k] * shared_.beta[s], z = -of_values[group][i + k] * shared_.beta[s];
          const float key_t = shared_.key_norms[t], key_s = shared_.key_norms[s];
          if (s == t) shared_.diagonal[t] = x;
          if (s < t) column_sums[k] += key_t * key_s * decay * of_keys[group][i + k] * of_values[group][i + k];
          pairs[0][k] = s < t ? x * decay * key_s : 0.0f;
          pairs[1][k] = s < t ? x * decay * arguments_.scale * shared_.query_norms[t] : 0.0f;
          pairs[2][k] = s < t ? z * decay * key_s : 0.0f;
          pairs[3][k] = s < t ? z * decay * key_t : 0.0f;
        }
        const int column = 32 * half_ + 8 * group + lane_ % 4 * 2;
#pragma unroll
        for (int which = 0; which < 4; ++which) {
          unsigned char* to = memory_ + (matrix(which) - keys_) + t * kMatrixPitch + column * 2;
          *reinterpret_cast<uint32_t*>(to) = tile::Word<T>::pack(pairs[which]);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          column_sums[k] += __shfl_xor_sync(0xffffffffu, column_sums[k], distance);
        }
        if (lane_ < 4) shared_.column_sums[rows_][32 * half_ + 8 * group + lane_ * 2 + k] = column_sums[k];
      }
    }
  }

  // Factors of rows, and what this chunk's writes add to the state times its gradient.
  __device__ __forceinline__ void scale(Columns& grad_query, Columns& read, Columns& written, float& state_sum) {
    const float last = shared_.sums[kChunkTokens - 1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of_sum(i);
      const float into = ptx::ex2_approx_ftz_f32(shared_.sums[row]);
      const float out = shared_.beta[row] * ptx::ex2_approx_ftz_f32(last - shared_.sums[row]);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        grad_query[group][i] *= into;
        read[group][i] *= -into;
        written[group][i] *= out;
        state_sum += shared_.key_norms[row] * key_at(row, column_of_sum(group, i)) * written[group][i];
      }
    }
  }

  __device__ __forceinline__ void multiply_tokens(Columns& grad_query, Columns& read, Columns& written) {
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
      uint32_t first[4], second[4], of_keys[4], of_queries[4];
      if (step <= rows_) {
        load_fragment<false, kMatrixPitch>(first, matrix(0), 16 * rows_, 16 * step);
        load_fragment<false, kMatrixPitch>(second, matrix(2), 16 * rows_, 16 * step);
#pragma unroll
        for (int block = 0; block < kGroups / 2; ++block) {
          load_turned<true, kPitch>(of_keys, keys_, 16 * step, half_ * kHalf + 16 * block);
          multiply_pair<T>(grad_query[2 * block], grad_query[2 * block + 1], first, of_keys);
          multiply_pair<T>(read[2 * block], read[2 * block + 1], second, of_keys);
        }
      }
      if (step >= rows_) {
        load_turned<false, kMatrixPitch>(first, matrix(1), 16 * step, 16 * rows_);
        load_turned<false, kMatrixPitch>(second, matrix(3), 16 * step, 16 * rows_);
#pragma unroll
        for (int block = 0; block < kGroups / 2; ++block) {
          load_turned<true, kPitch>(of_queries, queries_, 16 * step, half_ * kHalf + 16 * block);
          load_turned<true, kPitch>(of_keys, keys_, 16 * step, half_ * kHalf + 16 * block);
          multiply_pair<T>(written[2 * block], written[2 * block + 1], first, of_queries);
          multiply_pair<T>(written[2 * block], written[2 * block + 1], second, of_keys);
        }
      }
    }
  }

  // The gate's terms of each row, then with the diagonal what lies along the row itself.
  __device__ __forceinline__ void sum_rows(Columns& grad_query, Columns& read, Columns& written, float state_sum) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int row = row_of_sum(2 * high);
      const float of_key = shared_.key_norms[row], of_query = shared_.query_norms[row],
                  diagonal = shared_.diagonal[row];
      float sums[3] = {};
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 2 * high; i < 2 * high + 2; ++i) {
          const int column = column_of_sum(group, i);
          const float k = of_key * key_at(row, column), normed = of_query * query_at(row, column);
          const float q = arguments_.scale * normed;
          sums[0] += q * grad_query[group][i] + k * (read[group][i] - written[group][i]);
          grad_query[group][i] = arguments_.scale * (grad_query[group][i] + diagonal * k);
          read[group][i] += written[group][i] + diagonal * q;
          sums[1] += normed * grad_query[group][i];
          sums[2] += k * read[group][i];
        }
      }
#pragma unroll
      for (int which = 0; which < 3; ++which) {
        sums[which] += __shfl_xor_sync(0xffffffffu, sums[which], 1);
        sums[which] += __shfl_xor_sync(0xffffffffu, sums[which], 2);
        if (lane_ % 4 == 0) shared_.row_sums[which][half_][row] = sums[which];
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      state_sum += __shfl_xor_sync(0xffffffffu, state_sum, distance);
    }
    if (lane_ == 0) shared_.state_sums[threadIdx.x / 32] = state_sum;
  }

  __device__ __forceinline__ void store(Columns& grad_query, Columns& grad_key, Columns&, float error_sum) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int row = row_of_sum(i);
      const float of_key = shared_.key_norms[row], of_query = shared_.query_norms[row];
      float along[2] = {};
      if (arguments_.normalizes) {
        along[0] = shared_.row_sums[2][0][row] + shared_.row_sums[2][1][row];
        along[1] = shared_.row_sums[1][0][row] + shared_.row_sums[1][1][row];
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float of_keys[2], of_queries[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int column = column_of_sum(group, i + k);
          of_keys[k] = of_key * (grad_key[group][i + k] - of_key * key_at(row, column) * along[0]);
          of_queries[k] = of_query * (grad_query[group][i + k] - of_query * query_at(row, column) * along[1]);
        }
        const int column = column_of_sum(group, i);
        *reinterpret_cast<uint32_t*>(element(0, row, column)) = tile::Word<T>::pack(of_keys);
        *reinterpret_cast<uint32_t*>(element(1, row, column)) = tile::Word<T>::pack(of_queries);
      }
    }
    error_sum += __shfl_xor_sync(0xffffffffu, error_sum, 1);
    error_sum += __shfl_xor_sync(0xffffffffu, error_sum, 2);
    const int64_t first = (place_.batch * arguments_.tokens + place_.first) * arguments_.heads + head_;
    const int token = threadIdx.x / 4;
    if (threadIdx.x % 4 == 0 && token < place_.count) {
      for (int rows = 0; rows < 4; ++rows) error_sum -= shared_.column_sums[rows][token];
      put_gradient<T>(arguments_.grad_beta, arguments_.beta_is_float, first + token * arguments_.heads, error_sum);
    }
    if (threadIdx.x < 32 && arguments_.grad_gate != nullptr) store_gates(first);
    __syncthreads();
    constexpr int kUnits = kWidth / 8;
    for (int i = threadIdx.x; i < place_.count * kUnits; i += kGradientThreads) {
      const int row = i / kUnits, unit = i % kUnits;
      if (unit * 8 >= arguments_.columns) continue;
      const int64_t to = (first + static_cast<int64_t>(row) * arguments_.heads) * arguments_.columns + unit * 8;
      const auto copy = [&](int which, void* gradient) {
        *reinterpret_cast<ptx::Word4*>(static_cast<T*>(gradient) + to) =
            *reinterpret_cast<const ptx::Word4*>(element(which, row, unit * 8));
      };
      copy(0, arguments_.grad_key);
      copy(1, arguments_.grad_query);
    }
  }

  // Sums from the last token back, two of a lane.
  __device__ __forceinline__ void store_gates(int64_t first) const {
    float terms[2], behind = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      terms[k] = shared_.row_sums[0][0][2 * lane_ + k] + shared_.row_sums[0][1][2 * lane_ + k];
    }
    for (const float sum : shared_.state_sums) behind += sum;
    float sum = terms[0] + terms[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, sum, distance);
      if (lane_ + distance < 32) sum += other;
    }
    sum += behind;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int token = 2 * lane_ + k;
      // Nothing decays in front of a sequence's first token.
      const bool is_nothing = token == 0 && place_.begins && !arguments_.has_initial;
      if (token < place_.count) {
        put_gradient<T>(arguments_.grad_gate, arguments_.gate_is_float,
                        first + static_cast<int64_t>(token) * arguments_.heads, is_nothing ? 0.0f : sum);
      }
      sum -= terms[0];
    }
  }

  const GradientArguments& arguments_;
  const ChunkPlace& place_;
  Shared& shared_;
  unsigned char* memory_;
  uint32_t keys_, queries_, stages_;
  int head_, lane_, rows_, half_;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kGradientThreads, 1)
    finish_chunks(const __grid_constant__ GradientArguments arguments) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ typename ChunkGradient<T, kWidth>::Shared shared;
  const ChunkPlace place = place_of_slot(arguments, blockIdx.x / arguments.heads);
  if (place.count == 0) return;
  ChunkGradient<T, kWidth>(arguments, place, shared, memory).run();
}

}  // namespace kernel_pytorch::linear_attention::delta
