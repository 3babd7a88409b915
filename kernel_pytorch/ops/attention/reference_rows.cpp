#include "kernel_pytorch/ops/attention/reference_rows.h"

#include <algorithm>
#include <cmath>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/expression/interpret.h"
#include "kernel_pytorch/ops/attention/cuda/dropout_cuda.h"

namespace kernel_pytorch::attention {
namespace {

double at(const TensorView& view, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  const int64_t* stride = view.strides.data();
  for (int64_t i : index) offset += i * *stride++;
  return load_element(view.data, view.dtype, offset);
}

}  // namespace

std::vector<double> load_rows(const TensorView& view, int64_t batch, int64_t head, int64_t first, int64_t count) {
  std::vector<double> rows;
  rows.reserve(static_cast<size_t>(count * view.sizes[3]));
  for (int64_t row = first; row < first + count; ++row) {
    for (int64_t column = 0; column < view.sizes[3]; ++column) rows.push_back(at(view, {batch, head, row, column}));
  }
  return rows;
}

double dot(const double* a, const double* b, int64_t count) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return sums[0] + sums[1] + sums[2] + sums[3];
}

void fill(const TensorView& view, double value) {
  std::array<int64_t, kMaxRank> index{};
  for (int64_t left = view.element_count(); left > 0; --left) {
    int64_t offset = 0;
    for (int i = 0; i < view.rank; ++i) offset += index[i] * view.strides[i];
    store_element(view.data, view.dtype, offset, value);
    for (int i = view.rank - 1; i >= 0 && ++index[i] == view.sizes[i]; --i) index[i] = 0;
  }
}

ScoreRows::ScoreRows(const Scoring& scoring, const Sizes& sizes, const Sequence& sequence, int64_t head,
                     bool with_derivatives)
    : scoring_(scoring),
      sequence_(sequence),
      head_(head),
      heads_(sizes.heads),
      size_(sizes.size),
      with_derivatives_(with_derivatives) {
  if (has_programs(scoring)) programs_ = &programs_of(scoring);
  if (with_derivatives && programs_ != nullptr && programs_->score_mod_gradient) {
    loads_ = static_cast<int64_t>(programs_->score_mod_gradient->loads.size());
    of_captured_.resize(static_cast<size_t>(loads_ * sequence.keys));
  }
  for (std::vector<double>* row : {&scores_, &of_product_, &of_bias_, &dropout_}) row->resize(sequence.keys, 1.0);
}

void ScoreRows::compute(int64_t query, const double* query_row, const double* key_rows) {
  if (scoring_.block_list.is_present()) read_tiles(query);
  for (int64_t key = 0; key < sequence_.keys; ++key) {
    scores_[key] = keeps(query, key) ? score_of(query, key, dot(query_row, key_rows + key * size_, size_)) : -HUGE_VAL;
  }
  if (scoring_.dropout_p > 0) draw_dropout(query);
}

double ScoreRows::score_of(int64_t query, int64_t key, double product) {
  double score = *scoring_.scale * product;
  of_product_[key] = *scoring_.scale;
  of_bias_[key] = 1;
  const auto cap = [&] {
    if (scoring_.softcap == 0 || score == -HUGE_VAL) return;
    const double part = std::tanh(score / scoring_.softcap);
    score = scoring_.softcap * part;
    of_product_[key] *= 1 - part * part;
    if (scoring_.softcap_after_bias) of_bias_[key] *= 1 - part * part;
  };
  if (!scoring_.softcap_after_bias) cap();
  if (scoring_.bias.is_present()) score += at(scoring_.bias, {sequence_.index, head_, query, key});
  if (scoring_.alibi_slopes.is_present()) {
    score -= at(scoring_.alibi_slopes, {sequence_.index, head_}) * std::fabs(key - query - sequence_.offset);
  }
  if (scoring_.softcap_after_bias) cap();
  return programs_ != nullptr && programs_->score_mod ? changed_by_program(score, query, key) : score;
}

