// Every CUDA word against the host: conversions bit for bit, copies, sums, barriers, the copy engine, clusters and
// programmatic launch. Each probe also compiles where there is a compiler and no GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernel_pytorch/base/float_types.h"
#include "kernel_pytorch/cuda/primitives_fixture_test.h"

namespace kernel_pytorch {
namespace {

constexpr const char* kProbe = "kernel_pytorch::primitives_probe::";

DeviceCode primitive_probe(const std::string& entry, int capability = 90) {
  return {.source = "kernel_pytorch/cuda/primitives_probe.cuh",
          .entry = kProbe + entry,
          .minimum_capability = capability,
          .architecture_specific = false};
}

class CudaPrimitives : public CudaPrimitivesTest {
 protected:
  template <class... Arguments>
  void launch(const std::string& entry, const cuda_device::LaunchShape& shape, Arguments... arguments) {
    launch_code(primitive_probe(entry), shape, arguments...);
  }
};

// Small integers: every order of summation gives the same float.
std::vector<float> small_integers(int count) {
  std::mt19937 random(7);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
  return values;
}

std::vector<float> hard_floats() {
  std::vector<float> values = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(),
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min(),
                               65504.0f,
                               65520.0f,
                               448.0f,
                               464.0f,
                               57344.0f,
                               61440.0f};
  std::mt19937 random(11);
  while (values.size() < 60000) {
    const uint32_t bits = random();
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    values.push_back(value);
    values.push_back(
        std::ldexp(1.0f + static_cast<float>(random() % 4096) / 4096.0f, static_cast<int>(random() % 40) - 24));
  }
  values.resize(60000);
  return values;
}

template <class T>
bool same(T actual, T expected) {
  const float a = to_float(actual), b = to_float(expected);
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::memcmp(&actual, &expected, sizeof(T)) == 0;
}

template <class T>
struct TypeName;
template <>
struct TypeName<float> {
  static constexpr const char* kText = "float";
};
template <>
struct TypeName<BFloat16> {
  static constexpr const char* kText = "kernel_pytorch::tile::BFloat16";
};
template <>
struct TypeName<Float16> {
  static constexpr const char* kText = "kernel_pytorch::tile::Float16";
};
template <>
struct TypeName<Float8E4M3> {
  static constexpr const char* kText = "kernel_pytorch::tile::Float8E4M3";
};
template <>
struct TypeName<Float8E5M2> {
  static constexpr const char* kText = "kernel_pytorch::tile::Float8E5M2";
};

template <class T>
class CudaConversions : public CudaPrimitives {};
using ElementTypes = testing::Types<float, BFloat16, Float16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(CudaConversions, ElementTypes);

TYPED_TEST(CudaConversions, RoundAsTheHostDoes) {
  using T = TypeParam;
  const std::vector<float> values = hard_floats();
  const int count = static_cast<int>(values.size());
  OnDevice<float> input(values);
  OnDevice<T> scalars(std::vector<T>(values.size())), vectors(std::vector<T>(values.size()));
  const unsigned threads = 256, per_block = threads * 16 / sizeof(T);
  this->launch(concat("from_floats<", TypeName<T>::kText, ">"), shape_of((count + per_block - 1) / per_block, threads),
               input.data(), scalars.data(), vectors.data(), count);
  const std::vector<T> by_scalar = scalars.read(), by_vector = vectors.read();
  for (int i = 0; i < count; ++i) {
    const T expected = from_float<T>(values[i]);
    ASSERT_TRUE(same(by_scalar[i], expected)) << "element of " << values[i];
    ASSERT_TRUE(same(by_vector[i], expected)) << "vector element of " << values[i];
  }
}

TYPED_TEST(CudaConversions, WidenEveryBitPattern) {
  using T = TypeParam;
  std::vector<T> elements(65536);
  for (size_t i = 0; i < elements.size(); ++i) {
    const uint32_t bits = sizeof(T) == 4 ? static_cast<uint32_t>(i * 65521u) : static_cast<uint32_t>(i);
    std::memcpy(static_cast<void*>(&elements[i]), &bits, sizeof(T));
  }
  const int count = static_cast<int>(elements.size());
  OnDevice<T> input(elements);
  OnDevice<float> scalars(std::vector<float>(elements.size())), vectors(std::vector<float>(elements.size()));
  const unsigned threads = 256, per_block = threads * 16 / sizeof(T);
  this->launch(concat("to_floats<", TypeName<T>::kText, ">"), shape_of((count + per_block - 1) / per_block, threads),
               input.data(), scalars.data(), vectors.data(), count);
  const std::vector<float> by_scalar = scalars.read(), by_vector = vectors.read();
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(same(by_scalar[i], to_float(elements[i]))) << "pattern " << i;
    ASSERT_TRUE(same(by_vector[i], to_float(elements[i]))) << "pattern " << i;
  }
}

