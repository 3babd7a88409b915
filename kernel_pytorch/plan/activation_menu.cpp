// The ways to treat one block's activations: all of them where they are few, else those at the lowest cost for a series
// of prices of memory, each a minimum cut; with the subsets of the stored tensors that may be moved.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/plan/activation_plan.h"

namespace kernel_pytorch::plan {
namespace {

constexpr size_t kMostWays = size_t{1} << 16;  // that are tried one by one
constexpr size_t kMostOptions = 48;            // that a menu keeps
constexpr int kPrices = 40;
constexpr size_t kMostMoved = 10;  // tensors whose subsets are tried, the largest
constexpr double kForever = std::numeric_limits<double>::infinity();

// What must be there in backward: what it reads, and what those are made of that are made again.
std::vector<char> needed_by(const BlockKind& kind, const std::vector<Treatment>& treatments) {
  std::vector<char> needed(kind.activations.size());
  for (size_t i = needed.size(); i-- > 0;) {
    const Activation& one = kind.activations[i];
    needed[i] |= static_cast<char>(!one.reads.empty());
    if (needed[i] && treatments[i] == Treatment::kRecompute) {
      for (int64_t input : one.inputs) needed[static_cast<size_t>(input)] = 1;
    }
  }
  return needed;
}

// Every way, by the last activation first: what it needs is known when the earlier ones are decided.
class AllWays {
 public:
  AllWays(const BlockKind& kind, bool may_move) : kind_(kind), may_move_(may_move) {
    now_.assign(kind.activations.size(), Treatment::kNone);
    needed_.assign(kind.activations.size(), 0);
  }

  // False: there are more than kMostWays.
  bool collect(std::vector<std::vector<Treatment>>& ways) {
    ways_ = &ways;
    return decide(now_.size());
  }

 private:
  bool decide(size_t left) {
    if (left == 0) {
      if (ways_->size() == kMostWays) return false;
      ways_->push_back(now_);
      return true;
    }
    const size_t i = left - 1;
    const Activation& one = kind_.activations[i];
    now_[i] = Treatment::kNone;
    if (one.reads.empty() && needed_[i] == 0) return decide(i);
    now_[i] = Treatment::kKeep;
    if (!decide(i)) return false;
    if (one.can_move && may_move_) {
      now_[i] = Treatment::kMove;
      if (!decide(i)) return false;
    }
    if (one.can_recompute) {
      now_[i] = Treatment::kRecompute;
      for (int64_t input : one.inputs) ++needed_[static_cast<size_t>(input)];
      const bool finished = decide(i);
      for (int64_t input : one.inputs) --needed_[static_cast<size_t>(input)];
      if (!finished) return false;
    }
    return true;
  }

  const BlockKind& kind_;
  bool may_move_;
  std::vector<Treatment> now_;
  std::vector<int> needed_;
  std::vector<std::vector<Treatment>>* ways_ = nullptr;
};

// Maximum flow by shortest augmenting paths: graphs here have some hundred edges.
class Flow {
 public:
  explicit Flow(size_t nodes) : edges_of_(nodes) {}

  void edge(size_t from, size_t to, double capacity) {
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }

  // After it, which nodes the source still reaches: the source's side of a minimum cut.
  std::vector<char> cut(size_t source, size_t sink) {
    while (true) {
      std::vector<size_t> by(edges_of_.size(), SIZE_MAX), queue{source};
      for (size_t head = 0; head < queue.size() && by[sink] == SIZE_MAX; ++head) {
        for (size_t e : edges_of_[queue[head]]) {
          if (edges_[e].left <= 1e-9 || by[edges_[e].to] != SIZE_MAX || edges_[e].to == source) continue;
          by[edges_[e].to] = e;
          queue.push_back(edges_[e].to);
        }
      }
      if (by[sink] == SIZE_MAX) {
        std::vector<char> reached(edges_of_.size());
        for (size_t node : queue) reached[node] = 1;
        return reached;
      }
      double most = kForever;
      for (size_t at = sink; at != source; at = edges_[by[at] ^ 1].to) most = std::min(most, edges_[by[at]].left);
      for (size_t at = sink; at != source; at = edges_[by[at] ^ 1].to) {
        edges_[by[at]].left -= most;
        edges_[by[at] ^ 1].left += most;
      }
    }
  }

