// How a product is cut for the CPU: all of A is packed first (a slab of rows at a time, if it is large), then tasks
// take chunks of its rows and groups of columns of B, which they pack themselves into a buffer that stays in the second
// cache. Where many chunks would pack the same columns, B is packed first as well. Tasks are handed out one by one.
#include "kernel_pytorch/ops/matmul/cpu/plan.h"

#include <algorithm>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/support/cpu_support.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr int64_t kPackTiles = 8;
constexpr int64_t kPackPanels = 4;       // rows of B are read in longer runs
constexpr int64_t kTaskFlops = 1 << 22;  // what is worth another thread

int64_t divide_up(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}
int64_t round_up(int64_t value, int64_t step) {
  return divide_up(value, step) * step;
}

char* allocate(Context& context, int64_t bytes) {
  return static_cast<char*>(context.scratch->allocate(static_cast<size_t>(std::max<int64_t>(bytes, kLineBytes))));
}

void* element(const TensorView& view, int64_t batch, int64_t row, int64_t column) {
  const int64_t offset = batch * view.strides[0] + row * view.strides[1] + column;
  return static_cast<char*>(view.data) + offset * size_of(view.dtype);
}
Rows rows_of(const TensorView& view, int64_t batch, int64_t row, int64_t column) {
  if (!view.is_present()) return {};
  return {element(view, batch, row, column), view.dtype, view.strides[1]};
}

int64_t workers_for(const Sizes& sizes, const Context& context) {
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  const double flops = 2.0 * static_cast<double>(sizes.batch) * static_cast<double>(sizes.m) *
                       static_cast<double>(sizes.n) * static_cast<double>(std::max<int64_t>(sizes.k, 1));
  return std::clamp<int64_t>(static_cast<int64_t>(flops / kTaskFlops), 1, threads);
}

// Tasks from an atomic counter, each worker with its own buffer: body(task, buffer).
template <class Body>
void for_tasks(Context& context, int64_t workers, int64_t tasks, char* buffers, int64_t buffer_bytes,
               const ProductKernels* kernels, const Body& body) {
  TaskQueue queue(tasks);
  parallel_for(context.threads, std::min(workers, tasks), [&](int64_t worker) {
    if (kernels != nullptr && kernels->begin != nullptr) kernels->begin();
    for (int64_t task; (task = queue.take()) >= 0;) {
      body(task, buffers + worker * buffer_bytes);
    }
    if (kernels != nullptr && kernels->end != nullptr) kernels->end();
  });
}

class PackedProduct {
 public:
  PackedProduct(const Product& problem, const ProductKernels& kernels, Context& context)
      : problem_(problem), kernels_(kernels), context_(context), sizes_(sizes_of(problem)) {
    workers_ = workers_for(sizes_, context);
    const int64_t terms = problem.precision == Precision::kBf16x3 && kernels.splits_bfloat16 ? 3 : 1;
    steps_ = round_up(sizes_.k, kernels.depth);
    step_bytes_ = terms * kernels.element_bytes;  // of one row or column
    blocks_ = std::max<int64_t>(divide_up(steps_ * terms, kernels.block_steps), 1);
    block_ = std::max<int64_t>(round_up(divide_up(steps_, blocks_), kernels.depth), kernels.depth);
    blocks_ = std::max<int64_t>(divide_up(steps_, block_), 1);
    terms_ = terms;
    a_tile_bytes_ = block_ * kernels.tile_rows * step_bytes_;
    b_panel_bytes_ = steps_ * kernels.panel_columns * step_bytes_;
    plan_slabs();
    plan_tasks();
  }

