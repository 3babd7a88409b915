// Quantising on the GPU. A block holds a tile of 128 x 128 in registers, a thread 4 x 8 of it, read once: magnitudes of
// rows and columns meet in shared memory where a block of scales needs them, codes leave row by row, and the transposed
// codes through shared memory, whose 16-byte pieces are exchanged so that neither side meets a bank twice. FP8
// conversions are the hardware's, from sm_89.
#pragma once

#include "kernel_pytorch/cuda/tile/dependent_launch.cuh"
#include "kernel_pytorch/ops/quantize/cuda/producer.cuh"

namespace kernel_pytorch::quantize {

struct Shared {
  uint32_t rows[kWarpsAcross][kTile];  // magnitudes by the warps that have the row
  uint32_t columns[kWarpsDown][kTile];
  uint32_t warps[kWarps];
  float row_inverses[kTile], column_inverses[kTile];
  alignas(kPiece) uint8_t transposed[kTile * kTile];
};

// Bits of the largest finite magnitudes into shared memory: of the warp, and where asked for of its rows and columns. A
// barrier must follow. Whether all was finite; where it was not, magnitudes are those of kFinite alone.
template <bool kFinite, class Tile>
__device__ __forceinline__ bool measure_warp(const Tile& tile, const Place& place, bool by_row_and_column,
                                             Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float columns[kColumns] = {}, largest = 0, poison = 0;  // zero times infinity, or NaN, is NaN and stays it
#pragma unroll Tile::kUnrolled
  for (int i = 0; i < kRows; ++i) {
    float values[kColumns];
    tile.unpack(i, values);
    float row = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float magnitude = fabsf(values[j]);
      if (kFinite && !(magnitude < __uint_as_float(kInfinityBits))) magnitude = 0;
      poison = fmaf(values[j], 0.0f, poison);
      row = fmaxf(row, magnitude);
      columns[j] = fmaxf(columns[j], magnitude);
    }
    largest = fmaxf(largest, row);
    if (by_row_and_column) {
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, distance));
      if (lane % 8 == 0) shared.rows[warp % kWarpsAcross][place.row + i] = __float_as_uint(row);
    }
  }
  if (by_row_and_column) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float column = columns[j];
#pragma unroll
      for (int distance = 8; distance < 32; distance *= 2) {
        column = fmaxf(column, __shfl_xor_sync(0xffffffffu, column, distance));
      }
      if (lane / 8 == 0) shared.columns[warp / kWarpsAcross][place.column + j] = __float_as_uint(column);
    }
  }
  const uint32_t all = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
  if (lane == 0) shared.warps[warp] = all;
  return __all_sync(0xffffffffu, poison == poison);
}
// A second visit, of a warp that has met an infinity or a NaN, reads memory: registers are for the others. What is made
// cannot be read again, and is asked at once.
template <class T, Source kSource, class Tile>
__device__ __forceinline__ bool measure_tile(const Input& input, const Tile& tile, int32_t row, int32_t column,
                                             const Place& place, bool by_row_and_column, Shared& shared) {
  if constexpr (kSource != Source::kGiven) return measure_warp<true>(tile, place, by_row_and_column, shared);
  if (measure_warp<false>(tile, place, by_row_and_column, shared)) return true;
  const ThreadTile<T, false> again(input, row, column);
  measure_warp<true>(again, place, by_row_and_column, shared);
  return false;
}
__device__ __forceinline__ uint32_t row_magnitude(const Shared& shared, int row) {
  return max(shared.rows[0][row], shared.rows[1][row]);
}
__device__ __forceinline__ uint32_t column_magnitude(const Shared& shared, int column) {
  uint32_t magnitude = 0;
#pragma unroll
  for (int i = 0; i < kWarpsDown; ++i) magnitude = max(magnitude, shared.columns[i][column]);
  return magnitude;
}
__device__ __forceinline__ uint32_t tile_magnitude(const Shared& shared) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) all = max(all, shared.warps[i]);
  return all;
}

// First element of a block's tile: down a group of row tiles, then to the right.
struct Corner {
  int32_t row, column;
};
__device__ __forceinline__ Corner corner_of(const Arguments& arguments) {
  const uint32_t block = arguments.from_the_end ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t per_group = arguments.group * arguments.column_tiles;
  const uint32_t group = block / per_group, rest = block - group * per_group;
  const uint32_t first = group * arguments.group, height = min(arguments.group, arguments.row_tiles - first);
  const uint32_t at = rest / height;
  const uint32_t column = arguments.in_pairs ? at / 2 + at % 2 * (arguments.column_tiles / 2) : at;
  return {static_cast<int32_t>(first + rest - at * height) * kTile, static_cast<int32_t>(column) * kTile};
}

