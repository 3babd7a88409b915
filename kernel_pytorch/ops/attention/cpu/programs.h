// Score and mask programs on the tiles of the CPU kernels: planned once per call, run per tile by the code of
// kernel_pytorch/expression for this machine's level.
#pragma once

#include <memory>
#include <optional>

#include "kernel_pytorch/device/device_info.h"
#include "kernel_pytorch/expression/mods.h"
#include "kernel_pytorch/expression/tile.h"
#include "kernel_pytorch/ops/attention/cpu/kernels.h"
#include "kernel_pytorch/ops/attention/problem.h"

namespace kernel_pytorch::attention {

class CpuPrograms : public TilePrograms {
 public:
  // None for a call without programs. `gradients`: of the captured tensors, absent where none is wanted.
  static std::unique_ptr<CpuPrograms> make(const Scoring& scoring, std::span<const TensorView> gradients,
                                           const DeviceInfo& device);

  size_t workspace_bytes() const { return workspace_bytes_; }   // of a thread, aligned to 64 bytes
  int64_t gradient_floats() const { return gradient_floats_; }  // of all captured tensors that want one
  // Adds up the gradients of tasks, [count][gradient_floats()], in their order.
  void write_gradients(const float* parts, int64_t count) const;

 private:
  CpuPrograms(const Scoring& scoring, std::span<const TensorView> gradients, const DeviceInfo& device);

  void apply_tile(const ScoreRules& rules, const attention::Tile& tile, int64_t begin, int64_t end,
                  float* scores) const;
  void unwind_rows(const ScoreRules& rules, const attention::Tile& rows, int64_t begin, int64_t end,
                   const float* before, float* gradients) const;

  const expression::TileKernels<float>& kernels_;
  const expression::Mods& mods_;
  std::optional<expression::TilePlan> score_;   // where the mask program holds, or there is none
  std::optional<expression::TilePlan> masked_;  // with the mask program
  std::optional<expression::TilePlan> derivative_;
  std::vector<TensorView> gradients_;
  int64_t gradient_floats_ = 0;
  size_t workspace_bytes_ = 0;
};

}  // namespace kernel_pytorch::attention