  void run() {
    const int64_t a_bytes = round_up(units_per_wave_ * tiles_per_slab_ * blocks_ * a_tile_bytes_, kLineBytes);
    const int64_t b_bytes = shares_b_ ? round_up(panels_per_slab_ * b_panel_bytes_, kLineBytes) : 0;
    packed_a_ = allocate(context_, a_bytes + b_bytes);
    packed_b_ = packed_a_ + a_bytes;
    buffers_ = allocate(context_, workers_ * buffer_bytes_);
    const int64_t units = sizes_.batch * slabs_, panels = divide_up(sizes_.n, kernels_.panel_columns);
    for (int64_t unit = 0; unit < units;) {
      // Shared columns are those of one batch.
      const int64_t batch_end = (unit / slabs_ + 1) * slabs_;
      const int64_t end = shares_b_ ? batch_end : std::min(units, unit + units_per_wave_);
      for (int64_t panel = 0; panel < panels; panel += panels_per_slab_) {
        const int64_t panel_end = std::min(panels, panel + panels_per_slab_);
        for (int64_t first = unit; first < end; first += units_per_wave_) {
          const bool packs_columns = shares_b_ && first == unit;
          const bool packs_rows = panel == 0 || end - unit > units_per_wave_;  // else they are still there
          pack(first, packs_rows ? std::min(end, first + units_per_wave_) : first, panel,
               packs_columns ? panel_end : panel);
          multiply(first, std::min(end, first + units_per_wave_), panel, panel_end);
        }
      }
      unit = end;
    }
  }

 private:
  // Rows of A that are packed together, and how many such slabs (of several batches) fit.
  void plan_slabs() {
    const int64_t chunk_tiles = std::max<int64_t>(kernels_.chunk_rows / kernels_.tile_rows, 1);
    const int64_t tiles = divide_up(sizes_.m, kernels_.tile_rows);
    const int64_t fitting =
        std::max<int64_t>(kernels_.row_slab_bytes / (a_tile_bytes_ * blocks_) / chunk_tiles * chunk_tiles, chunk_tiles);
    tiles_per_slab_ = std::max<int64_t>(std::min(tiles, fitting), 1);
    slabs_ = divide_up(std::max<int64_t>(tiles, 1), tiles_per_slab_);
    units_per_wave_ = std::clamp<int64_t>(kernels_.row_slab_bytes / (tiles_per_slab_ * a_tile_bytes_ * blocks_), 1,
                                          sizes_.batch * slabs_);
  }

  // Chunks and groups small enough that every worker has a few.
  void plan_tasks() {
    const int64_t panels = divide_up(sizes_.n, kernels_.panel_columns);
    const int64_t wanted = workers_ == 1 ? 1 : 4 * workers_;
    group_ = std::min(kernels_.group_panels, std::max<int64_t>(panels, 1));
    chunk_tiles_ = std::clamp<int64_t>(kernels_.chunk_rows / kernels_.tile_rows, 1, tiles_per_slab_);
    if (slabs_ == 1 && tiles_per_slab_ * kernels_.tile_rows <=
                           kernels_.solo_rows) {  // no other task shares the columns: fewer of them, all rows
      chunk_tiles_ = tiles_per_slab_;
      group_ = divide_up(group_, 2);
    }
    chunk_tiles_ = divide_up(tiles_per_slab_, divide_up(tiles_per_slab_, chunk_tiles_));  // of equal size
    const auto tasks = [&] {
      return units_per_wave_ * divide_up(tiles_per_slab_, chunk_tiles_) * divide_up(panels, group_);
    };
    while (tasks() < wanted && group_ > 1) group_ = divide_up(group_, 2);
    while (tasks() < wanted && chunk_tiles_ > 4) chunk_tiles_ = divide_up(chunk_tiles_, 2);
    shares_b_ = divide_up(tiles_per_slab_, chunk_tiles_) * slabs_ > 1;
    panels_per_slab_ = std::max<int64_t>(panels, 1);
    if (shares_b_) {
      const int64_t fitting =
          std::max<int64_t>(kernels_.column_slab_bytes / std::max<int64_t>(b_panel_bytes_, 1) / group_, 1) * group_;
      const int64_t slabs = divide_up(panels_per_slab_, fitting);
      panels_per_slab_ = std::min(fitting, round_up(divide_up(panels_per_slab_, slabs), group_));
      units_per_wave_ = 1;
    }
    const int64_t tile_floats = kernels_.tile_rows * kernels_.panel_columns;
    sums_floats_ = blocks_ == 1 ? 0 : tile_floats;
    sums_bytes_ = tile_floats * 4 * (blocks_ == 1 ? 1 : chunk_tiles_ * group_);
    b_block_bytes_ = block_ * kernels_.panel_columns * step_bytes_;
    buffer_bytes_ = round_up(sums_bytes_ + (shares_b_ ? 0 : group_ * b_block_bytes_), 4096) + kLineBytes;
  }

