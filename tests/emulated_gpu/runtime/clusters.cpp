// The blocks of a cluster with their fibers, warps and shared memory: how they begin and end.
#include <cstring>
#include <map>

#include "tests/emulated_gpu/runtime/fiber.h"
#include "tests/emulated_gpu/runtime/memory.h"
#include "tests/emulated_gpu/runtime/scheduler.h"

namespace emulated {
namespace {

std::unique_ptr<Fiber> take_fiber() {
  if (machine.spare.empty()) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = take_stack();
    return fiber;
  }
  std::unique_ptr<Fiber> fiber = std::move(machine.spare.back());
  machine.spare.pop_back();
  char* stack = fiber->stack;
  fiber->copies.clear();
  fiber->copy_groups.clear();
  fiber->open_stores.clear();
  fiber->store_groups.clear();
  fiber->open_copies = fiber->issued_products = 0;
  fiber->stack = stack;
  fiber->waits_for = nullptr;
  fiber->is_finished = fiber->is_in_cluster_barrier = false;
  return fiber;
}

}  // namespace

void start_cluster(uint64_t number) {
  const LaunchRequest& request = *machine.request;
  auto cluster = std::make_unique<Cluster>();
  const unsigned* size = request.cluster;
  const unsigned across = request.grid[0] / size[0], down = request.grid[1] / size[1];
  const unsigned x = number % across * size[0], y = number / across % down * size[1],
                 z = number / across / down * size[2];
  const unsigned threads = request.block[0] * request.block[1] * request.block[2];
  for (unsigned k = 0; k < size[2]; ++k) {
    for (unsigned j = 0; j < size[1]; ++j) {
      for (unsigned i = 0; i < size[0]; ++i) {
        auto block = std::make_unique<Block>();
        block->cluster = cluster.get();
        block->index = {x + i, y + j, z + k};
        block->rank = {i, j, k};
        block->threads = threads;
        block->shared = take_shared(shared_size());
        for (unsigned first = 0; first < threads; first += 32) {
          auto warp = std::make_unique<Warp>();
          warp->block = block.get();
          warp->index = first / 32;
          for (unsigned lane = 0; lane < 32 && first + lane < threads; ++lane) {
            Fiber* fiber = take_fiber().release();
            fiber->warp = warp.get();
            fiber->thread = first + lane;
            fiber->index = {fiber->thread % request.block[0], fiber->thread / request.block[0] % request.block[1],
                            fiber->thread / request.block[0] / request.block[1]};
            fiber->stack_pointer = prepare_stack(fiber->stack, begin_fiber);
            warp->lanes[lane] = fiber;
            warp->exists |= 1u << lane;
          }
          warp->ready = warp->exists;
          warp->place_in_ready = static_cast<int>(machine.ready.size());
          machine.ready.push_back(warp.get());
          block->warps.push_back(std::move(warp));
        }
        cluster->threads += threads;
        cluster->blocks.push_back(std::move(block));
      }
    }
  }
  machine.clusters.push_back(std::move(cluster));
}

void end_cluster(Cluster& cluster) {
  for (const Async& load : cluster.loads) {
    if (!load->is_done && machine.error.empty()) {
      machine.error = "a block ends while copies into its shared memory are in flight";
    }
    load->is_done = true;
  }
  for (const auto& block : cluster.blocks) {
    const std::string problem = give_shared(block->shared, shared_size());
    if (!problem.empty() && machine.error.empty()) {
      machine.error = "block " + std::to_string(block->index.x) + ": " + problem;
    }
    for (const auto& warp : block->warps) {
      if (warp->place_in_ready >= 0) remove_ready(warp.get());
      if (machine.warp == warp.get()) machine.warp = nullptr;
      for (Fiber* fiber : warp->lanes) {
        if (fiber != nullptr) machine.spare.emplace_back(fiber);
      }
    }
  }
}

std::string describe_waits() {
  std::map<std::string, int> kinds;  // what is waited for -> threads
  for (const auto& cluster : machine.clusters) {
    for (const auto& block : cluster->blocks) {
      for (const auto& warp : block->warps) {
        for (Fiber* fiber : warp->lanes) {
          if (fiber == nullptr || fiber->is_finished) continue;
          std::string text = "block " + std::to_string(block->index.x) + " warp " + std::to_string(warp->index) + ": ";
          text += fiber->waits_for == nullptr ? "ready" : fiber->waits_for;
          if (fiber->waits_for != nullptr && std::strncmp(fiber->waits_for, "mbarrier", 8) == 0) {
            const auto* barrier = reinterpret_cast<const char*>(fiber->wait_detail);
            text += " at shared " + std::to_string(barrier - block->shared) + " parity " +
                    std::to_string(fiber->wait_value) + " (" + describe_barrier(barrier) + ")";
          } else if (fiber->waits_for != nullptr) {
            text += " (" + std::to_string(fiber->wait_detail) + ", " + std::to_string(fiber->wait_value) + ")";
          }
          ++kinds[text];
        }
      }
    }
  }
  std::string text = "deadlock: no thread can go on;";
  int lines = 0;
  for (const auto& [what, threads] : kinds) {
    if (++lines > 40) return text + "\n  ...";
    text += "\n  " + what + ", " + std::to_string(threads) + " threads";
  }
  return text;
}

}  // namespace emulated
