// Which fiber runs: lanes of one warp for a while, then a random other warp; between them a random copy in flight
// lands. A cluster's blocks run together; a few clusters at once, more when those that run wait for later ones.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "tests/emulated_gpu/runtime/fiber.h"
#include "tests/emulated_gpu/runtime/memory.h"
#include "tests/emulated_gpu/runtime/scheduler.h"

extern "C" {
EmulatedIndex emulated_thread, emulated_block, emulated_block_size, emulated_grid, emulated_cluster_rank,
    emulated_cluster_size;
char* emulated_shared_memory;
}

namespace emulated {

Fiber* current = nullptr;
Machine machine;

namespace {

constexpr int kSpinRounds = 20000;
constexpr unsigned kFibersAtOnce = 2048;

void resume(Fiber* fiber) {
  current = fiber;
  Block& block = *fiber->warp->block;
  emulated_thread = fiber->index;
  emulated_block = block.index;
  emulated_cluster_rank = block.rank;
  emulated_shared_memory = block.shared;
}

}  // namespace

void remove_ready(Warp* warp) {
  Warp* last = machine.ready.back();
  machine.ready[warp->place_in_ready] = last;
  last->place_in_ready = warp->place_in_ready;
  machine.ready.pop_back();
  warp->place_in_ready = -1;
}

namespace {

void run_some_copy() {
  const size_t i = random_number() % machine.in_flight.size();
  const Async operation = machine.in_flight[i];
  machine.in_flight[i] = machine.in_flight.back();
  machine.in_flight.pop_back();
  if (operation->is_done) return;
  operation->is_done = true;
  ++machine.progress;
  operation->act();
}

// The next fiber, or null where none is ready.
Fiber* choose() {
  for (;;) {
    Warp* warp = machine.warp;
    if (warp == nullptr || warp->ready == 0 || chance(16)) {
      if (!machine.in_flight.empty() && (machine.ready.empty() || chance(4))) run_some_copy();
      if (machine.ready.empty()) {
        if (!machine.in_flight.empty()) continue;
        return nullptr;
      }
      warp = machine.ready[random_number() % machine.ready.size()];
      machine.warp = warp;
    }
    const unsigned turn = random_number() % 32;
    const unsigned turned = warp->ready >> turn | (turn == 0 ? 0 : warp->ready << (32 - turn));
    const unsigned lane = (__builtin_ctz(turned) + turn) % 32;
    warp->ready &= ~(1u << lane);
    if (warp->ready == 0) remove_ready(warp);
    return warp->lanes[lane];
  }
}

// Leaves the fiber that runs for another one, or for the scheduler.
void leave() {
  Fiber* self = current;
  Fiber* next = machine.error.empty() ? choose() : nullptr;
  if (next == self) {
    resume(self);
    return;
  }
  if (next == nullptr) {
    current = nullptr;
    emulated_switch(&self->stack_pointer, machine.scheduler_stack);
  } else {
    resume(next);
    emulated_switch(&self->stack_pointer, next->stack_pointer);
  }
}

}  // namespace

void begin_fiber() {
  Fiber* self = current;
  machine.request->kernel->run(machine.arguments);
  if (!self->store_groups.empty() || !self->open_stores.empty()) {
    for (const auto& group : self->store_groups) {
      for (const Async& store : group) {
        if (!store->is_done) fail("the thread ends before its bulk stores have read shared memory");
      }
    }
  }
  self->is_finished = true;
  ++machine.progress;
  finish_in_warp(self);
  finish_in_block(self);
  finish_in_cluster(self);
  Block& block = *self->warp->block;
  ++block.finished;
  if (++block.cluster->finished == block.cluster->threads) {
    machine.has_finished_cluster = true;
    current = nullptr;
    emulated_switch(&self->stack_pointer, machine.scheduler_stack);
  }
  leave();
  __builtin_trap();
}

namespace {

void run_clusters() {
  const LaunchRequest& request = *machine.request;
  const uint64_t total = uint64_t{request.grid[0]} * request.grid[1] * request.grid[2] /
                         (request.cluster[0] * request.cluster[1] * request.cluster[2]);
  const unsigned per_cluster = request.block[0] * request.block[1] * request.block[2] * request.cluster[0] *
                               request.cluster[1] * request.cluster[2];
  const size_t resident = std::max<size_t>(1, kFibersAtOnce * 4 / per_cluster);
  // Blocks that run at the same time show races between them.
  const size_t at_once = std::min<size_t>(1 + random_number() % 3, std::max<size_t>(1, kFibersAtOnce / per_cluster));
  uint64_t next = 0, seen_progress = 0;
  int idle_rounds = 0;
  while (next < total || !machine.clusters.empty()) {
    while (next < total && machine.clusters.size() < at_once) start_cluster(next++);
    Fiber* fiber = choose();
    if (!machine.error.empty()) return;
    if (fiber == nullptr) {
      if (machine.progress != seen_progress) idle_rounds = 0;
      seen_progress = machine.progress;
      const bool can_start = next < total && machine.clusters.size() < resident;
      if (!machine.spinning.empty() && ++idle_rounds < (can_start ? 3 : kSpinRounds)) {
        std::vector<Fiber*> spinning;
        spinning.swap(machine.spinning);
        for (Fiber* spinner : spinning) make_ready(spinner);
        continue;
      }
      if (can_start) {
        idle_rounds = 0;
        start_cluster(next++);
        continue;
      }
      machine.error = describe_waits();
      return;
    }
    resume(fiber);
    emulated_switch(&machine.scheduler_stack, fiber->stack_pointer);
    if (!machine.error.empty()) return;
    if (machine.has_finished_cluster) {
      machine.has_finished_cluster = false;
      for (size_t i = 0; i < machine.clusters.size();) {
        Cluster& cluster = *machine.clusters[i];
        if (cluster.finished < cluster.threads) {
          ++i;
          continue;
        }
        end_cluster(cluster);
        machine.clusters.erase(machine.clusters.begin() + static_cast<long>(i));
      }
    }
  }
}

}  // namespace

uint64_t random_number() {
  machine.random ^= machine.random << 13;
  machine.random ^= machine.random >> 7;
  machine.random ^= machine.random << 17;
  return machine.random >> 16;
}

unsigned shared_size() {
  const LaunchRequest& request = *machine.request;
  const unsigned alignment = request.kernel->dynamic_shared_alignment;
  const unsigned static_end = kSharedStart + request.kernel->static_shared_bytes;
  return (static_end + alignment - 1) / alignment * alignment + request.shared_bytes;
}

std::string kernel_name() {
  return machine.request == nullptr ? "" : machine.request->name;
}

void note_fault(const std::string& message) {
  if (!machine.error.empty()) return;
  if (current == nullptr) {
    machine.error = message;
    return;
  }
  const Block& block = *current->warp->block;
  machine.error = "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
                  std::to_string(block.index.z) + ") thread " + std::to_string(current->thread) + ": " + message;
}

void fail(const std::string& message) {
  note_fault(message);
  if (current != nullptr) leave();  // to the scheduler, which ends the launch
  std::fprintf(stderr, "emulated GPU: %s\n", message.c_str());
  std::abort();
}

void make_ready(Fiber* fiber) {
  Warp* warp = fiber->warp;
  fiber->waits_for = nullptr;
  if (warp->ready == 0) {
    warp->place_in_ready = static_cast<int>(machine.ready.size());
    machine.ready.push_back(warp);
  }
  warp->ready |= 1u << (fiber->thread % 32);
}

void wait_here(const char* what, uint64_t detail, uint64_t value) {
  Fiber* self = current;
  self->waits_for = what;
  self->wait_detail = detail;
  self->wait_value = value;
  ++machine.progress;
  leave();
}

void yield_ready() {
  make_ready(current);
  leave();
}

void add_async(const Async& operation) {
  machine.in_flight.push_back(operation);
}

void wake_mbarrier(const void* barrier) {
  ++machine.progress;
  for (const auto& cluster : machine.clusters) {
    for (const auto& block : cluster->blocks) {
      for (const auto& warp : block->warps) {
        for (unsigned rest = warp->exists & ~warp->ready & ~warp->finished; rest != 0; rest &= rest - 1) {
          Fiber* fiber = warp->lanes[__builtin_ctz(rest)];
          if (fiber->waits_for != nullptr && fiber->wait_detail == reinterpret_cast<uint64_t>(barrier)) {
            make_ready(fiber);
          }
        }
      }
    }
  }
}

std::string run_launch(const LaunchRequest& request) {
  std::vector<void*> arguments;
  for (const auto& bytes : request.arguments) arguments.push_back(const_cast<char*>(bytes.data()));
  machine.request = &request;
  machine.arguments = arguments.data();
  machine.error.clear();
  static uint64_t launches = 0;  // each launch of a process has an order of its own
  machine.random = (settings().seed + (launches++ << 32)) * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  for (int i = 0; i < 8; ++i) random_number();
  emulated_block_size = {request.block[0], request.block[1], request.block[2]};
  emulated_grid = {request.grid[0], request.grid[1], request.grid[2]};
  emulated_cluster_size = {request.cluster[0], request.cluster[1], request.cluster[2]};
  const FaultHandler handler;
  run_clusters();
  for (const auto& cluster : machine.clusters) end_cluster(*cluster);
  machine.clusters.clear();
  machine.ready.clear();
  machine.spinning.clear();
  machine.in_flight.clear();
  machine.warp = nullptr;
  machine.has_finished_cluster = false;
  machine.request = nullptr;
  current = nullptr;
  const std::string problem = check_canaries();
  return machine.error.empty() ? problem : machine.error;
}

}  // namespace emulated

extern "C" {

void emulated_spin(void) {
  using namespace emulated;
  Fiber* self = current;
  self->waits_for = "spins";
  machine.spinning.push_back(self);
  leave();
}

void emulated_point(void) {
  if (emulated::chance(8)) emulated::yield_ready();
}

long long emulated_clock(void) {
  static long long now = 0;
  return now += 1000;
}

void emulated_fail(const char* message) {
  emulated::fail(message);
}
}
