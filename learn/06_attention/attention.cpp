// Step 6: attention, softmax(Q K^T / sqrt(d)) V, with the scores in memory and without.
//
// Two GEMMs with a softmax between them. The first version writes all scores of a head (S x S), reads them for the
// softmax, and reads them again for the product with V. The second never holds more than a block of scores: it keeps,
// per query, the largest score so far and the sum so far, and corrects the output when a larger score comes (online
// softmax). All loops are those of step 5; the exponential is its own cost, since it is not a multiply-add.
#include "../support/register_tile.h"

using course::Floats;
using course::kLanes;
using course::Vec;

constexpr long kHeadSize = 64;
constexpr long kKeys = 128;               // of a block
constexpr long kQueries = 8 * kTileRows;  // of a block: 48
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

// e^x of every lane for x <= 0, by 2^n * 2^f: n goes into the exponent's bits, 2^f is a polynomial. About 2e-7.
inline Vec exp_of(Vec x) {
  const Vec t = (x < -87.0f ? Vec{} - 87.0f : x) * 1.44269504f;
  const Ints whole = __builtin_convertvector(t - 0.5f, Ints);  // t <= 0: truncation rounds to nearest
  const Vec f = (t - __builtin_convertvector(whole, Vec)) * 0.69314718f;
  Vec p = f * (1.0f / 720) + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  return p * (Vec)((whole + 127) << 23);
}

float max_of_lanes(Vec v) {
  float most = v[0];
  for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, v[lane]);
  return most;
}
float sum_of_lanes(Vec v) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

// c[rows][columns] (+)= a[rows][depth] b[depth][columns]; all multiples of the tile.
void product(const float* a, long a_row, const float* b, long b_row, float* c, long c_row, long rows, long columns,
             long depth, bool adds) {
  for (long j = 0; j < columns; j += kTileColumns) {
    for (long i = 0; i < rows; i += kTileRows) {
      Vec sums[kTileRows][kTileVecs] = {};
      register_tile(a + i * a_row, a_row, 1, b + j, b_row, depth, sums);
      for (int r = 0; r < kTileRows; ++r) {
        for (int v = 0; v < kTileVecs; ++v) {
          float* to = c + (i + r) * c_row + j + v * kLanes;
          course::store(to, adds ? course::load(to) + sums[r][v] : sums[r][v]);
        }
      }
    }
  }
}

struct Problem {
  long heads, length;
  const float *q, *k_transposed, *v;  // [heads][length][64], [heads][64][length], [heads][length][64]
  float* output;
  long size() const { return length * kHeadSize; }
};
const float kScale = 1 / std::sqrt(static_cast<float>(kHeadSize));

// Scores become e^(score - most) in place; returns their sum.
float exponentials(float* scores, long count, float most) {
  Vec sums{};
  for (long i = 0; i < count; i += kLanes) {
    const Vec e = exp_of((course::load(scores + i) - most) * kScale);
    course::store(scores + i, e);
    sums += e;
  }
  return sum_of_lanes(sums);
}
float largest(const float* scores, long count) {
  Vec most = course::load(scores);
  for (long i = kLanes; i < count; i += kLanes) {
    const Vec next = course::load(scores + i);
    most = next > most ? next : most;
  }
  return max_of_lanes(most);
}
void multiply(float* row, long count, float factor) {
  for (long i = 0; i < count; i += kLanes) course::store(row + i, course::load(row + i) * factor);
}

void scores_in_memory(const Problem& p) {
  static Floats all = course::make_floats(p.heads * p.length * p.length);
#pragma omp parallel for schedule(dynamic)
  for (long head = 0; head < p.heads; ++head) {
    float* scores = all.get() + head * p.length * p.length;
    float* output = p.output + head * p.size();
    product(p.q + head * p.size(), kHeadSize, p.k_transposed + head * p.size(), p.length, scores, p.length, p.length,
            p.length, kHeadSize, false);
    for (long row = 0; row < p.length; ++row) {
      float* here = scores + row * p.length;
      multiply(here, p.length, 1 / exponentials(here, p.length, largest(here, p.length)));
    }
    product(scores, p.length, p.v + head * p.size(), kHeadSize, output, kHeadSize, p.length, kHeadSize, p.length,
            false);
  }
}

