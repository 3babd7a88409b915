// What crosses from the host side of the CPU kernels to the code built per instruction level: plain pointers, strides
// in elements and sizes, no class with functions (cpu/isa.h says why).
//
// A task is one block of queries of one head of one sequence. Keys and values are packed once for all tasks of their
// head, as fp32 whatever their type: keys transposed in panels of tile_columns keys [panel][size][tile_columns], rows
// in panels of tile_columns columns [panel][keys][tile_columns]. Key tiles begin at multiples of kKeyTile, so that what
// a row adds up, and in which order, depends on nothing but the row.
#pragma once

#include <cstdint>

#include "kernel_pytorch/base/dtype.h"

namespace kernel_pytorch::attention {

inline constexpr int64_t kQueryTile = 96;         // of a tile of scores: a multiple of the rows of a register tile
inline constexpr int64_t kKeyTile = 384;          // a multiple of the rows and of the columns of a register tile
inline constexpr int64_t kBackwardKeyTile = 192;  // likewise: two tiles of scores and five of rows share a cache
inline constexpr int64_t kPackRows = 768;         // of a task that packs keys, or writes their gradients
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;
inline constexpr int64_t kUnbounded = int64_t{1} << 40;

// Rows of one head of one sequence.
struct HeadRows {
  const void* data = nullptr;
  int64_t row_stride = 0;
};

struct ScoreRules;
struct Tile;

// Score and mask programs, as the code per instruction level sees them: attention/cpu/programs.h.
struct TilePrograms {
  bool changes_scores = false;
  // Scores [begin, end) of every row, in natural units, to what the programs make of them.
  void (*apply)(const TilePrograms&, const ScoreRules&, const Tile&, int64_t begin, int64_t end, float* scores);
  // Turns the gradient of the changed scores of some rows into that of the scores `before`, and adds to the gradients
  // of captured tensors.
  void (*unwind)(const TilePrograms&, const ScoreRules&, const Tile& rows, int64_t begin, int64_t end,
                 const float* before, float* gradients);
};

// What happens to the scores of one head of one sequence between the products.
struct ScoreRules {
  DType dtype = DType::kFloat32;  // of query, key, value, output
  int64_t queries = 0, keys = 0;  // keys: at most the key length
  int64_t size = 0, value_size = 0;
  float scale = 1;
  // Query q sees keys q + offset - left up to q + offset + right: causal and window.
  int64_t offset = 0, left = kUnbounded, right = kUnbounded;
  float softcap = 0;
  bool softcap_after_bias = false;
  bool adjusts = false;        // anything of softcap, bias, slope, mask, segments, programs
  float slope = 0;             // of ALiBi
  const void* bias = nullptr;  // of this head: [queries, keys], keys dense
  DType bias_dtype = DType::kFloat32;
  int64_t bias_row_stride = 0;
  const uint8_t* mask = nullptr;
  int64_t mask_row_stride = 0, mask_key_stride = 0;
  const int32_t* query_segments = nullptr;
  const int32_t* key_segments = nullptr;
  bool has_sink = false;
  float sink = 0;
  uint32_t dropout_threshold = 0;  // 0: none
  float dropout_scale = 1;
  uint64_t seed = 0, seed_offset = 0;    // the second with the head counted in
  int64_t part_query = 0, part_key = 0;  // of the whole: what dropout and programs add to a query and a key
  int64_t sequence = 0, head = 0;
  const TilePrograms* programs = nullptr;
  void* program_workspace = nullptr;    // of the thread
  float* captured_gradients = nullptr;  // of the task; null: none
};

// Keys that a block of queries may see. Full: the block list says that mask_mod holds.
struct KeySpan {
  int64_t begin = 0, end = 0;
  bool is_full = false;
};

// Where a tile of scores [rows][stride] lies. first_key is a multiple of `columns`.
struct Tile {
  const KeySpan* span = nullptr;
  int64_t first_query = 0, rows = 0;
  int64_t first_key = 0, columns = 0;
  int64_t stride = 0;
};

// Panels of a head, from key 0 on: forward has keys transposed and values as rows, backward both transposed and keys
// also as rows.
struct PackedKeys {
  const float* transposed_keys = nullptr;
  const float* transposed_values = nullptr;
  const float* rows = nullptr;
  int64_t padded_keys = 0;
};

struct ForwardTask {
  const ScoreRules* rules = nullptr;
  int64_t first_query = 0, rows = 0;  // rows <= the block's
  HeadRows query{}, key{}, value{};   // of the sequence; key and value are read where `packed` is null
  const PackedKeys* packed = nullptr;
  const KeySpan* spans = nullptr;
  int64_t span_count = 0;
  void* output = nullptr;  // of the sequence
  DType output_dtype = DType::kFloat32;
  int64_t output_row_stride = 0;
  float* lse = nullptr;     // of the sequence; null: not wanted
  bool accumulate = false;  // output is fp32; it and lse are added to
  float* buffer = nullptr;  // forward_buffer_floats()
};

// Adds to the gradients of keys and values, panels of rows as packed ones, and writes those of its queries.
struct BackwardTask {
  const ScoreRules* rules = nullptr;
  int64_t first_query = 0, rows = 0;
  HeadRows query{}, key{}, value{};  // of the sequence; key and value are read where `packed` is null
  HeadRows output{}, grad_output{};
  const float* lse = nullptr;       // of the sequence; likewise below
  const float* grad_lse = nullptr;  // null: none
  const PackedKeys* packed = nullptr;
  const KeySpan* spans = nullptr;
  int64_t span_count = 0;
  void* grad_query = nullptr;  // null: only the gradient of the bias is wanted
  DType grad_dtype = DType::kFloat32;
  int64_t grad_query_row_stride = 0;
  bool accumulate = false;  // grad_query is fp32 and added to
  float* grad_keys = nullptr;
  float* grad_values = nullptr;
  int64_t grad_rows = 0;       // of the panels
  float* grad_bias = nullptr;  // of this head, added to; null: none
  int64_t grad_bias_row_stride = 0;
  float* sink_sum = nullptr;  // receives the sum of e^(sink - lse) * delta; null: not wanted
  float* buffer = nullptr;    // backward_buffer_floats()
};

// The sum of several panels of gradients, times a factor, as rows of the result.
struct GradientTask {
  DType dtype = DType::kFloat32;
  const float* parts = nullptr;
  int64_t part_count = 0, part_stride = 0, part_rows = 0;
  int64_t begin = 0, end = 0, size = 0;  // rows; begin is a multiple of kPackRows
  int64_t rows_that_count = 0;           // zeros from here on
  float factor = 1;
  void* to = nullptr;
  int64_t row_stride = 0;
  bool accumulate = false;  // `to` is fp32 and added to
};

struct PackTask {
  DType dtype = DType::kFloat32;
  HeadRows rows{};
  int64_t begin = 0, end = 0;  // rows to pack; begin is a multiple of key_alignment
  int64_t size = 0;
  float* to = nullptr;      // where row 0 goes
  int64_t padded_rows = 0;  // of the whole
};

struct TileKernels {
  int64_t query_tile, backward_query_tile;  // rows of a task
  int64_t key_alignment;                    // packed keys are padded to a multiple of it
  // Floats that a key takes: packed in both ways, and of its gradient.
  int64_t (*transposed_floats)(int64_t size);
  int64_t (*row_floats)(int64_t size);
  int64_t (*gradient_floats)(int64_t size);
  void (*pack_transposed)(const PackTask&);
  void (*pack_rows)(const PackTask&);
  int64_t (*forward_buffer_floats)(int64_t size, int64_t value_size);
  void (*forward)(const ForwardTask&);
  int64_t (*backward_buffer_floats)(int64_t size, int64_t value_size);
  void (*backward)(const BackwardTask&);
  void (*write_gradient)(const GradientTask&);
};

// What rules do to a tile, for kernels of other levels too.
struct TileRules {
  // Scores in units of log 2 and -inf where a rule drops one; only columns that a row sees are touched. What backward
  // needs goes to `slopes` (softcap's derivative) and `before` (scores that a program changed), null in forward.
  void (*adjust)(const ScoreRules&, const Tile&, float* scores, float* slopes, float* before);
  // Dropout of probabilities, or of their gradients.
  void (*drop)(const ScoreRules&, const Tile&, float* values);
  // From the gradient of adjusted scores to that of the scores; the gradient of the bias on the way.
  void (*unwind)(const BackwardTask&, const Tile&, float* gradients, const float* slopes, const float* before);
};

// One table per instruction level, defined by attention/cpu/pack_isa.cpp, and of bf16 with AMX.
namespace isa_v2 {
extern const TileKernels kTileKernels;
}
namespace isa_v3 {
extern const TileKernels kTileKernels;
}
namespace isa_v4 {
extern const TileKernels kTileKernels;
extern const TileRules kTileRules;
}  // namespace isa_v4
namespace isa_v4amx {
extern const TileKernels kAmxKernels;
}
namespace isa_neon {
extern const TileKernels kTileKernels;
}
namespace isa_sve256 {
extern const TileKernels kTileKernels;
}

}  // namespace kernel_pytorch::attention
