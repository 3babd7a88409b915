// What the shape list cannot say: properties of lists and selections on random problems, edges, and bad arguments.
#include "kernel_pytorch/ops/block_list/block_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/ops/block_list/arguments_cuda.h"

namespace kernel_pytorch::block_list {
namespace {

struct Lists {
  std::vector<int32_t> counts, blocks;
  int64_t length;

  Lists(int64_t lists, int64_t n) : counts(lists, -1), blocks(lists * n, -1), length(n) {}
  List views(int64_t batch, int64_t heads) {
    const auto lists = static_cast<int64_t>(counts.size()) / (batch * heads);
    return {contiguous_view(counts.data(), DType::kInt32, {batch, heads, lists}),
            contiguous_view(blocks.data(), DType::kInt32, {batch, heads, lists, length})};
  }
  std::vector<int32_t> list(int64_t i) const {
    return {blocks.begin() + i * length, blocks.begin() + i * length + counts[i]};
  }
};

std::string failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

TEST(BlockList, TransposedTwiceIsTheMap) {
  std::mt19937 random(3);
  OwnContext context;
  for (int round = 0; round < 20; ++round) {
    const int64_t heads = random() % 3 + 1, rows = random() % 90 + 1, columns = random() % 90 + 1;
    std::vector<int8_t> map(heads * rows * columns), from_rows(map.size()), from_columns(map.size());
    for (int8_t& state : map) state = static_cast<int8_t>(random() % (round % 2 == 0 ? 3 : 40));
    for (int8_t& state : map) state = state > 2 ? 0 : state;  // sparse in odd rounds: empty lists
    Lists by_row(heads * rows, columns), full_by_row = by_row, by_column(heads * columns, rows),
                                         full_by_column = by_column;
    build({.map = contiguous_view(map.data(), DType::kInt8, {1, heads, rows, columns}),
           .rows = by_row.views(1, heads),
           .full_rows = full_by_row.views(1, heads),
           .columns = by_column.views(1, heads),
           .full_columns = full_by_column.views(1, heads)},
          context);
    for (const auto& [lists, state] : {std::pair{&by_row, 1}, {&full_by_row, 2}}) {
      for (int64_t row = 0; row < heads * rows; ++row) {
        const std::vector<int32_t> list = lists->list(row);
        ASSERT_TRUE(std::ranges::is_sorted(list));
        for (int32_t column : list) from_rows[row * columns + column] += static_cast<int8_t>(state);
      }
    }
    for (const auto& [lists, state] : {std::pair{&by_column, 1}, {&full_by_column, 2}}) {
      for (int64_t i = 0; i < heads * columns; ++i) {
        const std::vector<int32_t> list = lists->list(i);
        ASSERT_TRUE(std::ranges::is_sorted(list));
        for (int32_t row : list) {
          from_columns[(i / columns * rows + row) * columns + i % columns] += static_cast<int8_t>(state);
        }
      }
    }
    ASSERT_EQ(from_rows, map);
    ASSERT_EQ(from_columns, map);
  }
}

// A selection by given scores, and what it kept.
struct Trial {
  int64_t queries, keys, query_block, key_block;
  bool causal;
  double sparsity;
  int64_t sinks, local;
  double threshold = -std::numeric_limits<double>::infinity();
  std::vector<float> scores{};

