#include "kernel_pytorch/plan/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <map>
#include <sstream>

#include "kernel_pytorch/base/error.h"

namespace kernel_pytorch::plan {
namespace {

constexpr size_t kMostFront = 512;  // of (held bytes, time) that a block's option keeps
constexpr int kHalvings = 60;       // of the search for the smallest peak

std::string bytes_text(double bytes) {
  constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB"};
  size_t unit = 0;
  for (; std::abs(bytes) >= 1024 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  std::ostringstream text;
  text << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << bytes << ' ' << kUnits[unit];
  return text.str();
}

// Blocks up to one of them: what they hold, and what they add to the step's time.
struct Prefix {
  double held = 0, us = 0;
  size_t option = 0, before = 0;  // of this block; the place of the rest in the front before it
};

class ChainPlanner {
 public:
  explicit ChainPlanner(const ActivationRequest& request) : request_(request) {
    const bool may_move = request.to_host > 0 && request.to_device > 0;
    std::map<std::pair<int64_t, bool>, size_t> menu_of;
    for (size_t i = 0; i < request.chain.size(); ++i) {
      // The last block's backward follows at once: what it moved would have to come back before it left.
      const std::pair key{request.chain[i].kind, may_move && i + 1 < request.chain.size()};
      const auto [place, is_new] = menu_of.try_emplace(key, menus_.size());
      if (is_new) {
        menus_.push_back(block_menu(request.kinds[static_cast<size_t>(key.first)], key.second));
        is_exact_ &= menus_.back().is_exact;
      }
      menu_of_block_.push_back(place->second);
    }
  }

  // The peak of all moments that a block and the one before it decide.
  double peak_at(size_t block, double held_before, const BlockOption* before, const BlockOption& option) const {
    const ChainBlock& place = request_.chain[block];
    const double moving = before == nullptr ? 0 : before->moved_bytes;
    double peak = std::max(place.forward_start + option.forward_peak, place.backward_start + option.backward_peak) +
                  held_before + moving;
    if (block + 1 == request_.chain.size()) {
      peak = std::max(peak, request_.between + held_before + option.held_bytes);
    }
    return peak;
  }

  // Copies of the block before that its neighbour's work does not hide, there and back.
  double stall_us(size_t block, const BlockOption& before, const BlockOption& option) const {
    if (before.moved_bytes == 0) return 0;
    const BlockKind& kind = request_.kinds[static_cast<size_t>(request_.chain[block].kind)];
    return std::max(0.0, before.moved_bytes / request_.to_host * 1e6 - kind.forward_us) +
           std::max(0.0, before.moved_bytes / request_.to_device * 1e6 - kind.backward_us - option.recompute_us);
  }

  const std::vector<BlockOption>& options(size_t block) const { return menus_[menu_of_block_[block]].options; }

  // Options by block with the least time among plans whose peak is at most `budget`; empty: there is none. With
  // `least_held` only, plans that hold less win: enough to know whether one exists.
  std::vector<size_t> solve(double budget, bool feasibility_only) {
    const size_t blocks = request_.chain.size();
    std::vector<std::vector<Prefix>> fronts(blocks);
    for (size_t b = 0; b < blocks; ++b) {
      for (size_t o = 0; o < options(b).size(); ++o) {
        const BlockOption& option = options(b)[o];
        std::vector<Prefix> found;
        const auto extend = [&](const Prefix& rest, const BlockOption* before, size_t place) {
          if (peak_at(b, rest.held, before, option) > budget) return;
          const double stall = before == nullptr ? 0 : stall_us(b, *before, option);
          found.push_back({rest.held + option.held_bytes, rest.us + option.recompute_us + stall, o, place});
        };
        if (b == 0) {
          extend({}, nullptr, 0);
        } else {
          const auto& rests = fronts[b - 1];
          for (size_t i = 0; i < rests.size(); ++i) extend(rests[i], &options(b - 1)[rests[i].option], i);
        }
        prune(found, feasibility_only);
        fronts[b].insert(fronts[b].end(), found.begin(), found.end());
      }
      if (fronts[b].empty()) return {};
    }
    if (blocks == 0) return {};
    const auto& last = fronts.back();
    size_t place = static_cast<size_t>(
        std::min_element(last.begin(), last.end(), [](const auto& a, const auto& b) { return a.us < b.us; }) -
        last.begin());
    std::vector<size_t> chosen(blocks);
    for (size_t b = blocks; b-- > 0;) {
      chosen[b] = fronts[b][place].option;
      place = fronts[b][place].before;
    }
    return chosen;
  }

  ActivationPlan describe(const std::vector<size_t>& chosen) const {
    ActivationPlan plan;
    plan.peak_bytes = request_.outside;
    const BlockOption* before = nullptr;
    for (size_t b = 0; b < chosen.size(); ++b) {
      const BlockOption& option = options(b)[chosen[b]];
      plan.peak_bytes = std::max(plan.peak_bytes, peak_at(b, plan.kept_bytes, before, option));
      if (before != nullptr) plan.stall_us += stall_us(b, *before, option);
      plan.kept_bytes += option.held_bytes;
      plan.moved_bytes += option.moved_bytes;
      plan.recompute_us += option.recompute_us;
      plan.blocks.push_back({option.treatments, option.held_bytes, option.moved_bytes, option.recompute_us});
      before = &option;
    }
    if (chosen.empty()) plan.peak_bytes = std::max(plan.peak_bytes, request_.between);
    plan.step_us = request_.step_us + plan.recompute_us + plan.stall_us;
    return plan;
  }

  bool is_exact() const { return is_exact_; }

 private:
  // Leaves those that nothing beats in both respects, in the order of what they hold.
  void prune(std::vector<Prefix>& found, bool feasibility_only) {
    std::sort(found.begin(), found.end(),
              [](const Prefix& a, const Prefix& b) { return a.held != b.held ? a.held < b.held : a.us < b.us; });
    size_t kept = 0;
    for (const Prefix& one : found) {
      if (kept == 0 || (!feasibility_only && one.us < found[kept - 1].us)) found[kept++] = one;
    }
    found.resize(kept);
    if (kept <= kMostFront) return;
    is_exact_ = false;  // every second, but the ends
    size_t left = 0;
    for (size_t i = 0; i < kept; ++i) {
      if (i % 2 == 0 || i + 1 == kept) found[left++] = found[i];
    }
    found.resize(left);
  }

  const ActivationRequest& request_;
  std::vector<BlockMenu> menus_;
  std::vector<size_t> menu_of_block_;
  bool is_exact_ = true;
};

void check_chain(const ActivationRequest& request) {
  for (size_t k = 0; k < request.kinds.size(); ++k) {
    const BlockKind& kind = request.kinds[k];
    const auto events = static_cast<int64_t>(kind.backward_at.size());
    const auto ops = static_cast<int64_t>(kind.forward_bytes.size());
    KP_CHECK(kind.backward_greatest.size() == kind.backward_at.size(), "activation plan: kind ", k, " has ", events,
             " events of backward and ", kind.backward_greatest.size(), " peaks between them");
    for (size_t i = 0; i < kind.activations.size(); ++i) {
      const Activation& one = kind.activations[i];
      KP_CHECK(one.op >= -1 && one.op < ops, "activation plan: activation ", i, " of kind ", k, " is of op ", one.op,
               "; there are ", ops);
      KP_CHECK(!one.can_recompute || one.op >= 0, "activation plan: activation ", i, " of kind ", k,
               " is given to the block and cannot be recomputed");
      for (int64_t input : one.inputs) {
        KP_CHECK(input >= 0 && input < static_cast<int64_t>(i), "activation plan: activation ", i, " of kind ", k,
                 " is made of ", input, "; it must be an earlier one");
      }
      for (int64_t read : one.reads) {
        KP_CHECK(read >= 0 && read < events, "activation plan: activation ", i, " of kind ", k, " is read by event ",
                 read, "; there are ", events);
      }
    }
  }
  for (const ChainBlock& block : request.chain) {
    KP_CHECK(block.kind >= 0 && block.kind < static_cast<int64_t>(request.kinds.size()),
             "activation plan: a block is of kind ", block.kind, "; there are ", request.kinds.size());
  }
}

}  // namespace

ActivationPlan plan_activations(const ActivationRequest& request) {
  check_chain(request);
  ChainPlanner planner(request);
  const ActivationPlan everything = planner.describe(std::vector<size_t>(request.chain.size()));
  // The smallest peak: by halving between nothing and everything.
  double low = 0, high = everything.peak_bytes;
  std::vector<size_t> least(request.chain.size());
  for (int i = 0; i < kHalvings && high - low > 1 && !request.chain.empty(); ++i) {
    const double middle = low + (high - low) / 2;
    std::vector<size_t> found = planner.solve(middle, true);
    (found.empty() ? low : high) = middle;
    if (!found.empty()) least = std::move(found);
  }
  const double least_bytes = planner.describe(least).peak_bytes;
  ActivationPlan plan = everything;
  plan.fits = everything.peak_bytes <= request.budget_bytes;
  if (!plan.fits) {
    const std::vector<size_t> found = planner.solve(request.budget_bytes, false);
    plan = planner.describe(found.empty() ? least : found);
    plan.fits = !found.empty() && plan.peak_bytes <= request.budget_bytes;
    plan.is_exact = planner.is_exact();
  }
  plan.least_bytes = least_bytes;
  plan.everything_bytes = everything.peak_bytes;
  if (!plan.fits) {
    plan.reason = concat("the smallest peak is ", bytes_text(least_bytes), ", the budget ",
                         bytes_text(request.budget_bytes), "; a smaller batch or fewer optimizer states would help");
  } else if (plan.kept_bytes == everything.kept_bytes) {
    plan.reason = concat("everything fits: ", bytes_text(everything.peak_bytes));
  } else {
    plan.reason = concat(bytes_text(everything.peak_bytes), " become ", bytes_text(plan.peak_bytes), ": ",
                         bytes_text(plan.kept_bytes), " kept, ", bytes_text(plan.moved_bytes), " on the host, ",
                         bytes_text(everything.kept_bytes - plan.kept_bytes - plan.moved_bytes),
                         " made again; the step takes ", std::lround(plan.recompute_us + plan.stall_us), " us longer");
  }
  return plan;
}

}  // namespace kernel_pytorch::plan
