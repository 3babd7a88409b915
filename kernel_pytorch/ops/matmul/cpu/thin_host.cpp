// The host side of products with few rows or few columns: the few are widened once (bf16 that lanes multiply in pairs
// is read as it lies), tasks take some of the many. Where the columns are the few, the product is taken transposed and
// its sums are turned before the epilogue. 17 to 64 rows or columns of bf16 are packed, and the many read as they lie.
#include <algorithm>

#include "kernel_pytorch/base/element.h"
#include "kernel_pytorch/device/parallel.h"
#include "kernel_pytorch/ops/matmul/cpu/plan.h"
#include "kernel_pytorch/ops/matmul/cpu/thin_dots.h"

namespace kernel_pytorch::matmul {
namespace {

struct ThinPlan {
  bool few_are_rows;
  int64_t few, many, k;
  int64_t chunk;  // of the many, a task
};

ThinPlan plan_of(const Product& problem, const Context& context) {
  const Sizes sizes = sizes_of(problem);
  const bool rows = sizes.m <= kThinRows;
  const int64_t few = rows ? sizes.m : sizes.n, many = rows ? sizes.n : sizes.m;
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  const int64_t wanted = std::max<int64_t>(many * sizes.batch / (threads * 4), 1);
  const int64_t most = std::clamp<int64_t>(8192 / std::max<int64_t>(few, 1), 128, 1024);
  return {rows, few, many, sizes.k, (std::clamp<int64_t>(wanted, 32, most) + 15) / 16 * 16};
}

// Rows (or columns) of the few as [few, k] of fp32.
void widen_few(const TensorView& view, int64_t batch, bool are_rows, const ThinPlan& plan, bool rounds, float* to) {
  const Operand from = operand_of(view, batch);
  const int64_t few_stride = are_rows ? from.row_stride : from.column_stride;
  const int64_t step_stride = are_rows ? from.column_stride : from.row_stride;
  for (int64_t i = 0; i < plan.few; ++i) {
    for (int64_t k = 0; k < plan.k; ++k) {
      const auto value = static_cast<float>(load_element(from.data, from.dtype, i * few_stride + k * step_stride));
      to[i * plan.k + k] = rounds ? to_float(from_float<BFloat16>(value)) : value;
    }
  }
}

// [few, k] and [k, many], one matrix of a batch.
Operand few_of(const Product& problem, const ThinPlan& plan, int64_t batch) {
  Operand few = operand_of(plan.few_are_rows ? problem.a : problem.b, batch);
  if (!plan.few_are_rows) std::swap(few.row_stride, few.column_stride);
  return few;
}
Operand many_of(const Product& problem, const ThinPlan& plan, int64_t batch) {
  Operand many = operand_of(plan.few_are_rows ? problem.b : problem.a, batch);
  if (!plan.few_are_rows) std::swap(many.row_stride, many.column_stride);
  return many;
}

// bf16 that lanes multiply as it lies: neighbours along k on both sides.
bool takes_dots([[maybe_unused]] const Product& problem, [[maybe_unused]] const ThinPlan& plan,
                [[maybe_unused]] CpuIsa isa) {
#if defined(__x86_64__)
  return isa >= CpuIsa::kX86V4Bf16 && problem.a.dtype == DType::kBFloat16 &&
         few_of(problem, plan, 0).column_stride == 1 && many_of(problem, plan, 0).row_stride == 1;
#else
  return false;
#endif
}
void multiply_dots([[maybe_unused]] const ThinDotsTask& task) {
#if defined(__x86_64__)
  isa_v4bf16::multiply_thin_dots(task);
#endif
}

#if defined(__x86_64__)
int64_t padded_rows(int64_t count) {
  return (count + 15) / 16 * 16;
}

// Where `few` rows are packed and the many are not. Columns of a task; what would be less than a tile joins the last.
struct PanelPlan {
  ThinPlan of;
  int64_t padded, chunks;
};
PanelPlan panel_plan_of(const Product& problem, const Context& context) {
  const Sizes sizes = sizes_of(problem);
  const bool rows = sizes.m <= kPanelRows;
  const int64_t few = rows ? sizes.m : sizes.n, many = rows ? sizes.n : sizes.m;
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  const int64_t chunk = many * sizes.batch >= threads * 4 * 96 ? 96 : 48;
  return {{rows, few, many, sizes.k, chunk},
          padded_rows(few),
          std::max<int64_t>(many / chunk + (many % chunk >= 6 ? 1 : 0), 1)};
}
#endif

void run_panel([[maybe_unused]] const Product& problem, [[maybe_unused]] Context& context) {
#if defined(__x86_64__)
  const Sizes sizes = sizes_of(problem);
  const PanelPlan panel = panel_plan_of(problem, context);
  const ThinPlan& plan = panel.of;
  const auto finish = KP_AT_CPU_LEVEL(context.info->cpu.isa, finish_rows);
  const int64_t panel_words = plan.k / 2 * panel.padded;
  auto* packed = static_cast<uint32_t*>(
      context.scratch->allocate(static_cast<size_t>(sizes.batch * panel_words) * sizeof(uint32_t)));
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    isa_v4bf16::pack_panel(
        {few_of(problem, plan, batch), plan.few, plan.k, panel.padded, packed + batch * panel_words});
  }
  const int64_t tasks = sizes.batch * panel.chunks, most = plan.chunk + 16;  // of which whole vectors are turned
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  const int64_t workers = std::min(threads, tasks), buffer_floats = 2 * most * panel.padded;
  auto* buffers =
      static_cast<float*>(context.scratch->allocate(static_cast<size_t>(workers * buffer_floats) * sizeof(float)));
  TaskQueue queue(tasks);
  parallel_for(context.threads, workers, [&](int64_t worker) {
    float *sums = buffers + worker * buffer_floats, *turned = sums + most * panel.padded;
    for (int64_t task; (task = queue.take()) >= 0;) {
      const int64_t batch = task / panel.chunks, chunk = task % panel.chunks, first = chunk * plan.chunk;
      const int64_t count = (chunk + 1 == panel.chunks ? plan.many : first + plan.chunk) - first;
      Operand many = many_of(problem, plan, batch);
      many.data = static_cast<const char*>(many.data) + first * many.column_stride * size_of(many.dtype);
      isa_v4bf16::multiply_panel({packed + batch * panel_words, panel.padded, many, plan.k, count, sums});
      if (!plan.few_are_rows) {
        finish({sums, panel.padded, count, plan.few, epilogue_of(problem, batch, first, 0)});
        continue;
      }
      isa_v4bf16::turn_panel(sums, panel.padded, count, turned, most);
      finish({turned, most, plan.few, count, epilogue_of(problem, batch, 0, first)});
    }
  });
#endif
}

}  // namespace