double ScoreRows::changed_by_program(double score, int64_t query, int64_t key) {
  const expression::Inputs<double> inputs{.score = score,
                                          .batch = sequence_.index,
                                          .head = head_,
                                          .query = scoring_.first_query + query,
                                          .key = scoring_.first_key + key};
  if (with_derivatives_) {
    const expression::Gradient& gradient = *programs_->score_mod_gradient;
    const auto values = expression::interpret(gradient.program, inputs, scoring_.captured);
    of_product_[key] *= values[0].real;
    of_bias_[key] *= values[0].real;
    for (int64_t i = 0; i < loads_; ++i) {
      const expression::LoadGradient& load = gradient.loads[i];
      CapturedDerivative& of_captured = of_captured_[key * loads_ + i];
      of_captured = {.capture = load.capture, .element = 0, .value = values[load.derivative].real};
      const TensorView& view = scoring_.captured[load.capture];
      for (int d = 0; d < view.rank; ++d) {
        const int64_t place = expression::place_of(values[load.indices + d].integer, view.sizes[d]);
        of_captured.element = of_captured.element * view.sizes[d] + place;
      }
    }
  }
  return expression::interpret(*programs_->score_mod, inputs, scoring_.captured)[0].real;
}

bool ScoreRows::keeps(int64_t query, int64_t key) const {
  const int64_t distance = key - (query + sequence_.offset);
  if (scoring_.causal && distance > 0) return false;
  if (scoring_.window_left >= 0 && distance < -scoring_.window_left) return false;
  if (scoring_.window_right >= 0 && distance > scoring_.window_right) return false;
  if (scoring_.query_segment_ids.is_present()) {
    const double of_query = at(scoring_.query_segment_ids, {sequence_.batch, sequence_.first_query + query});
    const double of_key = at(scoring_.key_segment_ids, {sequence_.batch, sequence_.first_key + key});
    if (of_query != of_key || of_query == -1) return false;
  }
  if (scoring_.mask.is_present() && at(scoring_.mask, {sequence_.index, head_, query, key}) == 0) return false;
  const Tile tile = scoring_.block_list.is_present() ? tiles_[key / scoring_.block_list.key_block] : Tile::kPartial;
  if (tile != Tile::kPartial || programs_ == nullptr || !programs_->mask_mod) return tile != Tile::kEmpty;
  const expression::Inputs<double> inputs{
      .batch = sequence_.index, .head = head_, .query = scoring_.first_query + query, .key = scoring_.first_key + key};
  return expression::interpret(*programs_->mask_mod, inputs, scoring_.captured)[0].boolean;
}

void ScoreRows::read_tiles(int64_t query) {
  const BlockList& list = scoring_.block_list;
  tiles_.assign((sequence_.keys + list.key_block - 1) / list.key_block, Tile::kEmpty);
  const auto read = [&](const TensorView& counts, const TensorView& blocks, Tile kind) {
    if (!counts.is_present()) return;
    const int64_t batch = std::min(sequence_.index, counts.sizes[0] - 1), head = std::min(head_, counts.sizes[1] - 1);
    const int64_t row = query / list.query_block;
    if (row >= counts.sizes[2]) return;
    const auto count = static_cast<int64_t>(at(counts, {batch, head, row}));
    for (int64_t i = 0; i < count; ++i) {
      const auto column = static_cast<size_t>(at(blocks, {batch, head, row, i}));
      if (column < tiles_.size()) tiles_[column] = kind;
    }
  };
  read(list.key_counts, list.key_blocks, Tile::kPartial);
  read(list.full_key_counts, list.full_key_blocks, Tile::kFull);
}

void ScoreRows::draw_dropout(int64_t query) {
  const auto* seed = scoring_.seed.as<const int64_t>();
  const uint32_t threshold = dropout_byte_threshold(scoring_.dropout_p);
  const auto of_query = static_cast<uint32_t>(scoring_.first_query + query);
  const auto row = static_cast<uint32_t>(sequence_.index * heads_ + head_);
  for (int64_t key = 0; key < sequence_.keys; ++key) {
    const auto of_key = static_cast<uint32_t>(scoring_.first_key + key);
    const PhiloxBlock block = dropout_block(static_cast<uint64_t>(seed[0]), static_cast<uint64_t>(seed[1]), row,
                                            dropout_block_index(of_query), dropout_block_index(of_key));
    const uint32_t byte = dropout_byte(block, dropout_place(of_query), dropout_place(of_key));
    dropout_[key] = byte >= threshold ? dropout_byte_scale(scoring_.dropout_p) : 0;
  }
}

}  // namespace kernel_pytorch::attention
