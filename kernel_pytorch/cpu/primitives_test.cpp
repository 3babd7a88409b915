// Conversions and memory access of every level against the scalar definitions of base/float_types.h, bit for bit.
#include "kernel_pytorch/cpu/primitives_test.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernel_pytorch/base/philox.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cpu_probes {

std::vector<Level> levels_of_this_machine() {
  const CpuIsa machine = device_info(Device{}).cpu.machine_isa;
#if defined(__aarch64__)
  std::vector<Level> levels = {{"neon", isa_neon::primitive_probes()}};
  if (machine >= CpuIsa::kSve256) levels.push_back({"sve256", isa_sve256::primitive_probes()});
#else
  std::vector<Level> levels = {{"v2", isa_v2::primitive_probes()}};
  if (machine >= CpuIsa::kX86V3) levels.push_back({"v3", isa_v3::primitive_probes()});
  if (machine >= CpuIsa::kX86V4) levels.push_back({"v4", isa_v4::primitive_probes()});
#endif
  return levels;
}

namespace {

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

template <class T>
struct AlignedBuffer {
  explicit AlignedBuffer(size_t count)
      : data(static_cast<T*>(std::aligned_alloc(128, (count * sizeof(T) / 128 + 2) * 128))) {}
  ~AlignedBuffer() { std::free(data); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  T* data;
};

// Every value of T, and for each its float neighbours and the midpoints to the adjacent values: where rounding
// decides.
template <class T>
std::vector<float> values_around_every(int patterns) {
  std::vector<float> values;
  for (int i = 0; i < patterns; ++i) {
    const float here = to_float(T{static_cast<decltype(T::bits)>(i)});
    const float next = to_float(T{static_cast<decltype(T::bits)>(i + 1)});
    const float middle = static_cast<float>((static_cast<double>(here) + next) / 2);
    for (float value : {here, middle, std::nextafter(middle, here), std::nextafter(middle, next)})
      values.push_back(value);
  }
  return values;
}

std::vector<float> values_across_all_floats(uint32_t stride) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < 1ull << 32; bits += stride)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  for (uint32_t bits : {0x7f800000u, 0xff800000u, 0x7f800001u, 0xff800001u, 0x7fc00000u, 0x7fffffffu, 0x7f7fffffu, 1u,
                        0x80000001u, 0x80000000u, 0x007fffffu, 0x33000000u, 0x33000001u, 0x477fefffu, 0x477ff000u}) {
    values.push_back(std::bit_cast<float>(bits));
  }
  return values;
}

template <class T>
void expect_bits_of_base(const TypeProbes<T>& probes, const std::vector<float>& values, const std::string& level) {
  const auto count = static_cast<int64_t>(values.size());
  AlignedBuffer<T> plain(values.size()), pairs(values.size()), streamed(values.size());
  probes.from_float(values.data(), plain.data, count);
  probes.from_float_pairs(values.data(), pairs.data, count);
  probes.from_float_streamed(values.data(), streamed.data, count);
  int wrong = 0;
  for (int64_t i = 0; i < count && wrong < 5; ++i) {
    const auto wanted = from_float<T>(values[i]).bits;
    if (plain.data[i].bits == wanted && pairs.data[i].bits == wanted && streamed.data[i].bits == wanted) continue;
    ++wrong;
    ADD_FAILURE() << level << ": float bits " << std::hex << bits_of(values[i]) << " gave " << +plain.data[i].bits
                  << ", pair " << +pairs.data[i].bits << ", streamed " << +streamed.data[i].bits << ", wanted "
                  << +wanted;
  }
}

template <class T>
void expect_loads_of_base(const TypeProbes<T>& probes, int patterns, const std::string& level) {
  std::vector<T> stored(patterns);
  for (int i = 0; i < patterns; ++i) stored[i].bits = static_cast<decltype(T::bits)>(i);
  std::vector<float> loaded(patterns);
  probes.to_float(stored.data(), loaded.data(), patterns);
  for (int i = 0; i < patterns; ++i) {
    ASSERT_EQ(bits_of(loaded[i]), bits_of(to_float(stored[i]))) << level << ": pattern " << std::hex << i;
  }
}