bool is_thin(const Product& problem) {
  const Sizes sizes = sizes_of(problem);
  return sizes.m <= kThinRows || sizes.n <= kThinRows;
}

// 17 to 64 rows of bf16 (or columns), and many with neighbours along k in whole words. AMX has tiles for these.
bool is_panel([[maybe_unused]] const Product& problem, [[maybe_unused]] CpuIsa isa) {
#if defined(__x86_64__)
  const Sizes sizes = sizes_of(problem);
  if (is_thin(problem) || isa != CpuIsa::kX86V4Bf16 || problem.a.dtype != DType::kBFloat16) return false;
  if (std::min(sizes.m, sizes.n) > kPanelRows || sizes.k == 0 || sizes.k % 2 != 0) return false;
  const ThinPlan plan{.few_are_rows = sizes.m <= kPanelRows, .few = 0, .many = 0, .k = sizes.k, .chunk = 0};
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const Operand many = many_of(problem, plan, batch);
    if (many.row_stride != 1 || many.column_stride % 2 != 0) return false;
    if (reinterpret_cast<uintptr_t>(many.data) % sizeof(uint32_t) != 0) return false;
  }
  return true;
#else
  return false;
#endif
}

void run_thin(const Product& problem, Context& context) {
  write_row_sums(problem, context);
  const Sizes sizes = sizes_of(problem);
  if (problem.output.element_count() == 0) return;
  if (is_panel(problem, context.info->cpu.isa)) return run_panel(problem, context);
  const ThinPlan plan = plan_of(problem, context);
  const bool rounds = problem.precision == Precision::kBf16;
  const auto multiply_few = KP_AT_CPU_LEVEL(context.info->cpu.isa, multiply_thin);
  const auto finish = KP_AT_CPU_LEVEL(context.info->cpu.isa, finish_rows);
  const auto floats = [&](int64_t count) {
    return static_cast<float*>(context.scratch->allocate(static_cast<size_t>(count + 16) * sizeof(float)));
  };
  const bool dots = takes_dots(problem, plan, context.info->cpu.isa);
  float* few = dots ? nullptr : floats(sizes.batch * plan.few * plan.k);
  for (int64_t batch = 0; batch < sizes.batch && !dots; ++batch) {
    widen_few(plan.few_are_rows ? problem.a : problem.b, batch, plan.few_are_rows, plan, rounds,
              few + batch * plan.few * plan.k);
  }
  const int64_t chunks = (plan.many + plan.chunk - 1) / plan.chunk, tasks = sizes.batch * chunks;
  const int64_t threads = context.threads == nullptr ? 1 : context.threads->count();
  const int64_t bytes = sizes.batch * plan.many * plan.k * size_of(problem.a.dtype);
  const int64_t workers = std::clamp<int64_t>(bytes >> 15, 1, threads);  // a thread for 32 KB
  const int64_t buffer_floats = 2 * plan.few * plan.chunk;
  float* buffers = floats(workers * buffer_floats);
  TaskQueue queue(tasks);
  parallel_for(context.threads, std::min(workers, tasks), [&](int64_t worker) {
    float* sums = buffers + worker * buffer_floats;
    for (int64_t task; (task = queue.take()) >= 0;) {
      const int64_t batch = task / chunks, first = task % chunks * plan.chunk;
      const int64_t count = std::min(plan.chunk, plan.many - first);
      Operand many = many_of(problem, plan, batch);
      many.data = static_cast<const char*>(many.data) + first * many.column_stride * size_of(many.dtype);
      if (dots) {
        multiply_dots({few_of(problem, plan, batch), plan.few, many, plan.k, count, sums, plan.chunk});
      } else {
        multiply_few({few + batch * plan.few * plan.k, plan.few, many, plan.k, count, sums, plan.chunk, rounds});
      }
      if (plan.few_are_rows) {
        finish({sums, plan.chunk, plan.few, count, epilogue_of(problem, batch, 0, first)});
        continue;
      }
      float* transposed = sums + plan.few * plan.chunk;
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < plan.few; ++j) transposed[i * plan.few + j] = sums[j * plan.chunk + i];
      }
      finish({transposed, plan.few, count, plan.few, epilogue_of(problem, batch, first, 0)});
    }
  });
}

}  // namespace kernel_pytorch::matmul
