// Instructions of a warp: its lanes meet, and the last one that comes acts for all.
#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {
namespace {

// Runs what the last lane would have run, and lets the others go.
void finish_collective(Warp& warp, size_t place) {
  const Collective collective = warp.collectives[place];
  warp.collectives.erase(warp.collectives.begin() + static_cast<long>(place));
  const unsigned mask = collective.mask & ~warp.finished;
  collective.act(warp, mask);
  for (unsigned rest = mask; rest != 0; rest &= rest - 1) {
    Fiber* fiber = warp.lanes[__builtin_ctz(rest)];
    if (fiber != current) make_ready(fiber);
  }
}

struct Shuffle {
  unsigned long long value;
  int argument, width, mode;
  unsigned long long result;
};

bool act_shuffle(Warp& warp, unsigned mask) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto* own = static_cast<Shuffle*>(const_cast<void*>(warp.lanes[lane]->operand));
    const int width = own->width, position = static_cast<int>(lane) % width,
              segment = static_cast<int>(lane) - position;
    int source = position;
    bool inside = true;
    switch (own->mode) {
      case 0:
        source = own->argument & (width - 1);
        break;
      case 1:
        source = position - own->argument;
        inside = source >= 0;
        break;
      case 2:
        source = position + own->argument;
        inside = source < width;
        break;
      default:  // may lie in another segment: that of an earlier one is read, that of a later one is not
        source = (static_cast<int>(lane) ^ own->argument) - segment;
        inside = source < width;
    }
    const unsigned from = inside ? static_cast<unsigned>(segment + source) : lane;
    if ((mask >> from & 1) == 0) {
      own->result = 0xdeaddeaddeaddeadull;  // a lane that takes no part: undefined
    } else {
      own->result = static_cast<const Shuffle*>(warp.lanes[from]->operand)->value;
    }
  }
  return true;
}

struct Vote {
  unsigned long long value;
  int operation;
  unsigned result;
};

Vote& vote_of(Warp& warp, unsigned lane) {
  return *static_cast<Vote*>(const_cast<void*>(warp.lanes[lane]->operand));
}

bool act_ballot(Warp& warp, unsigned mask) {
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && vote_of(warp, lane).value != 0) bits |= 1u << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0) vote_of(warp, lane).result = bits;
  }
  return true;
}

bool act_match(Warp& warp, unsigned mask) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    unsigned bits = 0;
    for (unsigned other = 0; other < 32; ++other) {
      if ((mask >> other & 1) != 0 && vote_of(warp, other).value == vote_of(warp, lane).value) bits |= 1u << other;
    }
    vote_of(warp, lane).result = bits;
  }
  return true;
}

unsigned reduce(unsigned a, unsigned b, int operation) {
  const int x = static_cast<int>(a), y = static_cast<int>(b);
  switch (operation) {
    case 0:
      return a + b;
    case 1:
      return a > b ? a : b;
    case 2:
      return a < b ? a : b;
    case 3:
      return x > y ? a : b;
    case 4:
      return x < y ? a : b;
    case 5:
      return a & b;
    case 6:
      return a | b;
    default:
      return a ^ b;
  }
}

bool act_reduce(Warp& warp, unsigned mask) {
  bool is_first = true;
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const Vote& vote = vote_of(warp, lane);
    result = is_first ? static_cast<unsigned>(vote.value)
                      : reduce(result, static_cast<unsigned>(vote.value), vote.operation);
    is_first = false;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0) vote_of(warp, lane).result = result;
  }
  return true;
}

bool act_nothing(Warp&, unsigned) {
  return true;
}

}  // namespace

void meet(unsigned mask, const char* kind, const void* operand, bool (*act)(Warp&, unsigned mask)) {
  Fiber* self = current;
  Warp& warp = *self->warp;
  const unsigned own = 1u << (self->thread % 32);
  if ((mask & own) == 0) fail(std::string(kind) + ": the mask does not hold the lane that executes it");
  mask &= warp.exists;
  self->operand = operand;
  size_t place = 0;
  while (place < warp.collectives.size() &&
         (warp.collectives[place].mask != mask || warp.collectives[place].kind != kind)) {
    ++place;
  }
  if (place == warp.collectives.size()) warp.collectives.push_back({mask, kind, 0, act});
  warp.collectives[place].arrived |= own;
  if ((mask & ~warp.finished & ~warp.collectives[place].arrived) == 0) {
    finish_collective(warp, place);
    return;
  }
  wait_here(kind, mask, warp.index);
}

void finish_in_warp(Fiber* fiber) {
  Warp& warp = *fiber->warp;
  warp.finished |= 1u << (fiber->thread % 32);
  for (size_t i = 0; i < warp.collectives.size();) {
    const Collective& collective = warp.collectives[i];
    if ((collective.mask & ~warp.finished & ~collective.arrived) == 0) {
      finish_collective(warp, i);
      i = 0;
    } else {
      ++i;
    }
  }
}

}  // namespace emulated

using namespace emulated;

extern "C" {

unsigned long long emulated_shuffle(unsigned mask, unsigned long long value, int argument, int width, int mode) {
  Shuffle shuffle{value, argument, width, mode, 0};
  meet(mask, "__shfl_sync", &shuffle, act_shuffle);
  return shuffle.result;
}

unsigned emulated_ballot(unsigned mask, int predicate) {
  Vote vote{predicate != 0 ? 1ull : 0ull, 0, 0};
  meet(mask, "__ballot_sync (or any, all)", &vote, act_ballot);
  return vote.result;
}

unsigned emulated_match_any(unsigned mask, unsigned long long value) {
  Vote vote{value, 0, 0};
  meet(mask, "__match_any_sync", &vote, act_match);
  return vote.result;
}

unsigned emulated_reduce(unsigned mask, unsigned value, int operation) {
  Vote vote{value, operation, 0};
  meet(mask, "__reduce_sync", &vote, act_reduce);
  return vote.result;
}

void emulated_sync_warp(unsigned mask) {
  meet(mask, "__syncwarp", nullptr, act_nothing);
}

unsigned emulated_active_mask(void) {
  return 1u << (current->thread % 32);  // legal: which lanes have converged is up to the hardware
}
}
