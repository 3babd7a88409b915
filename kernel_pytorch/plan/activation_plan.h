// Which tensors of a training step to keep for backward, to compute again or to move to the host, so that the step's
// peak stays under a budget and its time grows least. A model is a chain of blocks; a block is what one forward of it
// made, as a front end measured it: every storage with what it costs to make again, when it is read in backward, and
// what else is alive at each moment. The peak is that of the timeline, forward and backward: what is held, what was
// made again and is still to be read, what is being copied, and the rest.
//
// What the runtime has to do, since the plan counts on it:
// - A kept or moved tensor lives from its op on. A moved one leaves the device at the end of the next block's forward
//   and is back when the next block's backward begins; the last block moves nothing.
// - A tensor is made again at the first read of it, or of one that is made of it, ops in order; it lives until its last
//   read, by backward or by the op that it is made again for.
// - A kept or moved tensor lives until the last read of what it is needed for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

enum class Treatment : uint8_t { kNone, kKeep, kMove, kRecompute };  // kNone: nothing needs it after forward
inline constexpr std::string_view kTreatmentNames[] = {"none", "keep", "move", "recompute"};

struct Activation {
  double bytes = 0;
  int64_t op = -1;          // of the block's forward that makes it; -1: the block is given it
  int64_t dies = 0;         // the first op that no longer finds it alive if nothing saves it
  double recompute_us = 0;  // of its op; activations of one op share one run of it
  bool can_recompute = false, can_move = false;
  std::vector<int64_t> inputs{};  // activations, earlier in the list, that its op reads
  std::vector<int64_t> reads{};   // events of the block's backward that read it; none: it is not saved
};

// A kind of block; a model of 32 equal layers has one.
struct BlockKind {
  std::vector<Activation> activations{};  // ops in order
  double forward_us = 0, backward_us = 0;
  std::vector<double> forward_bytes{};  // by op: all that is alive, less what was at the start, if nothing is saved
  std::vector<double> backward_at{};    // by event: what else is alive when it is reached, less what was at the start
  std::vector<double> backward_greatest{};  // by event: the most that else is alive from it to the next
};

struct ChainBlock {
  int64_t kind = 0;
  double forward_start = 0, backward_start = 0;  // all that is alive there but activations of blocks
};

struct ActivationRequest {
  std::vector<BlockKind> kinds{};
  std::vector<ChainBlock> chain{};
  double between = 0;       // the peak between the last block's forward and its backward, without activations of blocks
  double outside = 0;       // the peak before the first block's forward and after its backward
  double budget_bytes = 0;  // of the peak
  double to_host = 0, to_device = 0;  // bytes per second; 0: nothing may be moved
  double step_us = 0;                 // of a step that keeps everything
};

struct BlockPlan {
  std::vector<Treatment> treatments{};  // by activation
  double held_bytes = 0, moved_bytes = 0, recompute_us = 0;
};

struct ActivationPlan {
  bool fits = false;
  bool is_exact = true;  // false: menus or fronts were thinned, and a better plan may exist
  double peak_bytes = 0;
  double step_us = 0;
  double recompute_us = 0, stall_us = 0;  // that step_us contains
  double kept_bytes = 0, moved_bytes = 0;
  double least_bytes = 0;           // the smallest peak that any plan has
  double everything_bytes = 0;      // the peak with everything kept
  std::vector<BlockPlan> blocks{};  // without `fits`: of the smallest peak
  std::string reason{};
};

KP_EXPORT ActivationPlan plan_activations(const ActivationRequest& request);

// One way of treating a block's activations, and what follows from it.
struct BlockOption {
  std::vector<Treatment> treatments{};
  double held_bytes = 0, moved_bytes = 0, recompute_us = 0;
  double forward_peak = 0;   // above forward_start and what earlier blocks hold
  double backward_peak = 0;  // above backward_start and what earlier blocks hold
};

// What treatments (one per activation; every one that is needed has one) lead to.
KP_EXPORT BlockOption simulate_block(const BlockKind& kind, std::vector<Treatment> treatments);

struct BlockMenu {
  std::vector<BlockOption> options{};  // none is beaten by another in every respect; the first keeps everything
  bool is_exact = true;
};

KP_EXPORT BlockMenu block_menu(const BlockKind& kind, bool may_move);

}  // namespace kernel_pytorch::plan
