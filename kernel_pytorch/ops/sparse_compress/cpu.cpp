// 2:4 compression and back on CPUs, elements as bits of 2 or 4 bytes. The eight groups of a word of metadata are eight
// lanes, of which six comparisons say for each of four elements whether at most one is larger. Rows are divided among
// threads.
#include <algorithm>
#include <cstring>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/sparse_compress/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::sparse_compress {
namespace {

// A row; word w of its metadata is metadata[w / 2 * stride + w % 2], and the last may have fewer columns.
struct RowPart {
  const void* from;
  void* to;
  uint32_t* metadata;
  int64_t stride, words, columns;
};

constexpr int kGroups = 8;  // of a word
constexpr int kColumns = 4 * kGroups;

// Eight lanes, whatever the instruction set: the compiler divides them among its registers.
template <class T>
using Lanes [[gnu::vector_size(kGroups * sizeof(T))]] = T;

template <class T>
Lanes<T> load(const T* from) {
  Lanes<T> lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}
template <class T>
void store(T* to, Lanes<T> lanes) {
  std::memcpy(to, &lanes, sizeof(lanes));
}
template <class T>
Lanes<T> select(Lanes<T> mask, Lanes<T> yes, Lanes<T> no) {
  return (mask & yes) | (~mask & no);
}
// 1 where b is larger, else 0.
template <class T>
Lanes<T> is_larger(Lanes<T> b, Lanes<T> a) {
  return -reinterpret_cast<Lanes<T>>(b > a);
}
template <class T>
Lanes<T> at_most_one(Lanes<T> larger) {
  return reinterpret_cast<Lanes<T>>(larger < static_cast<T>(2));
}

template <class T>
void compress_word(const T* from, T* to, uint32_t& metadata) {
  using V = Lanes<T>;
  const V r0 = load(from), r1 = load(from + 8), r2 = load(from + 16), r3 = load(from + 24);
  const V low_ab = __builtin_shufflevector(r0, r1, 0, 4, 8, 12, 1, 5, 9, 13);
  const V low_cd = __builtin_shufflevector(r0, r1, 2, 6, 10, 14, 3, 7, 11, 15);
  const V high_ab = __builtin_shufflevector(r2, r3, 0, 4, 8, 12, 1, 5, 9, 13);
  const V high_cd = __builtin_shufflevector(r2, r3, 2, 6, 10, 14, 3, 7, 11, 15);
  const V own_a = __builtin_shufflevector(low_ab, high_ab, 0, 1, 2, 3, 8, 9, 10, 11);
  const V own_b = __builtin_shufflevector(low_ab, high_ab, 4, 5, 6, 7, 12, 13, 14, 15);
  const V own_c = __builtin_shufflevector(low_cd, high_cd, 0, 1, 2, 3, 8, 9, 10, 11);
  const V own_d = __builtin_shufflevector(low_cd, high_cd, 4, 5, 6, 7, 12, 13, 14, 15);
  constexpr T kMagnitude = static_cast<T>(~T{0}) >> 1;  // its bits have the order of numbers, NaN last
  const V a = own_a & kMagnitude, b = own_b & kMagnitude, c = own_c & kMagnitude, d = own_d & kMagnitude;
  const V ab = is_larger<T>(b, a), ac = is_larger<T>(c, a), ad = is_larger<T>(d, a), bc = is_larger<T>(c, b),
          bd = is_larger<T>(d, b), cd = is_larger<T>(d, c);
  constexpr T kOne = 1, kTwo = 2, kThree = 3;
  const V has_a = at_most_one<T>(ab + ac + ad), has_b = at_most_one<T>(kOne - ab + bc + bd),
          has_c = at_most_one<T>(kTwo - ac - bc + cd), has_d = at_most_one<T>(kThree - ad - bd - cd);
  const V first = select<T>(has_a, own_a, select<T>(has_b, own_b, own_c));
  const V second = select<T>(has_d, own_d, select<T>(has_c, own_c, own_b));
  const V first_place = ~has_a & (kTwo + has_b);               // a mask is -1
  const V second_place = kThree + (~has_d & ~has_c) + ~has_d;  // 3, 2, 1
  const V places = first_place | second_place << kTwo;
  store<T>(to, __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11));
  store<T>(to + 8, __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15));
  uint32_t bits = 0;
  for (int g = 0; g < kGroups; ++g) bits |= static_cast<uint32_t>(places[g]) << (4 * g);
  metadata = bits;
}