  int64_t rows() const { return (queries + query_block - 1) / query_block; }
  int64_t columns() const { return (keys + key_block - 1) / key_block; }
  Lists run() {
    Lists kept(rows(), columns());
    OwnContext context;
    select({.scores = contiguous_view(scores.data(), DType::kFloat32, {1, 1, rows(), columns()}),
            .queries = queries,
            .keys = keys,
            .query_block = query_block,
            .key_block = key_block,
            .causal = causal,
            .sparsity = sparsity,
            .threshold = threshold,
            .sinks = sinks,
            .local = local,
            .rows = kept.views(1, 1)},
           context);
    return kept;
  }
  // Whether query q of a row stands in this column, or any of its queries sees it.
  bool holds(int64_t row, int64_t column, int64_t slack) const {
    for (int64_t q = row * query_block; q < std::min((row + 1) * query_block, queries); ++q) {
      const int64_t place = q + keys - queries;
      const int64_t at = static_cast<int64_t>(std::floor(static_cast<double>(place) / static_cast<double>(key_block)));
      if (column >= at - slack && column <= at + (causal ? 0 : slack)) return true;
    }
    return false;
  }
  bool sees(int64_t row, int64_t column) const {
    if (!causal) return true;
    const int64_t last = std::min((row + 1) * query_block, queries) - 1 + keys - queries;
    return column * key_block <= last;
  }
};

// Up to `longest` queries and keys, blocks of the first `sizes` powers of two from 4 on.
Trial drawn(std::mt19937& random, uint32_t longest, uint32_t sizes) {
  Trial trial{.queries = static_cast<int64_t>(random() % longest + 1),
              .keys = static_cast<int64_t>(random() % longest + 1),
              .query_block = int64_t{1} << (random() % sizes + 2),
              .key_block = int64_t{1} << (random() % sizes + 2),
              .causal = random() % 2 == 0,
              .sparsity = static_cast<double>(random() % 11) / 10,
              .sinks = static_cast<int64_t>(random() % 3),
              .local = static_cast<int64_t>(random() % 3)};
  trial.scores.resize(trial.rows() * trial.columns());
  for (float& score : trial.scores) score = static_cast<float>(random() % 50);  // ties
  return trial;
}

TEST(BlockSelect, KeepsWhatItMustAndTheBestOfTheRest) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    Trial trial = drawn(random, 700, 5);
    const Lists kept = trial.run();
    int64_t seen = 0, total = 0, forced = 0;
    for (int64_t row = 0; row < trial.rows(); ++row) {
      const std::vector<int32_t> list = kept.list(row);
      ASSERT_TRUE(std::ranges::is_sorted(list));
      std::pair<float, int64_t> worst{INFINITY, 0}, best_left{-INFINITY, 0};  // score, minus the column
      for (int64_t column = 0; column < trial.columns(); ++column) {
        const bool is_kept = std::ranges::binary_search(list, column), is_seen = trial.sees(row, column);
        const bool is_must = is_seen && (column < trial.sinks || trial.holds(row, column, trial.local));
        ASSERT_TRUE(is_seen || !is_kept) << row << " " << column;
        ASSERT_TRUE(is_kept || !is_must) << row << " " << column;
        seen += is_seen, total += is_kept, forced += is_must;
        const std::pair<float, int64_t> place{trial.scores[row * trial.columns() + column], -column};
        if (is_kept && !is_must) worst = std::min(worst, place);
        if (is_seen && !is_kept) best_left = std::max(best_left, place);
      }
      ASSERT_GT(worst, best_left) << round << " row " << row;
    }
    // As sparse as asked, and no sparser than one more block in some row would allow.
    const auto wanted = static_cast<int64_t>((1 - trial.sparsity) * static_cast<double>(seen) + 1e-6);
    ASSERT_LE(total, std::max(wanted, forced)) << round;
    ASSERT_TRUE(total >= std::min(wanted, seen) - trial.rows()) << round << " kept " << total << " of " << wanted;
  }
}

// Entries of a batch with lengths of their own are what each is alone, and rows past them are empty.
TEST(BlockSelect, EntriesWithLengthsAreAsAlone) {
  std::mt19937 random(7);
  OwnContext context;
  for (int round = 0; round < 20; ++round) {
    Trial longest = drawn(random, 400, 4);
    const int64_t rows = longest.rows(), columns = longest.columns();
    std::vector<int32_t> query_lengths(4), key_lengths(4);
    for (int i = 0; i < 4; ++i) {
      query_lengths[i] = static_cast<int32_t>(random() % (longest.queries + 1));
      key_lengths[i] = static_cast<int32_t>(random() % (longest.keys + 1));
    }
    query_lengths[0] = static_cast<int32_t>(longest.queries) + 9, key_lengths[1] = -1;  // clamped
    Lists kept(4 * rows, columns);
    TensorView scores = contiguous_view(longest.scores.data(), DType::kFloat32, {4, 1, rows, columns});
    scores.strides[0] = 0;
    select({.scores = scores,
            .query_lengths = contiguous_view(query_lengths.data(), DType::kInt32, {4}),
            .key_lengths = contiguous_view(key_lengths.data(), DType::kInt32, {4}),
            .queries = longest.queries,
            .keys = longest.keys,
            .query_block = longest.query_block,
            .key_block = longest.key_block,
            .causal = longest.causal,
            .sparsity = longest.sparsity,
            .sinks = longest.sinks,
            .local = longest.local,
            .rows = kept.views(4, 1)},
           context);
    for (int i = 0; i < 4; ++i) {
      Trial alone = longest;
      alone.queries = std::clamp<int64_t>(query_lengths[i], 0, longest.queries);
      alone.keys = std::clamp<int64_t>(key_lengths[i], 0, longest.keys);
      alone.scores.clear();
      for (int64_t row = 0; row < alone.rows(); ++row) {
        const auto begin = longest.scores.begin() + row * columns;
        alone.scores.insert(alone.scores.end(), begin, begin + alone.columns());
      }
      const Lists wanted = alone.run();
      for (int64_t row = 0; row < rows; ++row) {
        const std::vector<int32_t> expected = row < alone.rows() ? wanted.list(row) : std::vector<int32_t>{};
        ASSERT_EQ(kept.list(i * rows + row), expected) << round << " entry " << i << " row " << row;
      }
    }
  }
}

