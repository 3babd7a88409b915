// The CPU kernels of the lists. Rows: a task lists a few rows. Columns: a task walks down all rows of a strip of
// columns as wide as a cache line, so that the map is read once. Selection: a task scores the blocks
// of a few rows and keeps the best of each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/block_list/arguments_cuda.h"
#include "kernel_pytorch/ops/block_list/cpu/scores.h"
#include "kernel_pytorch/ops/block_list/operation.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::block_list {
namespace {

constexpr int64_t kStripColumns = 64, kTaskEntries = 1 << 14;

// Appends to list i without a branch: what is not wanted is written over by the next, or by the zeros at the end. The
// last entry of a list's memory can only be its own.
struct Appender {
  int32_t* blocks;
  int64_t length, count = 0;

  Appender(const List& list, int64_t i)
      : blocks(list.is_present() ? list.blocks.as<int32_t>() + i * list.blocks.sizes[3] : nullptr),
        length(list.is_present() ? list.blocks.sizes[3] : 0) {}
  void add(bool wanted, int64_t index) {
    blocks[count] = static_cast<int32_t>(index);
    count += wanted;
  }
  void finish(const List& list, int64_t i) {
    std::fill(blocks + count, blocks + length, 0);
    list.counts.as<int32_t>()[i] = static_cast<int32_t>(count);
  }
};

void list_row(const uint8_t* map, int64_t columns, const List& list, uint8_t state, int64_t row) {
  if (!list.is_present()) return;
  Appender appender(list, row);
  for (int64_t column = 0; column < columns; ++column) appender.add(map[column] == state, column);
  appender.finish(list, row);
}

void list_columns(const uint8_t* map, int64_t rows, int64_t columns, const List& list, uint8_t state, int64_t first,
                  int64_t first_list) {
  if (!list.is_present()) return;
  const int64_t count = std::min(kStripColumns, columns - first);
  int64_t counts[kStripColumns] = {};
  int32_t* blocks = list.blocks.as<int32_t>() + first_list * rows;
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* states = map + row * columns + first;
    for (int64_t i = 0; i < count; ++i) {
      if (states[i] == state) blocks[i * rows + counts[i]++] = static_cast<int32_t>(row);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    std::fill(blocks + i * rows + counts[i], blocks + (i + 1) * rows, 0);
    list.counts.as<int32_t>()[first_list + i] = static_cast<int32_t>(counts[i]);
  }
}

void run_build_cpu(const Build& problem, int, Context& context) {
  const TensorView& map = problem.map;
  const int64_t heads = map.sizes[0] * map.sizes[1], rows = map.sizes[2], columns = map.sizes[3];
  const uint8_t* states = map.as<const uint8_t>();
  if (problem.rows.is_present() || problem.full_rows.is_present()) {
    const int64_t task_rows = std::max<int64_t>(kTaskEntries / std::max<int64_t>(columns, 1), 1);
    parallel_for(context.threads, (heads * rows + task_rows - 1) / task_rows, [&](int64_t task) {
      const int64_t end = std::min(heads * rows, (task + 1) * task_rows);
      for (int64_t row = task * task_rows; row < end; ++row) {
        list_row(states + row * columns, columns, problem.rows, kPartial, row);
        list_row(states + row * columns, columns, problem.full_rows, kFull, row);
      }
    });
  }
  if (problem.columns.is_present() || problem.full_columns.is_present()) {
    const int64_t strips = (columns + kStripColumns - 1) / kStripColumns;
    parallel_for(context.threads, heads * strips, [&](int64_t task) {
      const int64_t head = task / strips, first = task % strips * kStripColumns;
      const uint8_t* of_head = states + head * rows * columns;
      list_columns(of_head, rows, columns, problem.columns, kPartial, first, head * columns + first);
      list_columns(of_head, rows, columns, problem.full_columns, kFull, first, head * columns + first);
    });
  }
}

uint64_t cpu_code_version() {
  return hash_text("block_list cpu 1");
}

registry::Support supports_select(const Selection& selection, const DeviceInfo& device) {
  const DType dtype = selection.has_scores() ? DType::kFloat32 : selection.given.query.dtype;
  return registry::Support::unless(cpu_obstacle(dtype, device));
}

struct Scored {
  float score;
  int32_t column;
  // Best first: NaN behind all, of equal scores the lower column.
  bool operator<(const Scored& other) const {
    const bool is_nan = std::isnan(score), other_is_nan = std::isnan(other.score);
    if (is_nan != other_is_nan) return other_is_nan;
    if (!is_nan && score != other.score) return score > other.score;
    return column < other.column;
  }
};

class RowSelector {
 public:
  RowSelector(const Selection& selection, const ScoreKernels* kernels)
      : selection_(selection), grids_(grids_of(selection)), kernels_(kernels) {}

