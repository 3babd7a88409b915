// What the host side of the CPU kernels and the code built per instruction level share: plain values, no functions.
//
// A product is cut into tiles of A (a few rows, all of k) and panels of B (some columns, all of k), both packed so that
// a tile's product with a panel reads memory in order. Sums are fp32 tiles in a scratch buffer that the epilogue reads
// while they are in the first cache.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/ops/engines/pointwise/kind_cuda.h"
#include "kernel_pytorch/ops/matmul/form_cuda.h"
#include "kernel_pytorch/ops/support/cpu_levels.h"

namespace kernel_pytorch::matmul {

// One of the two strides, in elements, is 1.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0, column_stride = 0;
};

// Rows [first, first + count) of A for the steps [step, step + steps) of k, or those columns of B. What lies behind the
// last row, column or step of a whole tile is zeros.
struct PackTask {
  Operand from{};
  int64_t first = 0, count = 0;
  int64_t step = 0, steps = 0;
  char* to = nullptr;      // of the first tile's first step
  int64_t tile_bytes = 0;  // from a tile (or panel) to the next
  Precision precision = Precision::kFull;
};

struct Rows {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
};

// What follows the sums, all of it seen from the first row and column of a task.
struct Epilogue {
  float alpha = 1, beta = 1;
  bool streams = false;  // whole lines of the output go past the caches
  Form form = Form::kPlain;
  pointwise::Kind activation = pointwise::Kind::kIdentity;
  const void* bias = nullptr;
  DType bias_dtype = DType::kFloat32;
  Rows saved{}, residual{}, preactivation{}, output{};
};

// Tiles of A times panels of B for one block of k.
struct BlockTask {
  const char* a = nullptr;
  int64_t a_tile_bytes = 0;
  const char* b = nullptr;
  int64_t b_panel_bytes = 0;
  int64_t steps = 0;             // of k, a multiple of the table's depth
  int64_t rows = 0;              // of all tiles
  int64_t columns = 0;           // of all panels
  float* sums = nullptr;         // whole tiles; those of one tile of A are adjacent
  int64_t sums_tile_floats = 0;  // 0: one tile's memory serves all, as this is the only block of k
  bool add = false;              // to what the sums hold
  bool is_last = false;          // the epilogue follows
  Epilogue epilogue{};
};

// Rows of fp32 as they lie times packed columns, all of k.
struct RowsTask {
  const float* a = nullptr;
  int64_t row_stride = 0;
  const float* panels = nullptr;  // as pack_b leaves them, steps * panel_columns floats each
  int64_t rows = 0, columns = 0, steps = 0;
  float* padded = nullptr;  // memory for the rows of a tile
  Epilogue epilogue{};
};

// Few rows of A, unpacked, times columns of B, unpacked: sums [count, columns] of fp32.
struct ThinTask {
  const float* few = nullptr;  // [count, steps], dense
  int64_t count = 0;           // at most kThinRows
  Operand many{};              // [steps, columns]
  int64_t steps = 0, columns = 0;
  float* sums = nullptr;  // rows `sums_stride` apart
  int64_t sums_stride = 0;
  bool rounds = false;  // the columns to bf16
};
inline constexpr int64_t kThinRows = 16;

// Sums of rows as the epilogue takes them.
struct FinishTask {
  const float* sums = nullptr;
  int64_t sums_stride = 0;
  int64_t rows = 0, columns = 0;
  Epilogue epilogue{};
};

// sums[i] = the sum over all steps of row first + i of A, unrounded.
struct RowSumTask {
  Operand from{};
  int64_t first = 0, count = 0, steps = 0;
  float* sums = nullptr;
};

struct PairTask {
  pointwise::Kind activation = pointwise::Kind::kSilu;
  int64_t rows = 0, columns = 0;  // of grad_output
  Rows grad_output{}, saved{}, grad_input{};
};

struct ProductKernels {
  int64_t tile_rows = 0, panel_columns = 0;
  int64_t depth = 1;          // k is padded to a multiple
  int64_t element_bytes = 4;  // of packed operands
  int64_t block_steps = 384;  // of k at a time
  int64_t chunk_rows = 192;   // of A at a time
  int64_t group_panels = 2;   // of B at a time
  int64_t solo_rows = 768;    // so few that they are one chunk, and no other shares the columns
  // Bytes of packed rows and columns at a time. Together they stay below the 32 MB up to which malloc keeps freed
  // memory: beyond, every call would start with page faults, a twentieth of its time.
  int64_t row_slab_bytes = int64_t{18} << 20;
  int64_t column_slab_bytes = int64_t{12} << 20;
  bool splits_bfloat16 = false;  // whether kBf16x3 takes three packed steps for one
  void (*pack_a)(const PackTask&) = nullptr;
  void (*pack_b)(const PackTask&) = nullptr;
  void (*multiply)(const BlockTask&) = nullptr;
  void (*begin)() = nullptr;  // in each thread, around its tasks; null: nothing
  void (*end)() = nullptr;
};

KP_EACH_CPU_LEVEL(extern const ProductKernels kProductKernels;)
KP_EACH_CPU_LEVEL(void multiply_rows(const RowsTask& task);)
KP_EACH_CPU_LEVEL(void multiply_thin(const ThinTask& task);)
KP_EACH_CPU_LEVEL(void finish_rows(const FinishTask& task);)
KP_EACH_CPU_LEVEL(void sum_rows(const RowSumTask& task);)
KP_EACH_CPU_LEVEL(void write_pair_gradient(const PairTask& task);)
#if defined(__x86_64__)
namespace isa_v4amx {
extern const ProductKernels kAmxProductKernels;
}
namespace isa_v4bf16 {
extern const ProductKernels kDotProductKernels;
}
#elif defined(__aarch64__)
namespace isa_neonbf16 {
extern const ProductKernels kDotProductKernels;
}
#endif

}  // namespace kernel_pytorch::matmul