TEST(BlockSelect, ScoresOfNanAndInfinityAndThresholds) {
  Trial trial{.queries = 1,
              .keys = 6,
              .query_block = 1,
              .key_block = 1,
              .causal = false,
              .sparsity = 0.5,
              .sinks = 0,
              .local = 0};
  const float inf = INFINITY;
  trial.scores = {NAN, -inf, 2, inf, 2, 0};  // the last is the diagonal
  EXPECT_EQ(trial.run().list(0), (std::vector<int32_t>{2, 3, 5}));
  trial.sparsity = 1.0 / 6;
  EXPECT_EQ(trial.run().list(0), (std::vector<int32_t>{1, 2, 3, 4, 5}));
  trial.threshold = 2.5;
  EXPECT_EQ(trial.run().list(0), (std::vector<int32_t>{3, 5}));
}

TEST(BlockSelect, PartsFindTheKeyThatAMeanLoses) {
  // Four columns of two parts; one part of column 1 answers the query, its other part is the opposite.
  std::vector<float> query = {1, 0}, key = {0, 1, 0, 1, 4, 0, -5, 0, 1, 0, 1, 0, 0, 0, 0, 0};
  Lists kept(1, 4);
  OwnContext context;
  Select arguments{.query = contiguous_view(query.data(), DType::kFloat32, {1, 1, 1, 2}),
                   .key = contiguous_view(key.data(), DType::kFloat32, {1, 1, 8, 2}),
                   .queries = 1,
                   .keys = 16,
                   .query_block = 1,
                   .key_block = 4,
                   .key_parts = 2,
                   .sparsity = 0.5,
                   .sinks = 0,
                   .local = 0,
                   .rows = kept.views(1, 1)};
  select(arguments, context);
  EXPECT_EQ(kept.list(0), (std::vector<int32_t>{1, 3}));
}

TEST(BlockList, BadArgumentsAreNamed) {
  OwnContext context;
  std::vector<float> floats(64);
  std::vector<int8_t> map(12);
  Lists lists(3, 4);
  const auto says = [&](const std::function<void()>& call, std::string_view words) {
    const std::string message = failure_of(call);
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  says([&] { build({.rows = lists.views(1, 1)}, context); }, "map is missing");
  says(
      [&] {
        build({.map = contiguous_view(floats.data(), DType::kFloat32, {1, 1, 3, 4})}, context);
      },
      "map is fp32; convert it to int8");
  says(
      [&] {
        build({.map = contiguous_view(map.data(), DType::kInt8, {1, 1, 4, 3}), .rows = lists.views(1, 1)}, context);
      },
      "rows has shape [1, 1, 3]; it must be [1, 1, 4]");
  const Select good{.scores = contiguous_view(floats.data(), DType::kFloat32, {1, 1, 3, 4}),
                    .queries = 3,
                    .keys = 4,
                    .query_block = 1,
                    .key_block = 1,
                    .rows = lists.views(1, 1)};
  EXPECT_EQ(failure_of([&] { select(good, context); }), "");
  Select bad = good;
  bad.sparsity = 1.5;
  says([&] { select(bad, context); }, "sparsity is 1.5");
  bad = good, bad.key_block = 0;
  says([&] { select(bad, context); }, "blocks are 1 by 0");
  bad = good, bad.key_block = 4, bad.key_parts = 3;
  says([&] { select(bad, context); }, "a block of 4 keys is cut into 3 parts");
  bad = good, bad.keys = 9;
  says([&] { select(bad, context); }, "scores have shape [1, 1, 3, 4]; they must be [batch, heads, 3, 9]");
  bad = good, bad.scores = {};
  says([&] { select(bad, context); }, "query is missing, and there are no scores");
  std::vector<int32_t> lengths(2);
  bad = good, bad.query_lengths = contiguous_view(lengths.data(), DType::kInt32, {2});
  says([&] { select(bad, context); }, "lengths are given for one of query and key");
  bad.key_lengths = bad.query_lengths;
  says([&] { select(bad, context); }, "lengths has shape [2]; it must be [1]");
  bad = good, bad.rows = {};
  says([&] { select(bad, context); }, "rows, where the lists go, are missing");
}

}  // namespace
}  // namespace kernel_pytorch::block_list