  struct Unit {
    int64_t batch, first_row, rows;
  };
  Unit unit_at(int64_t index) const {
    const int64_t first = index % slabs_ * tiles_per_slab_ * kernels_.tile_rows;
    return {index / slabs_, first, std::min(sizes_.m - first, tiles_per_slab_ * kernels_.tile_rows)};
  }

  // Tiles of one block of k follow each other.
  char* packed_tile(int64_t slot, int64_t block, int64_t tile) const {
    return packed_a_ + ((slot * blocks_ + block) * tiles_per_slab_ + tile) * a_tile_bytes_;
  }

  // Rows of A of some units and the columns of panels [panel, panel_end) of B, side by side.
  void pack(int64_t first, int64_t end, int64_t panel, int64_t panel_end) {
    const int64_t pieces = divide_up(tiles_per_slab_, kPackTiles), rows = (end - first) * pieces;
    const int64_t columns = divide_up(panel_end - panel, kPackPanels);
    for_tasks(context_, workers_, rows + columns, nullptr, 0, nullptr, [&](int64_t task, char*) {
      if (task < rows) {
        pack_rows(task / pieces, unit_at(first + task / pieces), task % pieces * kPackTiles);
      } else {
        pack_columns(first / slabs_, panel, (task - rows) * kPackPanels, panel_end);
      }
    });
  }

  void pack_rows(int64_t slot, const Unit& unit, int64_t tile) {
    const int64_t row = tile * kernels_.tile_rows;
    if (row >= unit.rows) return;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t step = block * block_;
      kernels_.pack_a({.from = operand_of(problem_.a, unit.batch),
                       .first = unit.first_row + row,
                       .count = std::min(kPackTiles * kernels_.tile_rows, unit.rows - row),
                       .step = step,
                       .steps = std::min(block_, sizes_.k - step),
                       .to = packed_tile(slot, block, tile),
                       .tile_bytes = a_tile_bytes_,
                       .precision = problem_.precision});
    }
  }

  void pack_columns(int64_t batch, int64_t panel, int64_t first, int64_t end) {
    const int64_t column = (panel + first) * kernels_.panel_columns;
    const int64_t count = std::min(kPackPanels, end - panel - first) * kernels_.panel_columns;
    kernels_.pack_b({.from = operand_of(problem_.b, batch),
                     .first = column,
                     .count = std::min(count, sizes_.n - column),
                     .step = 0,
                     .steps = sizes_.k,
                     .to = packed_b_ + first * b_panel_bytes_,
                     .tile_bytes = b_panel_bytes_,
                     .precision = problem_.precision});
  }

  void multiply(int64_t first, int64_t end, int64_t panel, int64_t panel_end) {
    const int64_t chunks = divide_up(tiles_per_slab_, chunk_tiles_), groups = divide_up(panel_end - panel, group_);
    for_tasks(context_, workers_, (end - first) * chunks * groups, buffers_, buffer_bytes_, &kernels_,
              [&](int64_t task, char* buffer) {
                const int64_t chunk = task % chunks, group = task / chunks % groups, unit = task / chunks / groups;
                const int64_t begin = panel + group * group_;
                run_task(unit, unit_at(first + unit), chunk * chunk_tiles_, begin, std::min(panel_end, begin + group_),
                         begin - panel, buffer);
              });
  }

  // Tiles from `tile` on, of a chunk, and panels [panel, end); `packed` is the first of them among those packed.
  void run_task(int64_t slot, const Unit& unit, int64_t tile, int64_t panel, int64_t end, int64_t packed,
                char* buffer) {
    const int64_t row = tile * kernels_.tile_rows;
    if (row >= unit.rows) return;
    const int64_t columns_each = kernels_.panel_columns, first_column = panel * columns_each;
    const int64_t columns = std::min(sizes_.n, end * columns_each) - first_column;
    char* own_b = buffer + sums_bytes_;
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t step = block * block_, steps = std::min(block_, steps_ - step);
      if (!shares_b_) {
        kernels_.pack_b({.from = operand_of(problem_.b, unit.batch),
                         .first = first_column,
                         .count = columns,
                         .step = step,
                         .steps = std::min(steps, sizes_.k - step),
                         .to = own_b,
                         .tile_bytes = b_block_bytes_,
                         .precision = problem_.precision});
      }
      const char* shared = packed_b_ + packed * b_panel_bytes_ + step * columns_each * step_bytes_;
      kernels_.multiply({.a = packed_tile(slot, block, tile),
                         .a_tile_bytes = a_tile_bytes_,
                         .b = shares_b_ ? shared : own_b,
                         .b_panel_bytes = shares_b_ ? b_panel_bytes_ : b_block_bytes_,
                         .steps = steps * terms_,
                         .rows = std::min(unit.rows - row, chunk_tiles_ * kernels_.tile_rows),
                         .columns = columns,
                         .sums = reinterpret_cast<float*>(buffer),
                         .sums_tile_floats = sums_floats_,
                         .add = block > 0,
                         .is_last = block + 1 == blocks_,
                         .epilogue = epilogue_of(problem_, unit.batch, unit.first_row + row, first_column)});
    }
  }

  const Product& problem_;
  const ProductKernels& kernels_;
  Context& context_;
  const Sizes sizes_;
  int64_t workers_ = 1;
  int64_t steps_ = 0, terms_ = 1, step_bytes_ = 0;  // of k
  int64_t blocks_ = 1, block_ = 0;                  // of k
  int64_t a_tile_bytes_ = 0, b_panel_bytes_ = 0, b_block_bytes_ = 0;
  int64_t tiles_per_slab_ = 1, slabs_ = 1, units_per_wave_ = 1, panels_per_slab_ = 1;
  int64_t chunk_tiles_ = 1, group_ = 1;  // of a task
  bool shares_b_ = false;
  int64_t sums_floats_ = 0, sums_bytes_ = 0, buffer_bytes_ = 0;
  char* packed_a_ = nullptr;
  char* packed_b_ = nullptr;
  char* buffers_ = nullptr;
};

}  // namespace

