// The host side of products whose rows are read as they lie. A task packs a group of columns into its own memory, small
// enough for the second cache, and takes many rows through it: packing is then a fiftieth of the products, and no task
// waits for another. Where there are so many workers that rows must be cut short, all columns are packed first.
#include <algorithm>

#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/matmul/cpu/plan.h"

namespace kernel_pytorch::matmul {
namespace {

constexpr int64_t kChunkRows = 1024;        // of A, which concurrent tasks read from the last-level cache
constexpr int64_t kLeastRows = 96;          // of a chunk that is cut for the sake of more tasks
constexpr int64_t kOwnRows = 320;           // fewer do not pay for columns of their own
constexpr int64_t kGroupColumns = 256;      // long enough runs of the output
constexpr int64_t kTaskFlops = 1 << 22;     // what is worth another thread
constexpr int64_t kLeastCache = 512 << 10;  // of an unknown machine

int64_t divide_up(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}

// Bytes of L2 for columns. The rest is for rows in flight, sums and the output.
int64_t column_bytes(const DeviceInfo& device) {
  return std::max(device.cpu.l2_bytes, kLeastCache) / 2;
}

struct RowsPlan {
  Sizes sizes;
  const ProductKernels& kernels;
  int64_t workers = 1, group = 1, groups = 1;  // panels of a group
  int64_t chunk = 0, chunks = 1;               // rows of a chunk
  bool shares_columns = false;

  RowsPlan(const Product& problem, const ProductKernels& table, const Context& context)
      : sizes(sizes_of(problem)), kernels(table) {
    const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
    const double flops = 2.0 * static_cast<double>(sizes.batch * sizes.m) * static_cast<double>(sizes.n) *
                         static_cast<double>(std::max<int64_t>(sizes.k, 1));
    workers = std::clamp<int64_t>(static_cast<int64_t>(flops / kTaskFlops), 1, threads);
    const int64_t panels = divide_up(sizes.n, table.panel_columns), wanted = workers == 1 ? 1 : 3 * workers;
    const int64_t fitting = column_bytes(*context.info) / std::max<int64_t>(panel_bytes(), 1);
    group = std::clamp<int64_t>(std::min(fitting, kGroupColumns / table.panel_columns), 1, panels);
    chunks = divide_up(sizes.m, kChunkRows);
    const auto tasks = [&] { return sizes.batch * chunks * divide_up(panels, group); };
    while (tasks() < wanted && group > 1) --group;
    while (tasks() < wanted && sizes.m > 2 * chunks * kLeastRows) ++chunks;
    groups = divide_up(panels, group);
    chunk = divide_up(divide_up(sizes.m, chunks), table.tile_rows) * table.tile_rows;
    chunks = divide_up(sizes.m, chunk);
    shares_columns = chunks > 1 && chunk < kOwnRows;
  }
  int64_t panel_bytes() const { return sizes.k * kernels.panel_columns * kernels.element_bytes; }
};

class RowsProduct {
 public:
  RowsProduct(const Product& problem, Context& context)
      : problem_(problem),
        context_(context),
        plan_(problem, KP_AT_CPU_LEVEL(context.info->cpu.isa, kProductKernels), context),
        multiply_(KP_AT_CPU_LEVEL(context.info->cpu.isa, multiply_rows)) {}

  void run() {
    const int64_t padded_bytes = plan_.kernels.tile_rows * plan_.sizes.k * 4, panel_bytes = plan_.panel_bytes();
    const int64_t own_bytes = (plan_.shares_columns ? 0 : plan_.group * panel_bytes) + padded_bytes + 64;
    const int64_t stride = divide_up(own_bytes, 4096) * 4096 + 64;
    char* own = allocate(plan_.workers * stride);
    char* shared = nullptr;
    if (plan_.shares_columns) {
      shared = allocate(plan_.sizes.batch * plan_.groups * plan_.group * panel_bytes);
      for_tasks(plan_.sizes.batch * plan_.groups, [&](int64_t task, int64_t) {
        pack(task / plan_.groups, task % plan_.groups, shared + task * plan_.group * panel_bytes);
      });
    }
    // Concurrent tasks read the same rows.
    for_tasks(plan_.sizes.batch * plan_.chunks * plan_.groups, [&](int64_t task, int64_t worker) {
      const int64_t group = task % plan_.groups, chunk = task / plan_.groups % plan_.chunks;
      const int64_t batch = task / plan_.groups / plan_.chunks;
      char* padded = own + worker * stride;
      char* panels = padded + divide_up(padded_bytes, 64) * 64;
      if (shared != nullptr) {
        panels = shared + (batch * plan_.groups + group) * plan_.group * panel_bytes;
      } else {
        pack(batch, group, panels);
      }
      multiply(batch, chunk, group, panels, padded);
    });
  }

 private:
  char* allocate(int64_t bytes) { return static_cast<char*>(context_.scratch->allocate(static_cast<size_t>(bytes))); }

  template <class Body>
  void for_tasks(int64_t tasks, const Body& body) {
    TaskQueue queue(tasks);
    parallel_for(context_.threads, std::min(plan_.workers, tasks), [&](int64_t worker) {
      for (int64_t task; (task = queue.take()) >= 0;) body(task, worker);
    });
  }

  int64_t first_column(int64_t group) const { return group * plan_.group * plan_.kernels.panel_columns; }
  int64_t columns_of(int64_t group) const {
    return std::min(plan_.sizes.n - first_column(group), plan_.group * plan_.kernels.panel_columns);
  }

  void pack(int64_t batch, int64_t group, char* to) const {
    plan_.kernels.pack_b({.from = operand_of(problem_.b, batch),
                          .first = first_column(group),
                          .count = columns_of(group),
                          .steps = plan_.sizes.k,
                          .to = to,
                          .tile_bytes = plan_.panel_bytes()});
  }

  void multiply(int64_t batch, int64_t chunk, int64_t group, const char* panels, char* padded) const {
    const int64_t row = chunk * plan_.chunk;
    const Operand a = operand_of(problem_.a, batch);
    Epilogue epilogue = epilogue_of(problem_, batch, row, first_column(group));
    epilogue.streams = false;  // its lines are in the caches by then
    multiply_({.a = static_cast<const float*>(a.data) + row * a.row_stride,
               .row_stride = a.row_stride,
               .panels = reinterpret_cast<const float*>(panels),
               .rows = std::min(plan_.chunk, plan_.sizes.m - row),
               .columns = columns_of(group),
               .steps = plan_.sizes.k,
               .padded = reinterpret_cast<float*>(padded),
               .epilogue = epilogue});
  }

  const Product& problem_;
  Context& context_;
  const RowsPlan plan_;
  void (*const multiply_)(const RowsTask&);
};

}  // namespace

const char* why_not_rows(const Product& problem, const DeviceInfo& device) {
  if (problem.a.dtype != DType::kFloat32) return "reads fp32 rows as they lie; narrow ones are widened by packing";
  if (problem.precision != Precision::kFull) return "multiplies fp32 exactly; another precision was asked for";
  if (!is_row_major(problem.a)) return "a's columns are not neighbours in memory";
  const int64_t panel = problem.a.sizes[2] * KP_AT_CPU_LEVEL(device.cpu.isa, kProductKernels).panel_columns * 4;
  if (panel > column_bytes(device)) return "k is so long that columns of b do not fit half of the second cache";
  return nullptr;
}

void run_rows(const Product& problem, Context& context) {
  write_row_sums(problem, context);
  if (problem.output.element_count() == 0) return;
  RowsProduct(problem, context).run();
}

}  // namespace kernel_pytorch::matmul
