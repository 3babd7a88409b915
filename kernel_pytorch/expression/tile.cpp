// Plans: stages, then places. Registers of the element stage are used again once their last reader is through; an
// instruction never writes what it reads, so that its loop needs no look at overlaps.
#include "kernel_pytorch/expression/tile.h"

#include <algorithm>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/expression/range.h"
#include "kernel_pytorch/expression/scalar.h"

namespace kernel_pytorch::expression {

class Planner {
 public:
  Planner(const Program& program, TilePlan& plan)
      : program_(program),
        plan_(plan),
        variation_(variation_of(program)),
        slots_(program.nodes.size()),
        last_use_(program.nodes.size(), -1),
        is_spread_(program.nodes.size(), false),
        is_narrow_(program.nodes.size(), false) {}

  void run() {
    const auto count = static_cast<NodeId>(program_.nodes.size());
    find_narrow();
    for (NodeId id = 0; id < count; ++id) find_uses(id);
    for (NodeId result : program_.results) {
      last_use_[result] = count;
      is_spread_[result] = true;
    }
    for (NodeId id = 0; id < count; ++id) place(id);
    for (NodeId result : program_.results) {
      plan_.results_.push_back({program_.nodes[result].type, slots_[result], is_scalar(result)});
    }
  }

 private:
  TilePlan::Stage stage_of(NodeId id) const {
    const uint8_t flags = variation_[id];
    return flags == kVariesNot       ? TilePlan::kTile
           : flags == kVariesByQuery ? TilePlan::kRow
           : flags == kVariesByKey   ? TilePlan::kKey
                                     : TilePlan::kElement;
  }
  bool is_scalar(NodeId id) const { return stage_of(id) == TilePlan::kTile || stage_of(id) == TilePlan::kRow; }

  // An operation and its integer operands have one width, so that none has to be converted; loads take indices of any
  // width, and casts read any. Results have 64 bits.
  void find_narrow() {
    const std::vector<Range> ranges = ranges_of(program_);
    const auto count = static_cast<NodeId>(program_.nodes.size());
    for (NodeId id = 0; id < count; ++id) {
      is_narrow_[id] = program_.nodes[id].type == Type::kInt && ranges[id].fits_32_bits();
    }
    for (NodeId result : program_.results) is_narrow_[result] = false;
    for (bool has_changed = true; has_changed;) {
      has_changed = false;
      for (NodeId id = 0; id < count; ++id) has_changed |= widen_together(id);
    }
  }

  bool widen_together(NodeId id) {
    const Node& node = program_.nodes[id];
    if (node.op == Op::kLoad || (node.op >= Op::kToFloat && node.op <= Op::kToBool)) return false;
    bool has_narrow = false, has_wide = false;
    const auto look_at = [&](NodeId at) {
      if (program_.nodes[at].type == Type::kInt) (is_narrow_[at] ? has_narrow : has_wide) = true;
    };
    look_at(id);
    for (NodeId input : node.inputs()) look_at(input);
    if (!has_narrow || !has_wide) return false;
    is_narrow_[id] = false;
    for (NodeId input : node.inputs()) is_narrow_[input] = false;
    return true;
  }

  int file_of(NodeId id) const {
    return is_narrow_[id] ? TilePlan::kNarrowFile : static_cast<int>(program_.nodes[id].type);
  }

  void find_uses(NodeId id) {
    const Node& node = program_.nodes[id];
    for (NodeId input : node.inputs()) {
      last_use_[input] = id;
      const bool reads_scalar = is_scalar(id) || node.op == Op::kLoad;  // a load takes scalar indices as they are
      if (is_scalar(input) && !reads_scalar) is_spread_[input] = true;
    }
  }

  int16_t new_register(NodeId id) {
    std::vector<int16_t>& free = free_[file_of(id)];
    if (free.empty()) return lasting_register(id);
    const int16_t place = free.back();
    free.pop_back();
    return place;
  }