template <class T>
void decompress_word(const T* from, T* to, uint32_t metadata) {
  for (int g = 0; g < kGroups; ++g) {
    T four[4] = {};
    four[metadata >> (4 * g) & 3] = from[2 * g];
    four[metadata >> (4 * g + 2) & 3] = from[2 * g + 1];  // of equal places the second counts
    std::memcpy(to + 4 * g, four, sizeof(four));
  }
}
template <>
void decompress_word<uint16_t>(const uint16_t* from, uint16_t* to, uint32_t metadata) {
  for (int g = 0; g < kGroups; ++g) {
    const uint32_t first = metadata >> (4 * g) & 3, second = metadata >> (4 * g + 2) & 3;
    const uint64_t low = first == second ? 0 : uint64_t{from[2 * g]} << (16 * first);
    const uint64_t four = low | uint64_t{from[2 * g + 1]} << (16 * second);
    std::memcpy(to + 4 * g, &four, sizeof(four));
  }
}

template <class T>
void compress_row(const RowPart& part) {
  const T* from = static_cast<const T*>(part.from);
  T* to = static_cast<T*>(part.to);
  for (int64_t word = 0; word < part.words; ++word) {
    uint32_t& metadata = part.metadata[word / 2 * part.stride + word % 2];
    const int64_t left = part.columns - word * kColumns;
    if (left >= kColumns) {
      compress_word(from + word * kColumns, to + word * kColumns / 2, metadata);
      continue;
    }
    // Behind the last column lie zeros, whose places are 0 and 1.
    T padded[kColumns] = {}, kept[kColumns / 2];
    if (left > 0) std::memcpy(padded, from + word * kColumns, static_cast<size_t>(left) * sizeof(T));
    compress_word(padded, kept, metadata);
    if (left > 0) std::memcpy(to + word * kColumns / 2, kept, static_cast<size_t>(left / 2) * sizeof(T));
  }
}

template <class T>
void decompress_row(const RowPart& part) {
  const T* from = static_cast<const T*>(part.from);
  T* to = static_cast<T*>(part.to);
  for (int64_t word = 0; word < part.words; ++word) {
    const uint32_t metadata = part.metadata[word / 2 * part.stride + word % 2];
    const int64_t left = part.columns - word * kColumns;
    if (left >= kColumns) {
      decompress_word(from + word * kColumns / 2, to + word * kColumns, metadata);
    } else if (left > 0) {
      T kept[kColumns / 2] = {}, padded[kColumns];
      std::memcpy(kept, from + word * kColumns / 2, static_cast<size_t>(left / 2) * sizeof(T));
      decompress_word(kept, padded, metadata);
      std::memcpy(to + word * kColumns, padded, static_cast<size_t>(left) * sizeof(T));
    }
  }
}

constexpr int64_t kTaskElements = 16384;

template <class Run>
void over_rows(Context& context, int64_t rows, int64_t columns, const Run& run) {
  const int64_t each = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(columns, 1));
  parallel_for(context.threads, (rows + each - 1) / each, [&](int64_t task) {
    for (int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row) run(row);
  });
}

char* row_of(const TensorView& view, int64_t row) {
  return view.as<char>() + row * view.strides[0] * size_of(view.dtype);
}

// Of a matrix [rows, columns] with its compressed values: what is read, what is written.
void run_rows(const TensorView& from, const TensorView& to, const TensorView& metadata, int64_t columns,
              void (*run)(const RowPart&), Context& context) {
  const int64_t rows = from.sizes[0];
  over_rows(context, rows, columns, [&](int64_t row) {
    run({.from = row_of(from, row),
         .to = row_of(to, row),
         .metadata = metadata.as<uint32_t>() + row * 2,
         .stride = rows * 2,
         .words = metadata.sizes[0] * 2,
         .columns = columns});
  });
}

void run_compress(const Compress& problem, int, Context& context) {
  run_rows(problem.x, problem.values, problem.metadata, problem.x.sizes[1],
           size_of(problem.x.dtype) == 4 ? compress_row<uint32_t> : compress_row<uint16_t>, context);
}
void run_decompress(const Decompress& problem, int, Context& context) {
  run_rows(problem.values, problem.output, problem.metadata, problem.output.sizes[1],
           size_of(problem.output.dtype) == 4 ? decompress_row<uint32_t> : decompress_row<uint16_t>, context);
}

uint64_t code_version() {
  return hash_text("sparse_compress cpu 1");
}

}  // namespace

constinit const registry::Kernel<Compress> kCompressCpu{
    .name = "cpu", .supports = supports_on_cpu<Compress>, .run = run_compress, .source_hash = code_version};
constinit const registry::Kernel<Decompress> kDecompressCpu{
    .name = "cpu", .supports = supports_on_cpu<Decompress>, .run = run_decompress, .source_hash = code_version};

}  // namespace kernel_pytorch::sparse_compress