TEST_F(CudaPrimitives, VectorsArriveByEveryWay) {
  std::vector<uint32_t> words(4 * 1000);
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(0x3f800000u + i * 2654435761u % 1000003);
  OnDevice<uint32_t> source(words);
  for (const char* way : {"kNoAllocate", "kHintFirst", "kHintNormal", "kCached", "kPlain"}) {
    OnDevice<uint32_t> target(std::vector<uint32_t>(words.size()));
    launch(concat("copy_vectors<", kProbe, "Way::", way, ">"), shape_of(4, 256, 1, 256 * 16), source.data(),
           target.data(), 1000);
    EXPECT_EQ(target.read(), words) << way;
  }
}

TEST_F(CudaPrimitives, LanesSum) {
  const std::vector<float> values = small_integers(64);
  OnDevice<float> input(values);
  for (int lanes : {1, 2, 4, 8, 16, 32}) {
    OnDevice<float> totals(std::vector<float>(values.size()));
    launch(concat("sum_lanes<", lanes, ">"), shape_of(1, 64), input.data(), totals.data());
    const std::vector<float> actual = totals.read();
    for (int i = 0; i < 64; ++i) {
      float expected = 0;
      for (int other = i / lanes * lanes; other < i / lanes * lanes + lanes; ++other) expected += values[other];
      ASSERT_EQ(actual[i], expected) << lanes << " lanes, lane " << i;
    }
  }
}

void expect_round_totals(const std::vector<float>& actual, const std::vector<float>& values, int first, int count,
                         int threads, int rounds, int sums) {
  float total = 0;
  for (int i = first; i < first + count; ++i) total += values[i];
  for (int round = 0; round < rounds; ++round) {
    for (int sum = 0; sum < sums; ++sum) {
      for (int i = first; i < first + count; ++i) {
        ASSERT_EQ(actual[static_cast<size_t>(round * sums + sum) * threads + i], total * (round + 1 + sum))
            << "round " << round << ", sum " << sum << ", thread " << i;
      }
    }
  }
}

TEST_F(CudaPrimitives, BlocksSumAgainAndAgain) {
  constexpr int kRounds = 9;
  for (int warps : {1, 2, 4, 8, 16, 32}) {
    for (int sums : {1, 2}) {
      const int threads = warps * 32;
      const std::vector<float> values = small_integers(threads);
      OnDevice<float> input(values), totals(std::vector<float>(static_cast<size_t>(threads) * kRounds * sums));
      launch(concat("sum_block<", warps, ", ", sums, ">"), shape_of(1, threads), input.data(), totals.data(), kRounds);
      expect_round_totals(totals.read(), values, 0, threads, threads, kRounds, sums);
    }
  }
}

TEST_F(CudaPrimitives, ClustersSumAgainAndAgain) {
  constexpr int kRounds = 9, kClusters = 3;
  for (int cluster : {2, 4, 8, 16}) {
    for (int warps : {1, 4, 16, 32}) {
      for (int sums : {1, 2}) {
        const int per_cluster = cluster * warps * 32, threads = kClusters * per_cluster;
        const std::vector<float> values = small_integers(threads);
        OnDevice<float> input(values), totals(std::vector<float>(static_cast<size_t>(threads) * kRounds * sums));
        launch(concat("sum_cluster<", warps, ", ", sums, ">"), shape_of(kClusters * cluster, warps * 32, cluster),
               input.data(), totals.data(), kRounds);
        const std::vector<float> actual = totals.read();
        for (int i = 0; i < kClusters; ++i) {
          expect_round_totals(actual, values, i * per_cluster, per_cluster, threads, kRounds, sums);
        }
      }
    }
  }
}