 private:
  struct Edge {
    size_t to;
    double left;
  };
  std::vector<Edge> edges_;
  std::vector<std::vector<size_t>> edges_of_;
};

// The way with the least of recomputation (us) plus price times stored bytes. An activation i has two nodes:
// "available" (2i) and "made again" (2i + 1); on the source's side they are true. An op run once for several outputs
// pays once. Without `by_time` an op costs the bytes that it makes: what the smallest ways are does not hang on a
// clock.
std::vector<Treatment> cheapest(const BlockKind& kind, double price, bool by_time = true) {
  const size_t count = kind.activations.size(), source = 2 * count, sink = source + 1;
  int64_t ops = 0;
  for (const Activation& one : kind.activations) ops = std::max(ops, one.op + 1);
  Flow flow(sink + 1 + static_cast<size_t>(ops));
  constexpr double kNever = 1e30;
  std::vector<char> pays(static_cast<size_t>(ops));
  for (size_t i = 0; i < count; ++i) {
    const Activation& one = kind.activations[i];
    if (!one.reads.empty()) flow.edge(source, 2 * i, kNever);
    flow.edge(2 * i, 2 * i + 1, price * one.bytes);  // available and not made again: stored
    if (!one.can_recompute || one.op < 0) {
      flow.edge(2 * i + 1, sink, kNever);
      continue;
    }
    const size_t op = sink + 1 + static_cast<size_t>(one.op);
    flow.edge(2 * i + 1, op, kNever);
    if (!pays[static_cast<size_t>(one.op)]) flow.edge(op, sink, by_time ? one.recompute_us : one.bytes);
    pays[static_cast<size_t>(one.op)] = 1;
    for (int64_t input : one.inputs) flow.edge(2 * i + 1, 2 * static_cast<size_t>(input), kNever);
  }
  const std::vector<char> side = flow.cut(source, sink);
  std::vector<Treatment> treatments(count, Treatment::kNone);
  for (size_t i = 0; i < count; ++i) {
    if (side[2 * i]) treatments[i] = side[2 * i + 1] ? Treatment::kRecompute : Treatment::kKeep;
  }
  const std::vector<char> needed = needed_by(kind, treatments);
  for (size_t i = 0; i < count; ++i) {
    if (!needed[i]) treatments[i] = Treatment::kNone;
  }
  return treatments;
}

void add_moved(const BlockKind& kind, const std::vector<Treatment>& way, std::vector<std::vector<Treatment>>& ways) {
  std::vector<size_t> movable;
  for (size_t i = 0; i < way.size(); ++i) {
    if (way[i] == Treatment::kKeep && kind.activations[i].can_move) movable.push_back(i);
  }
  std::stable_sort(movable.begin(), movable.end(),
                   [&](size_t a, size_t b) { return kind.activations[a].bytes > kind.activations[b].bytes; });
  if (movable.size() > kMostMoved) movable.resize(kMostMoved);
  for (size_t subset = 1; subset < size_t{1} << movable.size(); ++subset) {
    ways.push_back(way);
    for (size_t bit = 0; bit < movable.size(); ++bit) {
      if (subset >> bit & 1) ways.back()[movable[bit]] = Treatment::kMove;
    }
  }
}

std::vector<std::vector<Treatment>> priced_ways(const BlockKind& kind, bool may_move) {
  std::vector<std::vector<Treatment>> ways{cheapest(kind, 0)};
  double bytes = 1, us = 1e-6;
  for (const Activation& one : kind.activations) bytes += one.bytes, us += one.recompute_us;
  std::vector<std::vector<Treatment>> bases;
  for (int i = 0; i < kPrices; ++i) {  // from a hundred-thousandth to a million times the mean cost of a byte
    const double price = std::pow(10.0, -5 + 11.0 * i / (kPrices - 1));
    for (bool by_time : {true, false}) {
      std::vector<Treatment> way = cheapest(kind, by_time ? us / bytes * price : price, by_time);
      if (std::find(bases.begin(), bases.end(), way) == bases.end()) bases.push_back(std::move(way));
    }
  }
  for (const auto& way : bases) {
    ways.push_back(way);
    if (may_move) add_moved(kind, way, ways);
  }
  return ways;
}

bool beats(const BlockOption& a, const BlockOption& b) {
  return a.held_bytes <= b.held_bytes && a.moved_bytes <= b.moved_bytes && a.recompute_us <= b.recompute_us &&
         a.forward_peak <= b.forward_peak && a.backward_peak <= b.backward_peak;
}

// One option of each cell of a grid over bytes and time, coarser until few enough are left.
void thin(std::vector<BlockOption>& options) {
  const auto greatest = [&](double BlockOption::*field) {
    double most = 1e-9;
    for (const BlockOption& one : options) most = std::max(most, one.*field);
    return most;
  };
  const double held = greatest(&BlockOption::held_bytes), moved = greatest(&BlockOption::moved_bytes),
               us = greatest(&BlockOption::recompute_us);
  const auto smallest = [&](double BlockOption::*field) {
    return static_cast<size_t>(
        std::min_element(options.begin(), options.end(),
                         [&](const BlockOption& a, const BlockOption& b) { return a.*field < b.*field; }) -
        options.begin());
  };
  for (int cells = 16; options.size() > kMostOptions; cells = cells > 2 ? cells - 1 : 1) {
    const size_t smallest_held = smallest(&BlockOption::held_bytes),
                 smallest_peak = smallest(&BlockOption::backward_peak);
    std::vector<BlockOption> kept{options.front()};
    std::vector<std::vector<int>> seen;
    for (size_t i = 1; i < options.size(); ++i) {
      if (i == smallest_held || i == smallest_peak) {
        kept.push_back(options[i]);
        continue;
      }
      const auto cell = [&](double value, double most) { return static_cast<int>(value / most * cells); };
      const std::vector<int> place{cell(options[i].held_bytes, held), cell(options[i].moved_bytes, moved),
                                   cell(options[i].recompute_us, us)};
      if (std::find(seen.begin(), seen.end(), place) != seen.end()) continue;
      seen.push_back(place);
      kept.push_back(options[i]);
    }
    options = std::move(kept);
    if (cells == 1) break;
  }
}

}  // namespace

BlockOption simulate_block(const BlockKind& kind, std::vector<Treatment> treatments) {
  const size_t count = kind.activations.size(), events = kind.backward_at.size();
  BlockOption option{.treatments = std::move(treatments)};
  const auto& how = option.treatments;
  const int64_t ops = static_cast<int64_t>(kind.forward_bytes.size());
  std::vector<double> later(static_cast<size_t>(ops) + 1);  // stored bytes that are alive only because they are
  const int64_t none = static_cast<int64_t>(events);
  // Events: of making again, of the last read, of the last read of anything made of it (which may ask for it again).
  std::vector<int64_t> made(count, none), last(count, -1), until(count, -1);
  std::vector<double> change(events + 1);
  std::vector<std::vector<size_t>> made_at(events + 1);
  std::vector<char> op_runs(static_cast<size_t>(ops) + 1);
  for (size_t i = count; i-- > 0;) {
    const Activation& one = kind.activations[i];
    for (int64_t read : one.reads) made[i] = std::min(made[i], read), last[i] = std::max(last[i], read);
    until[i] = std::max(until[i], last[i]);
    if (how[i] == Treatment::kNone) continue;
    if (how[i] == Treatment::kRecompute) {
      for (int64_t input : one.inputs) {
        const auto from = static_cast<size_t>(input);
        made[from] = std::min(made[from], made[i]);
        last[from] = std::max(last[from], made[i]);
        until[from] = std::max(until[from], until[i]);
      }
      if (!op_runs[static_cast<size_t>(one.op)]) option.recompute_us += one.recompute_us;
      op_runs[static_cast<size_t>(one.op)] = 1;
      if (made[i] < none) made_at[static_cast<size_t>(made[i])].push_back(i);
      continue;
    }
    (how[i] == Treatment::kKeep ? option.held_bytes : option.moved_bytes) += one.bytes;
    if (one.dies < ops) later[static_cast<size_t>(std::max<int64_t>(one.dies, 0))] += one.bytes;
    change[static_cast<size_t>(until[i] + 1)] -= one.bytes;
  }
  double stored = 0;
  for (size_t t = 0; t < static_cast<size_t>(ops); ++t) {
    stored += later[t];
    option.forward_peak = std::max(option.forward_peak, kind.forward_bytes[t] + stored);
  }
  double alive = option.held_bytes + option.moved_bytes;
  option.backward_peak = alive;
  for (size_t k = 0; k < events; ++k) {
    alive += change[k];
    auto& now = made_at[k];
    std::sort(now.begin(), now.end());
    std::vector<size_t> waiting;  // made at this event for others that are, and for nothing later
    for (size_t i : now) {
      alive += kind.activations[i].bytes;
      option.backward_peak = std::max(option.backward_peak, kind.backward_at[k] + alive);
      const bool is_read = !kind.activations[i].reads.empty();
      if (last[i] == static_cast<int64_t>(k) && !is_read) {
        waiting.push_back(i);
      } else {
        change[static_cast<size_t>(last[i] + 1)] -= kind.activations[i].bytes;
      }
      std::erase_if(waiting, [&](size_t w) {
        if (w == i) return false;
        for (size_t j : now) {
          const auto& inputs = kind.activations[j].inputs;
          if (j > i && std::find(inputs.begin(), inputs.end(), static_cast<int64_t>(w)) != inputs.end()) return false;
        }
        alive -= kind.activations[w].bytes;
        return true;
      });
    }
    option.backward_peak = std::max(option.backward_peak, kind.backward_greatest[k] + alive);
    for (size_t w : waiting) alive -= kind.activations[w].bytes;
  }
  return option;
}

BlockMenu block_menu(const BlockKind& kind, bool may_move) {
  BlockMenu menu;
  std::vector<std::vector<Treatment>> ways;
  if (!AllWays(kind, may_move).collect(ways)) {
    menu.is_exact = false;
    ways = priced_ways(kind, may_move);
  }
  for (auto& way : ways) {
    BlockOption option = simulate_block(kind, std::move(way));
    if (menu.options.empty()) {
      menu.options.push_back(std::move(option));  // everything kept: it stays, to be compared with
      continue;
    }
    if (std::any_of(menu.options.begin() + 1, menu.options.end(), [&](const auto& o) { return beats(o, option); })) {
      continue;
    }
    menu.options.erase(
        std::remove_if(menu.options.begin() + 1, menu.options.end(), [&](const auto& o) { return beats(option, o); }),
        menu.options.end());
    menu.options.push_back(std::move(option));
  }
  if (menu.options.size() > kMostOptions) {
    menu.is_exact = false;
    std::sort(menu.options.begin() + 1, menu.options.end(), [](const BlockOption& a, const BlockOption& b) {
      return a.held_bytes + a.backward_peak < b.held_bytes + b.backward_peak;
    });
    thin(menu.options);
  }
  return menu;
}

}  // namespace kernel_pytorch::plan