// Inverse scales of the tile's rows and columns in shared memory, for the modes that have several; the scales are
// written by whose they are. Ends with a barrier.
__device__ __forceinline__ void compute_scales(const Arguments& arguments, const Corner& corner, Shared& shared) {
  if (threadIdx.x < 2 * kTile) {
    const Mode mode = arguments.mode;
    const bool is_row = threadIdx.x < kTile;
    const int index = threadIdx.x % kTile;
    const int64_t first = is_row ? corner.row : corner.column, across = (is_row ? corner.column : corner.row) / kTile;
    int64_t at = first + index, block = across;
    bool writes = at < (is_row ? arguments.input.rows : arguments.input.columns);
    uint32_t magnitude = 0;
    if (mode == Mode::kRow) {
      if (writes) magnitude = arguments.measured[(is_row ? 0 : arguments.input.rows) + at];
      writes = writes && across == 0;
      block = 0;
    } else if (mode == Mode::k1x128 || (mode == Mode::k1x128Square && is_row)) {
      magnitude = is_row ? row_magnitude(shared, index) : column_magnitude(shared, index);
    } else {  // one scale of the tile
      magnitude = tile_magnitude(shared);
      writes = index == 0 && is_row == (mode == Mode::k128x128);
      at = first / kTile;
    }
    const float scale = scale_of(__uint_as_float(magnitude), arguments.rule);
    const Scales& scales = is_row ? arguments.scales : arguments.transposed_scales;
    if (writes && scales.data != nullptr) scales.data[at * scales.row_stride + block * scales.block_stride] = scale;
    (is_row ? shared.row_inverses : shared.column_inverses)[index] = 1.0f / scale;
  }
  __syncthreads();
}

template <class Code>
struct FormatOf;
template <>
struct FormatOf<tile::Float8E4M3> {
  static constexpr Format kFormat = kE4M3;
};
template <>
struct FormatOf<tile::Float8E5M2> {
  static constexpr Format kFormat = kE5M2;
};

// Eight codes of a row: two words.
struct CodeRow {
  uint32_t low, high;
};
template <class Code, bool kVectors>
__device__ __forceinline__ CodeRow encode(const float (&values)[kColumns], const Arguments& arguments, int32_t row,
                                          int32_t column) {
  if constexpr (!kVectors) {
    if (arguments.seed != nullptr) {
      constexpr Format kFormat = FormatOf<Code>::kFormat;
      uint32_t words[2] = {0, 0};
      const uint64_t first = static_cast<uint64_t>(row) * arguments.input.columns + column;
      PhiloxBlock block = philox(arguments.seed[0], arguments.seed[1], first / kPhiloxElements);
#pragma unroll 1
      for (int j = 0; j < kColumns; ++j) {
        if (j > 0 && (first + j) % kPhiloxElements == 0) {
          block = philox(arguments.seed[0], arguments.seed[1], (first + j) / kPhiloxElements);
        }
        const uint32_t code = stochastic_code(values[j], block.bits((first + j) % kPhiloxElements),
                                              kFormat.mantissa_bits, kFormat.bias, kFormat.largest_code);
        words[j / 4] |= code << (j % 4 * 8);
      }
      return {words[0], words[1]};
    }
  }
  return {tile::Word<Code>::pack(values), tile::Word<Code>::pack(values + 4)};
}

template <bool kVectors>
__device__ __forceinline__ void store_codes(const Arguments& arguments, CodeRow codes, int32_t row, int32_t column) {
  if (row >= arguments.input.rows || column >= arguments.input.columns) return;
  uint8_t* address = arguments.codes + row * arguments.codes_stride + column;
  if constexpr (kVectors) {
    *reinterpret_cast<uint2*>(address) = make_uint2(codes.low, codes.high);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (column + j < arguments.input.columns) address[j] = (j < 4 ? codes.low : codes.high) >> (j % 4 * 8);
    }
  }
}

// Four words of four bytes: words[i] byte j becomes words[j] byte i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t a = __byte_perm(words[0], words[1], 0x5140), b = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t c = __byte_perm(words[2], words[3], 0x5140), d = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(a, c, 0x5410);
  words[1] = __byte_perm(a, c, 0x7632);
  words[2] = __byte_perm(b, d, 0x5410);
  words[3] = __byte_perm(b, d, 0x7632);
}