Operand operand_of(const TensorView& view, int64_t batch) {
  return {static_cast<char*>(view.data) + batch * view.strides[0] * size_of(view.dtype), view.dtype, view.strides[1],
          view.strides[2]};
}

Epilogue epilogue_of(const Product& problem, int64_t batch, int64_t row, int64_t column) {
  const Form form = problem.form;
  const int64_t output_column = form == Form::kGated ? column / 2 : form == Form::kGatedGradient ? 2 * column : column;
  Epilogue epilogue{.alpha = static_cast<float>(problem.alpha),
                    .beta = static_cast<float>(problem.beta),
                    .streams = problem.output.byte_count() >= kStreamFromBytes,
                    .form = form,
                    .activation = problem.activation,
                    .saved = rows_of(problem.saved, batch, row, output_column),
                    .residual = rows_of(problem.residual, batch, row, output_column),
                    .preactivation = rows_of(problem.preactivation, batch, row, column),
                    .output = rows_of(problem.output, batch, row, output_column)};
  if (problem.bias.is_present()) {
    epilogue.bias = static_cast<char*>(problem.bias.data) + column * size_of(problem.bias.dtype);
    epilogue.bias_dtype = problem.bias.dtype;
  }
  return epilogue;
}

void write_row_sums(const Product& problem, Context& context) {
  if (!problem.row_sums.is_present()) return;
  constexpr int64_t kRows = 64;
  const Sizes sizes = sizes_of(problem);
  const auto sum_rows_of_level = KP_AT_CPU_LEVEL(context.info->cpu.isa, sum_rows);
  const int64_t pieces = divide_up(sizes.m, kRows);
  for_tasks(context, workers_for({1, sizes.m, 8, sizes.k, 1}, context), sizes.batch * pieces, nullptr, 0, nullptr,
            [&](int64_t task, char*) {
              const int64_t batch = task / pieces, row = task % pieces * kRows, rows = std::min(kRows, sizes.m - row);
              float sums[kRows];
              sum_rows_of_level({operand_of(problem.a, batch), row, rows, sizes.k, sums});
              for (int64_t i = 0; i < rows; ++i) {
                store_element(problem.row_sums.data, problem.row_sums.dtype, batch * sizes.m + row + i, sums[i]);
              }
            });
}

void run_packed(const Product& problem, const ProductKernels& kernels, Context& context) {
  write_row_sums(problem, context);
  if (problem.output.element_count() == 0) return;
  PackedProduct(problem, kernels, context).run();
}

}  // namespace kernel_pytorch::matmul