template <class T>
void check_type(TypeProbes<T> PrimitiveProbes::*member, int patterns) {
  std::vector<float> values = values_around_every<T>(patterns);
  const std::vector<float> strided = values_across_all_floats(49999);
  values.insert(values.end(), strided.begin(), strided.end());
  for (const Level& level : levels_of_this_machine()) {
    expect_loads_of_base(level.probes.*member, patterns, level.name);
    expect_bits_of_base(level.probes.*member, values, level.name);
  }
}

TEST(CpuPrimitives, ConvertBFloat16AsBase) {
  check_type(&PrimitiveProbes::bfloat16, 1 << 16);
}
TEST(CpuPrimitives, ConvertFloat16AsBase) {
  check_type(&PrimitiveProbes::float16, 1 << 16);
}
TEST(CpuPrimitives, ConvertFloat8E4M3AsBase) {
  check_type(&PrimitiveProbes::float8_e4m3, 1 << 8);
}
TEST(CpuPrimitives, ConvertFloat8E5M2AsBase) {
  check_type(&PrimitiveProbes::float8_e5m2, 1 << 8);
}

// Two pages with the second one forbidden: a read or write past the last element is a crash.
class PageEnd {
 public:
  PageEnd() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    memory_ = static_cast<char*>(mmap(nullptr, 2 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(memory_ + page_, page_, PROT_NONE);
  }
  ~PageEnd() { munmap(memory_, 2 * page_); }
  template <class T>
  T* last(int64_t count) {
    return reinterpret_cast<T*>(memory_ + page_) - count;
  }

 private:
  size_t page_;
  char* memory_;
};

template <class T>
void check_partial(void (*copy)(const T*, T*, int64_t), int lanes, const std::string& level) {
  PageEnd from_page, to_page;
  for (int64_t count = 0; count <= lanes; ++count) {
    T* from = from_page.last<T>(count);
    T* to = to_page.last<T>(count);
    auto* from_bytes = reinterpret_cast<unsigned char*>(from);
    for (size_t i = 0; i < count * sizeof(T); ++i) from_bytes[i] = static_cast<unsigned char>(0x31 + i % 7);  // no NaN
    std::memset(reinterpret_cast<char*>(to) - 64, 0xab, 64 + count * sizeof(T));
    copy(from, to, count);
    EXPECT_EQ(std::memcmp(from, to, count * sizeof(T)), 0) << level << " count " << count;
    for (int i = 1; i <= 64; ++i) ASSERT_EQ((reinterpret_cast<unsigned char*>(to))[-i], 0xab) << level;
  }
}

TEST(CpuPrimitives, PartialAccessStaysWithinItsElements) {
  for (const Level& level : levels_of_this_machine()) {
    const PrimitiveProbes& probes = level.probes;
    check_partial(probes.bfloat16.load_then_store_partial, probes.lanes, level.name);
    check_partial(probes.float16.load_then_store_partial, probes.lanes, level.name);
    check_partial(probes.float8_e4m3.load_then_store_partial, probes.lanes, level.name);
    check_partial(probes.float8_e5m2.load_then_store_partial, probes.lanes, level.name);
    check_partial(probes.float32.load_then_store_partial, probes.lanes, level.name);
    check_partial(probes.double_partial, probes.lanes / 2, level.name);
  }
}

template <class T>
void check_unordered(void (*copy)(const T*, T*, int64_t), const std::string& level) {
  constexpr int kCount = 256;
  alignas(64) T from[kCount], to[kCount] = {};
  for (int i = 0; i < kCount; ++i) from[i] = from_float<T>(static_cast<float>(i % 37) - 18.5f);
  copy(from, to, kCount);
  EXPECT_EQ(std::memcmp(from, to, sizeof(from)), 0) << level;
}

TEST(CpuPrimitives, UnorderedPairsReturnToTheirPlaces) {
  for (const Level& level : levels_of_this_machine()) {
    check_unordered(level.probes.bfloat16.copy_unordered, level.name);
    check_unordered(level.probes.float16.copy_unordered, level.name);
    check_unordered(level.probes.float32.copy_unordered, level.name);
  }
}

TEST(CpuPrimitives, PartialStoreLeavesWhatFollows) {
  for (const Level& level : levels_of_this_machine()) {
    for (int64_t count = 0; count <= level.probes.lanes; ++count) {
      std::vector<BFloat16> from(64, BFloat16{0x3f80}), to(64, BFloat16{0x1234});
      level.probes.bfloat16.load_then_store_partial(from.data(), to.data(), count);
      for (int64_t i = 0; i < 64; ++i) ASSERT_EQ(to[i].bits, i < count ? 0x3f80 : 0x1234) << level.name << " " << count;
    }
  }
}

TEST(CpuPrimitives, UnalignedLoadsAndStores) {
  std::vector<float> from(200), to(200);
  for (int i = 0; i < 200; ++i) from[i] = static_cast<float>(i);
  for (const Level& level : levels_of_this_machine()) {
    for (int offset = 0; offset < 16; ++offset) {
      level.probes.float32.to_float(from.data() + offset, to.data() + 1, 150);
      for (int i = 0; i < 150; ++i) ASSERT_EQ(to[i + 1], from[i + offset]) << level.name;
    }
  }
}

TEST(CpuPrimitives, Reductions) {
  std::mt19937 generator(7);
  std::normal_distribution<double> normal;
  for (const Level& level : levels_of_this_machine()) {
    for (int64_t count : {16, 32, 48, 512, 4096}) {
      std::vector<float> floats(count);
      std::vector<double> doubles(count);
      double sum = 0, most = -INFINITY, squares = 0, sum_magnitudes = 0, sum_double = 0, most_double = -INFINITY;
      for (int64_t i = 0; i < count; ++i) {
        doubles[i] = normal(generator);
        floats[i] = static_cast<float>(doubles[i]);
        sum += floats[i];
        sum_magnitudes += std::abs(floats[i]);
        most = std::max<double>(most, floats[i]);
        squares += static_cast<double>(floats[i]) * floats[i];
        sum_double += doubles[i];
        most_double = std::max(most_double, doubles[i]);
      }
      float pair[2];
      double triple[3];
      level.probes.reduce(floats.data(), count, pair);
      level.probes.reduce_double(doubles.data(), count, triple);
      EXPECT_NEAR(pair[0], sum, 1e-6 * sum_magnitudes) << level.name;
      EXPECT_EQ(pair[1], most) << level.name;
      EXPECT_NEAR(triple[0], sum_double, 1e-14 * sum_magnitudes) << level.name;
      EXPECT_EQ(triple[1], most_double) << level.name;
      EXPECT_EQ(triple[2], std::sqrt(std::abs(doubles[0]))) << level.name;
      EXPECT_NEAR(level.probes.sum_squares_in_double(floats.data(), count), squares, 1e-13 * squares) << level.name;
    }
  }
}

TEST(CpuPrimitives, HorizontalSumAndMaxSeeEveryLane) {
  for (const Level& level : levels_of_this_machine()) {
    for (int lane = 0; lane < level.probes.lanes; ++lane) {
      std::vector<float> floats(level.probes.lanes, -1.0f);
      floats[lane] = 1000.0f;
      float pair[2];
      level.probes.reduce(floats.data(), level.probes.lanes, pair);
      EXPECT_EQ(pair[0], 1000.0f - static_cast<float>(level.probes.lanes - 1)) << level.name;
      EXPECT_EQ(pair[1], 1000.0f) << level.name;
    }
  }
}

TEST(CpuPrimitives, DoubleRoundTripIsExact) {
  const std::vector<float> values = values_across_all_floats(999983);
  const int64_t count = static_cast<int64_t>(values.size()) / 16 * 16;
  for (const Level& level : levels_of_this_machine()) {
    std::vector<float> back(values.size());
    level.probes.round_trip_double(values.data(), back.data(), count);
    for (int64_t i = 0; i < count; ++i) {
      ASSERT_TRUE(std::isnan(values[i]) || bits_of(back[i]) == bits_of(values[i])) << level.name << " " << values[i];
    }
  }
}

TEST(CpuPrimitives, MinAndMaxTakeTheSecondArgumentOfNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float pool[] = {0.0f, -1.0f, 2.5f, INFINITY, -INFINITY, nan, 1e-40f, -3.0f};
  for (const Level& level : levels_of_this_machine()) {
    std::vector<float> a, b;
    for (float x : pool) {
      for (float y : pool) a.push_back(x), b.push_back(y);
    }
    std::vector<float> least(a.size()), most(a.size());
    level.probes.minimum(a.data(), b.data(), least.data(), 64);
    level.probes.maximum(a.data(), b.data(), most.data(), 64);
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(bits_of(least[i]), bits_of(a[i] < b[i] ? a[i] : b[i])) << level.name << " " << a[i] << " " << b[i];
      EXPECT_EQ(bits_of(most[i]), bits_of(a[i] > b[i] ? a[i] : b[i])) << level.name << " " << a[i] << " " << b[i];
    }
  }
}

