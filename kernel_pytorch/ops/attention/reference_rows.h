// What forward and backward of the reference share: the scores of one query in double, which of them are kept, and how
// each depends on the product of query and key. Everything is read from the contract, word by word; host memory only.
#pragma once

#include <cmath>
#include <span>
#include <vector>

#include "kernel_pytorch/ops/attention/programs.h"
#include "kernel_pytorch/ops/attention/sequences.h"

namespace kernel_pytorch::attention {

// One head of one sequence as doubles, row after row.
std::vector<double> load_rows(const TensorView& view, int64_t batch, int64_t head, int64_t first, int64_t count);
double dot(const double* a, const double* b, int64_t count);
// Fills rows outside every sequence too, so that every element is written.
void fill(const TensorView& view, double value);

// A captured element that a score depends on, and the score's derivative by it.
struct CapturedDerivative {
  int capture = 0;
  int64_t element = 0;  // in row-major order
  double value = 0;
};

class ScoreRows {
 public:
  // Derivatives are computed where they are wanted.
  ScoreRows(const Scoring& scoring, const Sizes& sizes, const Sequence& sequence, int64_t head, bool with_derivatives);

  // Scores of query `query` of the sequence (-inf where not kept) from its products with the keys.
  void compute(int64_t query, const double* query_row, const double* key_rows);
  int64_t keys() const { return sequence_.keys; }
  double score(int64_t key) const { return scores_[key]; }
  bool is_kept(int64_t key) const { return scores_[key] > -HUGE_VAL || std::isnan(scores_[key]); }
  double of_product(int64_t key) const { return of_product_[key]; }  // derivative by dot(query, key)
  double of_bias(int64_t key) const { return of_bias_[key]; }
  std::span<const CapturedDerivative> of_captured(int64_t key) const {
    return {of_captured_.data() + key * loads_, static_cast<size_t>(loads_)};
  }
  double kept_by_dropout(int64_t key) const { return dropout_[key]; }  // 0, or what a probability is multiplied by

 private:
  double score_of(int64_t query, int64_t key, double product);
  double changed_by_program(double score, int64_t query, int64_t key);
  bool keeps(int64_t query, int64_t key) const;
  void read_tiles(int64_t query);
  void draw_dropout(int64_t query);

  const Scoring& scoring_;
  Sequence sequence_;
  int64_t head_, heads_, size_;
  bool with_derivatives_;
  const expression::Mods* programs_ = nullptr;  // null: none
  int64_t loads_ = 0;                           // captured elements that a score may depend on
  std::vector<CapturedDerivative> of_captured_;
  std::vector<double> scores_, of_product_, of_bias_, dropout_;
  enum class Tile : uint8_t { kEmpty, kPartial, kFull };
  std::vector<Tile> tiles_;  // of the query's row of tiles
};

}  // namespace kernel_pytorch::attention