void online_softmax(const Problem& p) {
  const long blocks = p.length / kQueries;
#pragma omp parallel for schedule(dynamic)
  for (long task = 0; task < p.heads * blocks; ++task) {
    const long head = task / blocks, first = task % blocks * kQueries;
    const float* q = p.q + head * p.size() + first * kHeadSize;
    float* output = p.output + head * p.size() + first * kHeadSize;
    alignas(64) float scores[kQueries * kKeys];  // 24 KB: stays in the L1 cache
    float most[kQueries], sum[kQueries] = {};
    std::fill(most, most + kQueries, -INFINITY);
    std::fill(output, output + kQueries * kHeadSize, 0.0f);
    for (long key = 0; key < p.length; key += kKeys) {
      product(q, kHeadSize, p.k_transposed + head * p.size() + key, p.length, scores, kKeys, kQueries, kKeys, kHeadSize,
              false);
      for (long row = 0; row < kQueries; ++row) {
        const float higher = std::max(most[row], largest(scores + row * kKeys, kKeys));
        if (higher > most[row]) {  // what was summed so far is too large by this factor
          const float factor = std::exp((most[row] - higher) * kScale);
          multiply(output + row * kHeadSize, kHeadSize, factor);
          sum[row] *= factor;
          most[row] = higher;
        }
        sum[row] += exponentials(scores + row * kKeys, kKeys, higher);
      }
      product(scores, kKeys, p.v + head * p.size() + key * kHeadSize, kHeadSize, output, kHeadSize, kQueries, kHeadSize,
              kKeys, true);
    }
    for (long row = 0; row < kQueries; ++row) multiply(output + row * kHeadSize, kHeadSize, 1 / sum[row]);
  }
}

void reference(const Problem& p, float* output) {
#pragma omp parallel for
  for (long row = 0; row < p.heads * p.length; ++row) {
    const long head = row / p.length;
    std::vector<double> e(p.length), result(kHeadSize);
    double most = -INFINITY, sum = 0;
    for (long key = 0; key < p.length; ++key) {
      double score = 0;
      for (long d = 0; d < kHeadSize; ++d) {
        score += double(p.q[row * kHeadSize + d]) * p.k_transposed[head * p.size() + d * p.length + key];
      }
      most = std::max(most, e[key] = score * kScale);
    }
    for (long key = 0; key < p.length; ++key) {
      sum += e[key] = std::exp(e[key] - most);
      for (long d = 0; d < kHeadSize; ++d) result[d] += e[key] * p.v[head * p.size() + key * kHeadSize + d];
    }
    for (long d = 0; d < kHeadSize; ++d) output[row * kHeadSize + d] = float(result[d] / sum);
  }
}

double exp_rate(int threads) {
  constexpr long kCount = 4096;
  const double seconds = course::typical_seconds([&] {
#pragma omp parallel num_threads(threads)
    {
      alignas(64) float values[kCount];
      for (long i = 0; i < kCount; ++i) values[i] = -0.001f * i;
      for (int repeat = 0; repeat < 64; ++repeat) {
        float sum = exponentials(values, kCount, 1.0f);
        course::keep(sum);
      }
    }
  });
  return 64.0 * kCount * threads / seconds;
}

int main(int count, char** words) {
  const bool quick = course::is_quick(count, words);
  const long heads = quick ? 2 : 16, length = quick ? 384 : 1536;
  char text[80];
  std::snprintf(text, sizeof text, "attention of %ld heads, %ld x %ld, head size %ld, fp32", heads, length, length,
                kHeadSize);
  course::problem(text);
  const int threads = course::all_threads();
  const double scores = double(heads) * length * length, flops = 4 * scores * kHeadSize;
  const double bytes = 16.0 * heads * length * kHeadSize;
  const double fma = course::fma_rate(threads), exps = exp_rate(threads);
  const double copy = course::copy_rate(64 << 20, threads, false);
  course::roof("multiply-adds, all threads", fma / 1e9, "GFLOP/s");
  course::roof("exponentials, all threads", exps / 1e9, "10^9/s");
  course::roof("copy, all threads", copy / 1e9, "GB/s");
  course::predicted("6 scores in memory", flops / fma + scores / exps + 5 * 4 * scores / copy,
                    "FLOPs / rate + exponentials / rate + scores written twice, read three times / copy");
  course::predicted("6 online softmax", flops / fma + scores / exps, "FLOPs / rate + exponentials / rate");

  Floats q = course::random_floats(heads * length * kHeadSize, 1),
         k = course::random_floats(heads * length * kHeadSize, 2),
         v = course::random_floats(heads * length * kHeadSize, 3),
         output = course::make_floats(heads * length * kHeadSize),
         expected = course::make_floats(heads * length * kHeadSize);
  const Problem problem{heads, length, q.get(), k.get(), v.get(), output.get()};
  reference(problem, expected.get());
  const auto measure = [&](const char* name, void (*kernel)(const Problem&)) {
    std::fill(output.get(), output.get() + heads * length * kHeadSize, 0.0f);
    const double seconds = course::typical_seconds([&] { kernel(problem); }, 2 * course::run_seconds);
    course::measured(name, seconds, bytes, flops,
                     course::error_of(output.get(), expected.get(), heads * length * kHeadSize));
  };
  measure("6 scores in memory", scores_in_memory);
  measure("6 online softmax", online_softmax);
  return course::finish();
}