TEST_F(CudaPrimitives, BarriersPassWordsAround) {
  constexpr int kThreads = 192;
  for (int rounds : {1, 2, 7, 64}) {
    OnDevice<int32_t> words{std::vector<int32_t>(kThreads)};
    launch(concat("pass_around<", kThreads, ">"), shape_of(1, kThreads), words.data(), rounds);
    const std::vector<int32_t> actual = words.read();
    for (int i = 0; i < kThreads; ++i) ASSERT_EQ(actual[i], ((i - rounds) % kThreads + kThreads) % kThreads);
  }
}

TEST_F(CudaPrimitives, TilesStreamThroughARing) {
  constexpr int kThreads = 128;
  for (int stages : {1, 2, 3, 4}) {
    for (int tiles : {1, 2, 3, 5, 17}) {
      std::vector<int32_t> values(static_cast<size_t>(tiles) * kThreads);
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 3);
      OnDevice<int32_t> source(values), target(std::vector<int32_t>(values.size()));
      launch(concat("stream_tiles<", kThreads, ">"), shape_of(1, kThreads), source.data(), target.data(), tiles,
             stages);
      for (int32_t& value : values) ++value;
      EXPECT_EQ(target.read(), values) << stages << " stages, " << tiles << " tiles";
    }
  }
}

TEST_F(CudaPrimitives, BlocksKnowTheirPlaceInAClusterAndHowManyThereAre) {
  for (uint32_t cluster : {1, 2, 4, 8}) {
    const uint32_t clusters = 3, blocks = clusters * cluster;
    OnDevice<uint32_t> results(std::vector<uint32_t>(blocks * 4));
    launch("count_clusters<32>", shape_of(blocks, 32, cluster), results.data());
    const std::vector<uint32_t> actual = results.read();
    for (uint32_t block = 0; block < blocks; ++block) {
      const std::vector<uint32_t> expected = {block % cluster, cluster, block / cluster, clusters};
      EXPECT_EQ(std::vector<uint32_t>(actual.begin() + block * 4, actual.begin() + block * 4 + 4), expected);
    }
  }
}

TEST_F(CudaPrimitives, DependentKernelsSeeWhatTheFirstWrote) {
  const int blocks = 64, threads = 128;
  OnDevice<int32_t> values(std::vector<int32_t>(blocks * threads, -1)), copies(std::vector<int32_t>(blocks * threads));
  for (int32_t round = 1; round <= 8; ++round) {
    launch("write_late", shape_of(blocks, threads), values.data(), round);
    cuda_device::LaunchShape shape = shape_of(blocks, threads);
    shape.programmatic_dependent = true;
    launch("read_after", shape, values.data(), copies.data());
    EXPECT_EQ(copies.read(), std::vector<int32_t>(blocks * threads, round));
  }
}

TEST(CudaPrimitivesCompile, ForTheArchitecturesTheyClaim) {
  if (!jit::nvrtc_info(true).found) GTEST_SKIP() << jit::nvrtc_info(true).absence;
  const auto expect_no_spills = [](const std::string& entry, int capability, const char* architecture) {
    EXPECT_EQ(jit::compile(primitive_probe(entry, capability), architecture).spill_bytes, 0)
        << entry << " " << architecture;
  };
  for (const char* entry : {"from_floats<kernel_pytorch::tile::Float8E4M3>", "sum_cluster<8, 2>", "pass_around<192>",
                            "stream_tiles<128>", "count_clusters<32>", "write_late"}) {
    expect_no_spills(entry, 90, "sm_90a");
  }
  expect_no_spills("stream_tiles<128>", 90, "sm_100a");
  expect_no_spills("from_floats<kernel_pytorch::tile::BFloat16>", 80, "sm_80");
  expect_no_spills("sum_block<8, 2>", 80, "sm_80");
}

}  // namespace
}  // namespace kernel_pytorch