// A column of the tile lies in 128 bytes; its pieces of 16 change places by the group of 8 columns that it is in.
__device__ __forceinline__ int piece_offset(int column, int piece) {
  return column * kTile + (piece ^ column / kColumns % 8) * kPiece;
}
// One row of a thread, byte by byte; or all rows, transposed in registers.
__device__ __forceinline__ void put_row(CodeRow codes, int row, int column, Shared& shared) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    shared.transposed[piece_offset(column + j, row / kPiece) + row % kPiece] =
        (j < 4 ? codes.low : codes.high) >> (j % 4 * 8);
  }
}
__device__ __forceinline__ void put_rows(const CodeRow (&codes)[kRows], const Place& place, Shared& shared) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) words[i] = half == 0 ? codes[i].low : codes[i].high;
    transpose_bytes(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int offset = piece_offset(place.column + half * 4 + j, place.row / kPiece) + place.row % kPiece;
      *reinterpret_cast<uint32_t*>(shared.transposed + offset) = words[j];
    }
  }
}
template <bool kVectors>
__device__ __forceinline__ void store_transposed(const Arguments& arguments, const Corner& corner,
                                                 const Shared& shared) {
  constexpr int kPieces = kTile / kPiece;
#pragma unroll
  for (int k = 0; k < kTile * kPieces / kThreads; ++k) {
    const int index = threadIdx.x + k * kThreads, column = index / kPieces, piece = index % kPieces;
    const int64_t row = corner.row + piece * kPiece;
    if (corner.column + column >= arguments.input.columns || row >= arguments.input.rows) continue;
    const uint8_t* from = shared.transposed + piece_offset(column, piece);
    uint8_t* to = arguments.transposed + (corner.column + column) * arguments.transposed_stride + row;
    if (kVectors && row + kPiece <= arguments.input.rows) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int i = 0; i < kPiece && row + i < arguments.input.rows; ++i) to[i] = from[i];
    }
  }
}

// Codes of a thread's rows by `factor_of(i, j)`, for whom they are.
template <class Code, bool kVectors, class Tile, class Factor>
__device__ __forceinline__ void cast_rows(const Arguments& arguments, const Tile& tile, const Place& place, int32_t row,
                                          int32_t column, bool stores, bool transposes, Shared& shared,
                                          const Factor& factor_of) {
  CodeRow codes[kRows];
#pragma unroll Tile::kUnrolled
  for (int i = 0; i < kRows; ++i) {
    float values[kColumns];
    tile.unpack(i, values);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) values[j] *= factor_of(i, j);
    const CodeRow code = encode<Code, kVectors>(values, arguments, row + i, column);
    if (stores) store_codes<kVectors>(arguments, code, row + i, column);
    if constexpr (kVectors) {
      codes[i] = code;
    } else if (transposes) {
      put_row(code, place.row + i, place.column, shared);
    }
  }
  if constexpr (kVectors) {
    if (transposes) put_rows(codes, place, shared);
  }
}

// The largest of all parts; every warp for itself, so that none waits.
__device__ __forceinline__ float join_measured(const Arguments& arguments) {
  uint32_t largest = 0;
  for (int i = threadIdx.x % 32; i < arguments.measured_parts; i += 32) largest = max(largest, arguments.measured[i]);
  return __uint_as_float(__reduce_max_sync(0xffffffffu, largest));
}

