#include "kernel_pytorch/ops/attention/cpu/programs.h"

#include <algorithm>
#include <array>

#include "kernel_pytorch/ops/attention/programs.h"
#include "kernel_pytorch/ops/engines/expression/tiles.h"

namespace kernel_pytorch::attention {
namespace {

expression::Tile place_of_tile(const ScoreRules& rules, const Tile& tile, int64_t begin, int64_t end) {
  return {.batch = rules.sequence,
          .head = rules.head,
          .first_query = rules.part_query + tile.first_query,
          .first_key = rules.part_key + tile.first_key + begin,
          .rows = tile.rows,
          .columns = end - begin};
}

}  // namespace

std::unique_ptr<CpuPrograms> CpuPrograms::make(const Scoring& scoring, std::span<const TensorView> gradients,
                                               const DeviceInfo& device) {
  if (!has_programs(scoring)) return nullptr;
  return std::unique_ptr<CpuPrograms>(new CpuPrograms(scoring, gradients, device));
}

CpuPrograms::CpuPrograms(const Scoring& scoring, std::span<const TensorView> gradients, const DeviceInfo& device)
    : kernels_(expression::tile_kernels<float>(device.cpu.isa)),
      mods_(expression::mods_of(scoring.score_mod, scoring.mask_mod, "attention")),
      gradients_(gradients.begin(), gradients.end()) {
  const auto plan = [&](std::optional<expression::TilePlan>& planned, const expression::Program& program) {
    planned.emplace(program, scoring.captured, "attention");
    workspace_bytes_ = std::max(workspace_bytes_, planned->workspace_bytes<float>());
  };
  changes_scores = mods_.score_mod.has_value();
  if (changes_scores) {
    plan(score_, *mods_.score_mod);
    plan(derivative_, mods_.score_mod_gradient->program);
  }
  if (mods_.mask_mod.has_value()) plan(masked_, *mods_.masked_score);
  for (const TensorView& gradient : gradients_) gradient_floats_ += gradient.element_count();
  apply = [](const TilePrograms& programs, const ScoreRules& rules, const attention::Tile& tile, int64_t begin,
             int64_t end,
             float* scores) { static_cast<const CpuPrograms&>(programs).apply_tile(rules, tile, begin, end, scores); };
  unwind = [](const TilePrograms& programs, const ScoreRules& rules, const attention::Tile& rows, int64_t begin,
              int64_t end, const float* before, float* gradients) {
    static_cast<const CpuPrograms&>(programs).unwind_rows(rules, rows, begin, end, before, gradients);
  };
}

void CpuPrograms::apply_tile(const ScoreRules& rules, const attention::Tile& tile, int64_t begin, int64_t end,
                             float* scores) const {
  const bool asks_mask = masked_.has_value() && !tile.span->is_full;
  if (!asks_mask && !score_.has_value()) return;
  const expression::Rows result{scores + begin, tile.stride};
  kernels_.evaluate(asks_mask ? *masked_ : *score_, place_of_tile(rules, tile, begin, end), scores + begin, tile.stride,
                    std::span(&result, 1), rules.program_workspace);
}

void CpuPrograms::unwind_rows(const ScoreRules& rules, const attention::Tile& rows, int64_t begin, int64_t end,
                              const float* before, float* gradients) const {
  std::array<expression::CaptureGradient<float>, expression::kMaxCaptures> captured{};
  float* next = rules.captured_gradients;
  for (size_t i = 0; next != nullptr && i < gradients_.size(); ++i) {
    if (!gradients_[i].is_present()) continue;
    captured[i].data = next;
    next += gradients_[i].element_count();
  }
  const size_t captures = mods_.score_mod->captures.size();
  kernels_.backward(*derivative_, mods_.score_mod_gradient->loads, place_of_tile(rules, rows, begin, end),
                    before + begin, rows.stride, gradients + begin, rows.stride, std::span(captured).first(captures),
                    rules.program_workspace);
}

void CpuPrograms::write_gradients(const float* parts, int64_t count) const {
  int64_t first = 0;
  for (const TensorView& gradient : gradients_) {
    const int64_t elements = gradient.element_count();
    for (int64_t i = 0; gradient.is_present() && i < elements; ++i) {
      double sum = 0;
      for (int64_t part = 0; part < count; ++part) sum += parts[part * gradient_floats_ + first + i];
      gradient.as<float>()[i] = static_cast<float>(sum);
    }
    first += elements;
  }
}

}  // namespace kernel_pytorch::attention
