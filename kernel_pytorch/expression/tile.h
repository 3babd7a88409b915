// Programs on tiles of scores, for CPU kernels: rows are queries, columns are keys. A plan sorts the nodes into four
// stages, by what they vary with: once per tile (head alone), once per block of keys, once per row, and per element.
// The first and third are scalars; the other two run node after node over a block of columns that stays in the L1
// cache, in loops that the compiler makes vectors of. Integers have 32 bits there where their range (range.h) allows:
// half the work. expression/tile_isa.cpp is compiled once per CPU level.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/expression/expression.h"
#include "kernel_pytorch/expression/gradient.h"

namespace kernel_pytorch::expression {

inline constexpr int kTileBlock = 128;  // columns at a time

// Where a value lies. Values of the tile and row stages are scalars at `place`; where a block needs them they are also
// spread over the register `wide`. The others are registers. There is a file of registers for each type, and one for
// integers of 32 bits.
struct Slot {
  int16_t place = -1;
  int16_t wide = -1;
};

struct Instruction {
  Op op = Op::kConstant;
  Type type = Type::kFloat;      // of the value
  Type operands = Type::kFloat;  // of what it is computed from
  int8_t capture = 0;
  int8_t source_count = 0;
  bool is_scalar = false;
  bool is_narrow = false;      // its integers, value and operands, have 32 bits; of a load the value
  uint8_t scalar_sources = 0;  // of a load: bit i is set where index i is a scalar
  uint8_t narrow_sources = 0;  // of a load: bit i is set where index i has 32 bits
  Slot target;
  std::array<Slot, kMaxRank> sources{};
  Constant constant = {};
};

class KP_EXPORT TilePlan {
 public:
  // `captured` are checked here; they and their memory must outlive the plan.
  TilePlan(const Program& program, std::span<const TensorView> captured, std::string_view op);

  // Memory for one thread, aligned to 64 bytes.
  template <class Real>
  size_t workspace_bytes() const;

  struct Result {
    Type type;
    Slot slot;
    bool is_scalar;
  };
  enum Stage : uint8_t { kTile, kKey, kRow, kElement };
  std::span<const Instruction> stage(Stage stage) const { return stages_[stage]; }
  std::span<const Result> results() const { return results_; }
  std::span<const TensorView> captured() const { return captured_; }
  int score_register() const { return score_register_; }  // -1: the score is not read
  int scalar_count() const { return scalar_count_; }
  int register_count(Type type) const { return register_counts_[static_cast<int>(type)]; }
  int narrow_register_count() const { return register_counts_[kNarrowFile]; }

 private:
  friend class Planner;
  std::vector<TensorView> captured_;
  std::vector<Instruction> stages_[4];
  std::vector<Result> results_;
  int score_register_ = -1;
  int scalar_count_ = 0;
  static constexpr int kNarrowFile = 3;  // the first three are those of the types
  int register_counts_[4] = {0, 0, 0, 0};
};

struct Tile {
  int64_t batch = 0, head = 0;
  int64_t first_query = 0, first_key = 0;
  int64_t rows = 0, columns = 0;
};

// A matrix with rows `stride` elements apart: Real, int64_t or bool, as the result that it takes.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
};

// The gradient of one captured tensor, contiguous. `is_shared`: other threads add to it at the same time.
template <class Real>
struct CaptureGradient {
  Real* data = nullptr;  // null: not wanted
  bool is_shared = false;
};

template <class Real>
struct TileKernels {
  // Writes every result of the plan; one may lie where the scores do.
  void (*evaluate)(const TilePlan& plan, const Tile& tile, const Real* scores, int64_t score_stride,
                   std::span<const Rows> results, void* workspace);
  // The plan is of a Gradient's program: multiplies `grad` by d result / d score in place, and adds grad times the
  // other derivatives to the gradients of the captured tensors.
  void (*backward)(const TilePlan& plan, std::span<const LoadGradient> loads, const Tile& tile, const Real* scores,
                   int64_t score_stride, Real* grad, int64_t grad_stride,
                   std::span<const CaptureGradient<Real>> gradients, void* workspace);
};

namespace isa_v2 {
extern const TileKernels<float> kTileKernels;
extern const TileKernels<double> kTileKernelsDouble;
}  // namespace isa_v2
namespace isa_v3 {
extern const TileKernels<float> kTileKernels;
extern const TileKernels<double> kTileKernelsDouble;
}  // namespace isa_v3
namespace isa_v4 {
extern const TileKernels<float> kTileKernels;
extern const TileKernels<double> kTileKernelsDouble;
}  // namespace isa_v4
namespace isa_neon {
extern const TileKernels<float> kTileKernels;
extern const TileKernels<double> kTileKernelsDouble;
}  // namespace isa_neon
namespace isa_sve256 {
extern const TileKernels<float> kTileKernels;
extern const TileKernels<double> kTileKernelsDouble;
}  // namespace isa_sve256

}  // namespace kernel_pytorch::expression