  void select(int64_t list) const {
    const Select& given = selection_.given;
    const int32_t columns = selection_.grid.columns;
    const auto number = static_cast<int32_t>(list % selection_.grid.rows);
    const int64_t head = list / selection_.grid.rows;
    const Grid& grid = grids_[static_cast<size_t>(head / selection_.heads())];
    const Row row = number < grid.rows ? row_of(grid, number) : Row{};
    std::vector<uint8_t> kept(static_cast<size_t>(columns), kEmpty);
    for (int32_t column = 0; column < row.visible; ++column) kept[column] = row.is_kept_always(column);
    if (row.picked > 0) {
      std::vector<float> scores(static_cast<size_t>(row.visible));
      find_scores(head / selection_.heads(), head % selection_.heads(), number, scores);
      pick(row, scores, kept);
    }
    int32_t count = 0;
    int32_t* blocks = given.rows.blocks.as<int32_t>() + list * columns;
    for (int32_t column = 0; column < columns; ++column) {
      if (kept[column] != kEmpty) blocks[count++] = column;
    }
    std::fill(blocks + count, blocks + columns, 0);
    given.rows.counts.as<int32_t>()[list] = count;
    if (given.map.is_present()) std::ranges::copy(kept, given.map.as<uint8_t>() + list * columns);
  }

 private:
  void find_scores(int64_t batch, int64_t head, int32_t row, std::vector<float>& scores) const {
    const Select& given = selection_.given;
    if (selection_.has_scores()) {
      const TensorView& view = given.scores;
      const float* from =
          view.as<const float>() + batch * view.strides[0] + head * view.strides[1] + row * view.strides[2];
      for (size_t i = 0; i < scores.size(); ++i) scores[i] = from[static_cast<int64_t>(i) * view.strides[3]];
      return;
    }
    const auto at = [](const TensorView& view, int64_t i, int64_t j, int64_t k) {
      return view.as<const char>() +
             (i * view.strides[0] + j * view.strides[1] + k * view.strides[2]) * size_of(view.dtype);
    };
    kernels_->score({.query = at(given.query, batch, head, row),
                     .keys = at(given.key, batch, head / selection_.group(), 0),
                     .key_stride = given.key.strides[2],
                     .size = given.query.sizes[3],
                     .parts = parts_of(grids_[static_cast<size_t>(batch)], given.key_parts),
                     .key_parts = given.key_parts,
                     .columns = static_cast<int32_t>(scores.size()),
                     .scores = scores.data()});
  }

  void pick(const Row& row, const std::vector<float>& scores, std::vector<uint8_t>& kept) const {
    const double threshold = selection_.given.threshold;
    std::vector<Scored> others;
    for (int32_t column = 0; column < row.visible; ++column) {
      const bool is_high = scores[column] >= threshold || threshold == -std::numeric_limits<double>::infinity();
      if (is_high && kept[column] == kEmpty) others.push_back({scores[column], column});
    }
    const auto picked = std::min<int64_t>(row.picked, static_cast<int64_t>(others.size()));
    if (picked < static_cast<int64_t>(others.size()))
      std::nth_element(others.begin(), others.begin() + picked, others.end());
    for (int64_t i = 0; i < picked; ++i) kept[others[i].column] = kPartial;
  }

  const Selection& selection_;
  std::vector<Grid> grids_;  // of each entry of the batch
  const ScoreKernels* kernels_;
};

void run_select_cpu(const Selection& selection, int, Context& context) {
  const DType dtype = selection.given.query.dtype;
  const int type = dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 1 : 2;
  const RowSelector selector(selection, KP_AT_CPU_LEVEL(context.info->cpu.isa, kScoreKernels) + type);
  const int64_t lists = selection.batch() * selection.heads() * selection.grid.rows;
  constexpr int64_t kTaskLists = 8;
  parallel_for(context.threads, (lists + kTaskLists - 1) / kTaskLists, [&](int64_t task) {
    const int64_t end = std::min(lists, (task + 1) * kTaskLists);
    for (int64_t list = task * kTaskLists; list < end; ++list) selector.select(list);
  });
}

uint64_t select_code_version() {
  return hash_text("block_select cpu 1");
}

}  // namespace

constinit const registry::Kernel<Build> kBuildCpu{
    .name = "cpu", .supports = supports_on_cpu<Build>, .run = run_build_cpu, .source_hash = cpu_code_version};
constinit const registry::Kernel<Selection> kSelectCpu{
    .name = "cpu", .supports = supports_select, .run = run_select_cpu, .source_hash = select_code_version};

}  // namespace kernel_pytorch::block_list
