// Barriers of a block by number, of a cluster, and mbarriers, whose whole state is the 64 bits in shared memory.
#include <cstring>

#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {
namespace {

// A marked word, so that use before init or after overwriting is seen.
struct Mbarrier {
  uint64_t mark : 8;
  uint64_t phase : 1;
  uint64_t count : 15;
  uint64_t pending : 15;  // arrivals that this phase still needs
  int64_t bytes : 25;     // expected less landed
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint64_t kMark = 0x5b;

Mbarrier& mbarrier_at(char* place, const char* what) {
  auto* barrier = reinterpret_cast<Mbarrier*>(place);
  if (barrier->mark != kMark) fail(std::string(what) + " on an mbarrier that is not initialised (or was overwritten)");
  return *barrier;
}

void complete_if_done(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  barrier.phase = barrier.phase ^ 1;
  wake_mbarrier(&barrier);
}

void open_barrier(Block& block, NamedBarrier& barrier) {
  block.barrier_result = static_cast<int>(barrier.count_true);
  barrier.arrived = barrier.expected = barrier.count_true = 0;
  std::vector<Fiber*> waiting;
  waiting.swap(barrier.waiting);
  for (Fiber* fiber : waiting) {
    fiber->wait_value = static_cast<uint64_t>(block.barrier_result);
    if (fiber != current) make_ready(fiber);
  }
  barrier.waiting.swap(waiting);  // keeps its memory
  barrier.waiting.clear();
}

// `expected` 0: all threads of the block that have not ended.
void come_to(int number, unsigned expected, bool waits, bool predicate) {
  Block& block = current_block();
  if (number < 0 || number >= kNamedBarriers) fail("barrier " + std::to_string(number) + ": there are 16");
  NamedBarrier& barrier = block.barriers[number];
  if (barrier.arrived > 0 && barrier.expected != expected) {
    fail("barrier " + std::to_string(number) + " is awaited with " + std::to_string(barrier.expected) + " and with " +
         std::to_string(expected) + " threads (0: all)");
  }
  barrier.expected = expected;
  ++barrier.arrived;
  if (predicate) ++barrier.count_true;
  Fiber* self = current;
  if (waits) barrier.waiting.push_back(self);
  const unsigned needed = expected == 0 ? block.threads - block.finished : expected;
  if (barrier.arrived >= needed) {
    open_barrier(block, barrier);
  } else if (waits) {
    wait_here(expected == 0 ? "__syncthreads" : "named barrier", static_cast<uint64_t>(number), expected);
  }
}

}  // namespace

std::string describe_barrier(const void* place) {
  Mbarrier barrier;
  std::memcpy(&barrier, place, sizeof(barrier));
  return "phase " + std::to_string(barrier.phase) + ", " + std::to_string(barrier.pending) + " of " +
         std::to_string(barrier.count) + " arrivals and " + std::to_string(static_cast<long>(barrier.bytes)) +
         " bytes pending";
}

void finish_in_block(Fiber* fiber) {
  Block& block = *fiber->warp->block;
  for (NamedBarrier& barrier : block.barriers) {
    // This fiber is not counted in block.finished yet.
    if (barrier.arrived > 0 && barrier.expected == 0 && barrier.arrived >= block.threads - block.finished - 1) {
      open_barrier(block, barrier);
    }
  }
}

void finish_in_cluster(Fiber* fiber) {
  Cluster& cluster = *fiber->warp->block->cluster;
  if (cluster.arrived == 0 || cluster.arrived < cluster.threads - cluster.finished - 1) return;
  cluster.arrived = 0;
  ++cluster.phase;
  for (Fiber* waiting : cluster.waiting) make_ready(waiting);
  cluster.waiting.clear();
}

void complete_bytes(unsigned address, Block& own, unsigned bytes) {
  auto* place = own.shared + (address & ((1u << kRankShift) - 1));
  auto& barrier = *reinterpret_cast<Mbarrier*>(place);
  if (barrier.mark != kMark) {
    note_fault("a copy completes on an mbarrier that is not initialised (or was overwritten)");
    return;
  }
  barrier.bytes = barrier.bytes - static_cast<int64_t>(bytes);
  complete_if_done(barrier);
}

}  // namespace emulated

using namespace emulated;

extern "C" {

int emulated_sync_threads(int predicate, int mode) {
  Fiber* self = current;
  self->wait_value = 0;
  Block& block = current_block();
  come_to(0, 0, true, predicate != 0);
  const auto count = static_cast<int>(self->wait_value);
  if (mode == 1) return count != 0;
  if (mode == 2) return count == static_cast<int>(block.threads - block.finished);
  return count;
}

void emulated_named_barrier(int barrier, int threads, int waits) {
  if (threads <= 0 || threads % 32 != 0) fail("a named barrier of " + std::to_string(threads) + " threads");
  come_to(barrier, static_cast<unsigned>(threads), waits != 0, false);
}

void emulated_cluster_arrive(void) {
  Fiber* self = current;
  Cluster& cluster = *current_block().cluster;
  if (self->is_in_cluster_barrier) fail("barrier.cluster.arrive twice without a wait");
  self->is_in_cluster_barrier = true;
  self->cluster_phase = cluster.phase;
  if (++cluster.arrived < cluster.threads - cluster.finished) return;
  cluster.arrived = 0;
  ++cluster.phase;
  for (Fiber* waiting : cluster.waiting) make_ready(waiting);
  cluster.waiting.clear();
}

void emulated_cluster_wait(void) {
  Fiber* self = current;
  Cluster& cluster = *current_block().cluster;
  if (!self->is_in_cluster_barrier) fail("barrier.cluster.wait without an arrive");
  if (cluster.phase == self->cluster_phase) {
    cluster.waiting.push_back(self);
    wait_here("barrier.cluster", cluster.arrived, cluster.threads);
  }
  self->is_in_cluster_barrier = false;
}

void emulated_mbarrier_init(unsigned address, unsigned count) {
  if (count == 0 || count >= 1u << 15) fail("mbarrier.init with " + std::to_string(count) + " arrivals");
  Mbarrier barrier{kMark, 0, count, count, 0};
  std::memcpy(shared_pointer(address, 8, 8, true), &barrier, sizeof(barrier));
}

void emulated_mbarrier_arrive(unsigned address, unsigned expected_bytes) {
  Mbarrier& barrier = mbarrier_at(shared_pointer(address, 8, 8), "arriving");
  if (barrier.pending == 0)
    fail("more arrivals on an mbarrier than it was initialised with: " + describe_barrier(&barrier));
  barrier.bytes = barrier.bytes + static_cast<int64_t>(expected_bytes);
  barrier.pending = barrier.pending - 1;
  complete_if_done(barrier);
}

int emulated_mbarrier_try_wait(unsigned address, unsigned parity) {
  char* place = shared_pointer(address, 8, 8, true);
  Mbarrier& barrier = mbarrier_at(place, "waiting");
  if (barrier.phase != parity) return 1;
  wait_here("mbarrier", reinterpret_cast<uint64_t>(place), parity);
  return barrier.phase != parity ? 1 : 0;
}
}