  // A register that no other value gets: it is written before the rows are walked.
  int16_t lasting_register(NodeId id) { return static_cast<int16_t>(plan_.register_counts_[file_of(id)]++); }

  void place(NodeId id) {
    const Node& node = program_.nodes[id];
    const TilePlan::Stage stage = stage_of(id);
    Slot& slot = slots_[id];
    if (is_scalar(id)) {
      slot.place = static_cast<int16_t>(plan_.scalar_count_++);
      if (is_spread_[id]) slot.wide = lasting_register(id);
    } else {
      // The scores are there before the first instruction, so their register cannot be an earlier value's.
      const bool is_early = stage == TilePlan::kKey || node.op == Op::kScore;
      slot.place = slot.wide = is_early ? lasting_register(id) : new_register(id);
    }
    if (node.op == Op::kScore) {
      plan_.score_register_ = slot.place;
    } else {
      plan_.stages_[stage].push_back(instruction_for(node, id));
    }
    free_dead_inputs(node, id);
  }

  Instruction instruction_for(const Node& node, NodeId id) const {
    Instruction instruction{.op = node.op,
                            .type = node.type,
                            .operands = node.type,
                            .capture = node.capture,
                            .source_count = node.argument_count,
                            .is_scalar = is_scalar(id),
                            .is_narrow = is_narrow_[id],
                            .target = slots_[id],
                            .constant = node.constant};
    for (int i = 0; i < node.argument_count; ++i) {
      instruction.sources[i] = slots_[node.arguments[i]];
      const auto bit = static_cast<uint8_t>(1u << i);
      if (is_scalar(node.arguments[i])) instruction.scalar_sources |= bit;
      if (is_narrow_[node.arguments[i]]) instruction.narrow_sources |= bit;
    }
    // Casts and comparisons have no integer value: their operands tell.
    if (node.op != Op::kLoad && instruction.narrow_sources != 0) instruction.is_narrow = true;
    if (node.argument_count > 0) {
      instruction.operands = program_.nodes[node.arguments[node.op == Op::kSelect ? 1 : 0]].type;
    }
    return instruction;
  }

  void free_dead_inputs(const Node& node, NodeId id) {
    for (int i = 0; i < node.argument_count; ++i) {
      const NodeId input = node.arguments[i];
      const auto earlier = node.inputs().first(i);
      const bool is_repeated = std::find(earlier.begin(), earlier.end(), input) != earlier.end();
      if (last_use_[input] == id && stage_of(input) == TilePlan::kElement && !is_repeated) {
        free_[file_of(input)].push_back(slots_[input].place);
      }
    }
  }

  const Program& program_;
  TilePlan& plan_;
  std::vector<uint8_t> variation_;
  std::vector<Slot> slots_;
  std::vector<NodeId> last_use_;
  std::vector<bool> is_spread_;
  std::vector<bool> is_narrow_;
  std::vector<int16_t> free_[4];
};

TilePlan::TilePlan(const Program& program, std::span<const TensorView> captured, std::string_view op)
    : captured_(captured.begin(), captured.end()) {
  check_captures(program, captured, op);
  Planner(program, *this).run();
}

template <class Real>
size_t TilePlan::workspace_bytes() const {
  constexpr size_t kAlignment = 64;
  const size_t scalars = (scalar_count_ * sizeof(Value<Real>) + kAlignment - 1) / kAlignment * kAlignment;
  const size_t lane_bytes = register_count(Type::kFloat) * sizeof(Real) + register_count(Type::kInt) * sizeof(int64_t) +
                            narrow_register_count() * sizeof(int32_t) + register_count(Type::kBool) * sizeof(bool);
  const size_t offsets = kTileBlock * sizeof(int64_t);
  return scalars + offsets + lane_bytes * kTileBlock;
}

template size_t TilePlan::workspace_bytes<float>() const;
template size_t TilePlan::workspace_bytes<double>() const;

}  // namespace kernel_pytorch::expression