TEST(CpuPrimitives, ElementsToAlignment) {
  AlignedBuffer<BFloat16> buffer(256);
  for (const Level& level : levels_of_this_machine()) {
    for (int64_t offset = 0; offset < 64; ++offset) {
      const int64_t elements = level.probes.elements_to_alignment(buffer.data + offset, 64);
      EXPECT_LT(elements, 32);
      EXPECT_EQ((offset + elements) % 32, 0) << level.name;
    }
  }
}

TEST(CpuPrimitives, PhiloxInLanesIsPhilox) {
  for (const Level& level : levels_of_this_machine()) {
    for (uint64_t first : {uint64_t{0}, uint64_t{0xfffffffd}, uint64_t{1} << 60, ~uint64_t{0} - 2}) {
      std::vector<uint32_t> words(4 * static_cast<size_t>(level.probes.lanes));
      level.probes.philox_blocks(0x123456789abcdef0, 0xfedcba9876543210, first, words.data());
      for (int i = 0; i < level.probes.lanes; ++i) {
        const PhiloxBlock block = philox(0x123456789abcdef0, 0xfedcba9876543210, first + static_cast<uint64_t>(i));
        for (int word = 0; word < 4; ++word) {
          EXPECT_EQ(words[4 * i + word], block.words[word]) << level.name << " block " << i << " word " << word;
        }
      }
    }
  }
}

