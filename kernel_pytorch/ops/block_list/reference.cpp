// The reference of the lists: one entry of the map after another, whatever is asked of it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/ops/block_list/arguments_cuda.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::block_list {
namespace {

// Lists of what has this state: entry i of list l of a head lies at l * list_step + i * step.
void list_states(const TensorView& map, const List& list, int state, int64_t list_step, int64_t step) {
  if (!list.is_present()) return;
  const int64_t lists = list.blocks.sizes[2], length = list.blocks.sizes[3];
  for (int64_t head = 0; head < map.sizes[0] * map.sizes[1]; ++head) {
    for (int64_t i = 0; i < lists; ++i) {
      int32_t* blocks = list.blocks.as<int32_t>() + (head * lists + i) * length;
      int32_t count = 0;
      for (int64_t j = 0; j < length; ++j) {
        const int64_t at = head * map.sizes[2] * map.sizes[3] + i * list_step + j * step;
        blocks[j] = 0;
        if (load_element(map.data, map.dtype, at) == state) blocks[count++] = static_cast<int32_t>(j);
      }
      list.counts.as<int32_t>()[head * lists + i] = count;
    }
  }
}

void run_build(const Build& problem, int, Context&) {
  const int64_t columns = problem.map.sizes[3];
  list_states(problem.map, problem.rows, kPartial, columns, 1);
  list_states(problem.map, problem.full_rows, kFull, columns, 1);
  list_states(problem.map, problem.columns, kPartial, 1, columns);
  list_states(problem.map, problem.full_columns, kFull, 1, columns);
}

// In double, from what is stored.
double score_of(const Selection& selection, int64_t parts, int64_t batch, int64_t head, int64_t row, int64_t column) {
  const Select& given = selection.given;
  const auto at = [](const TensorView& view, int64_t i, int64_t j, int64_t k, int64_t l) {
    const int64_t offset = i * view.strides[0] + j * view.strides[1] + k * view.strides[2] + l * view.strides[3];
    return load_element(view.data, view.dtype, offset);
  };
  if (selection.has_scores()) return at(given.scores, batch, head, row, column);
  double best = std::numeric_limits<double>::quiet_NaN();
  const int64_t end = std::min((column + 1) * given.key_parts, parts);
  for (int64_t part = column * given.key_parts; part < end; ++part) {
    double sum = 0;
    for (int64_t i = 0; i < given.query.sizes[3]; ++i) {
      sum += at(given.query, batch, head, row, i) * at(given.key, batch, head / selection.group(), part, i);
    }
    best = std::fmax(best, sum);
  }
  return best;
}

std::vector<bool> kept_of_row(const Selection& selection, const Grid& grid, int64_t batch, int64_t head,
                              int32_t number) {
  const double threshold = selection.given.threshold, lowest = -std::numeric_limits<double>::infinity();
  std::vector<bool> kept(static_cast<size_t>(selection.grid.columns));
  if (number >= grid.rows) return kept;
  const Row row = row_of(grid, number);
  std::vector<std::tuple<bool, double, int32_t>> others;  // NaN, minus the score, column: the best sorts first
  for (int32_t column = 0; column < row.visible; ++column) {
    const double score = score_of(selection, parts_of(grid, selection.given.key_parts), batch, head, number, column);
    if (row.is_kept_always(column)) {
      kept[column] = true;
    } else if (score >= threshold || threshold == lowest) {
      others.emplace_back(std::isnan(score), std::isnan(score) ? 0 : -score, column);
    }
  }
  std::ranges::sort(others);
  for (size_t i = 0; i < others.size() && i < static_cast<size_t>(row.picked); ++i) kept[std::get<2>(others[i])] = true;
  return kept;
}

void run_select(const Selection& selection, int, Context&) {
  const Select& given = selection.given;
  const int64_t rows = selection.grid.rows, columns = selection.grid.columns;
  const std::vector<Grid> grids = grids_of(selection);
  for (int64_t list = 0; list < selection.batch() * selection.heads() * rows; ++list) {
    const int64_t head = list / rows;
    const int64_t batch = head / selection.heads();
    const std::vector<bool> kept = kept_of_row(selection, grids[static_cast<size_t>(batch)], batch,
                                               head % selection.heads(), static_cast<int32_t>(list % rows));
    int32_t count = 0;
    int32_t* blocks = given.rows.blocks.as<int32_t>() + list * columns;
    std::fill_n(blocks, columns, 0);
    for (int32_t column = 0; column < columns; ++column) {
      if (kept[column]) blocks[count++] = column;
      if (given.map.is_present()) given.map.as<uint8_t>()[list * columns + column] = kept[column] ? kPartial : kEmpty;
    }
    given.rows.counts.as<int32_t>()[list] = count;
  }
}

uint64_t code_version() {
  return hash_text("block_list reference 1");
}

}  // namespace

constinit const registry::Kernel<Build> kBuildReference{
    .name = "reference", .supports = supports_on_cpu<Build>, .run = run_build, .source_hash = code_version};

constinit const registry::Kernel<Selection> kSelectReference{
    .name = "reference", .supports = supports_on_cpu<Selection>, .run = run_select, .source_hash = code_version};

}  // namespace kernel_pytorch::block_list