// Two blocks on a multiprocessor, one reading while the other writes; fp32 needs the registers of one.
template <class T, class Code, bool kVectors, ProducerKind kProducer>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 1 : 2) cast(const __grid_constant__ Arguments arguments) {
  __shared__ Shared shared;
  const Corner corner = corner_of(arguments);
  const Place place;
  const int32_t row = corner.row + place.row, column = corner.column + place.column;
  TileOf<T, kVectors, kProducer> tile(arguments.input, row, column);
  if (arguments.measured != nullptr) tile::wait_for_earlier_kernels();  // x was there before those that measured it
  const bool is_tensor = arguments.mode == Mode::kTensor, reports = arguments.amax != nullptr;
  float inverse = 0;
  if (is_tensor) {
    float scale;
    if (arguments.given_scale != nullptr) {
      scale = *arguments.given_scale;
    } else {
      scale = scale_of(join_measured(arguments), arguments.rule);
      if (blockIdx.x == 0 && threadIdx.x == 0) *arguments.scales.data = scale;
    }
    inverse = 1.0f / scale;
  }
  if (!is_tensor || reports || arguments.found_nonfinite != nullptr) {
    const bool is_finite = measure_tile<T, kProducer.source>(
        arguments.input, tile, row, column, place,
        arguments.mode == Mode::k1x128 || arguments.mode == Mode::k1x128Square, shared);
    if (!is_finite && arguments.found_nonfinite != nullptr) *arguments.found_nonfinite = 1.0f;
    if (!is_tensor) {
      __syncthreads();
      compute_scales(arguments, corner, shared);
    }
    tile.pack_again();
  }

  const bool has_own = !is_tensor && arguments.mode != Mode::k128x128;
  const bool stores = arguments.codes != nullptr, transposes = arguments.transposed != nullptr;
  if (stores || !has_own) {
    cast_rows<Code, kVectors>(arguments, tile, place, row, column, stores, transposes && !has_own, shared,
                              [&](int i, int) { return is_tensor ? inverse : shared.row_inverses[place.row + i]; });
  }
  if (transposes && has_own) {
    tile.pack_again();
    cast_rows<Code, kVectors>(arguments, tile, place, row, column, false, true, shared,
                              [&](int, int j) { return shared.column_inverses[place.column + j]; });
  }
  __syncthreads();
  if (reports && threadIdx.x == 0) {
    const uint32_t all = tile_magnitude(shared);
    if (all > *const_cast<volatile uint32_t*>(arguments.amax)) atomicMax(arguments.amax, all);
  }
  if (transposes) store_transposed<kVectors>(arguments, corner, shared);
}

// Magnitudes of all, or of every row and every column.
template <class T, bool kVectors, ProducerKind kProducer>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 && kProducer.source != Source::kGiven ? 1 : 2)
    measure(const __grid_constant__ MeasureArguments arguments) {
  __shared__ Shared shared;
  tile::let_next_kernel_start();
  const uint32_t row_tile = blockIdx.x / arguments.column_tiles;
  const Corner corner{static_cast<int32_t>(row_tile * kTile),
                      static_cast<int32_t>((blockIdx.x - row_tile * arguments.column_tiles) * kTile)};
  const Place place;
  const int32_t row = corner.row + place.row, column = corner.column + place.column;
  const TileOf<T, kVectors, kProducer> tile(arguments.input, row, column);
  measure_tile<T, kProducer.source>(arguments.input, tile, row, column, place, arguments.by_row_and_column, shared);
  __syncthreads();
  if (!arguments.by_row_and_column) {
    if (threadIdx.x == 0) {
      const uint32_t all = tile_magnitude(shared);
      if (all > *const_cast<volatile uint32_t*>(arguments.measured)) atomicMax(arguments.measured, all);
    }
    return;
  }
  const int index = threadIdx.x % kTile;
  if (threadIdx.x >= 2 * kTile) return;
  if (threadIdx.x < kTile) {
    if (corner.row + index < arguments.input.rows) {
      atomicMax(arguments.measured + corner.row + index, row_magnitude(shared, index));
    }
  } else if (corner.column + index < arguments.input.columns) {
    atomicMax(arguments.measured + arguments.input.rows + corner.column + index, column_magnitude(shared, index));
  }
}

// The magnitude of all of a dense x: a few blocks, each with many vectors on their way.
template <class T>
__global__ void __launch_bounds__(kThreads, 2) measure_dense(const __grid_constant__ MeasureArguments arguments) {
  constexpr int kCount = tile::Vector<T>::kCount, kAhead = 8;
  __shared__ uint32_t warps[kWarps];
  tile::let_next_kernel_start();
  const T* x = static_cast<const T*>(arguments.input.x);
  const int64_t vectors = arguments.input.rows * arguments.input.columns / kCount;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kAhead;
  uint32_t finite = 0;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kAhead + threadIdx.x; first < vectors;
       first += step) {
    tile::Vector<T> loaded[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t vector = first + k * kThreads;
      loaded[k] = tile::load_once_if<T>(vector < vectors, x + vector * kCount);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      float values[kCount];
      loaded[k].unpack(values);
#pragma unroll
      for (float value : values) {
        const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
        finite = max(finite, bits < kInfinityBits ? bits : 0);
      }
    }
  }
  finite = __reduce_max_sync(0xffffffffu, finite);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = finite;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (uint32_t warp : warps) finite = max(finite, warp);
  arguments.measured[blockIdx.x] = finite;
}

}  // namespace kernel_pytorch::quantize