TEST(CpuPrimitives, TilesOfProductsAreProducts) {
  constexpr int kRows = 6, kSteps = 37, kStride = 80;
  const auto number = [](int i) { return static_cast<float>(i * 2654435761u % 97) - 48.0f; };  // sums stay exact
  std::vector<float> a(kRows * kSteps), b(kSteps * kStride);
  for (size_t i = 0; i < a.size(); ++i) a[i] = number(static_cast<int>(i));
  for (size_t i = 0; i < b.size(); ++i) b[i] = number(static_cast<int>(i) + 1000);
  for (const Level& level : levels_of_this_machine()) {
    for (int vectors = 1; vectors <= level.probes.tile_vectors; ++vectors) {
      for (const bool by_columns : {false, true}) {
        for (const bool add : {false, true}) {
          const int row_stride = by_columns ? 1 : kSteps, step_stride = by_columns ? kRows : 1;
          std::vector<float> c(kRows * kStride, 3.0f);
          level.probes.multiply_tile(vectors, a.data(), row_stride, step_stride, b.data(), kStride, kSteps, c.data(),
                                     kStride, add);
          for (int i = 0; i < kRows; ++i) {
            for (int j = 0; j < kStride; ++j) {
              float sum = add ? 3.0f : 0.0f;
              for (int k = 0; k < kSteps; ++k) sum += a[i * row_stride + k * step_stride] * b[k * kStride + j];
              const float expected = j < vectors * level.probes.lanes ? sum : 3.0f;  // nothing else is touched
              ASSERT_EQ(c[i * kStride + j], expected) << level.name << " " << vectors << " " << i << " " << j;
            }
          }
        }
      }
    }
    const int lanes = level.probes.lanes;
    std::vector<float> square(static_cast<size_t>(lanes * lanes)), transposed(square.size());
    for (size_t i = 0; i < square.size(); ++i) square[i] = static_cast<float>(i);
    level.probes.transpose(square.data(), transposed.data());
    for (int i = 0; i < lanes * lanes; ++i) ASSERT_EQ(transposed[i % lanes * lanes + i / lanes], square[i]);
  }
}

}  // namespace
}  // namespace kernel_pytorch::cpu_probes
