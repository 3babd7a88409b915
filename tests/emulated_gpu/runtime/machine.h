// The emulated GPU: every CUDA thread is a fiber; one operating system thread runs them all, one at a time. A fiber
// runs until it meets others (barrier, warp collective, wait); which one runs next is random by a seed, so a missing
// barrier shows as a wrong result. Memory is therefore sequentially consistent: missing fences do not show.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/emulated_gpu/device/interface.h"

namespace emulated {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr unsigned kSharedStart = 1024;  // the first addresses of the window belong to the system, as on sm_90
constexpr unsigned kRankShift = 20;      // address of block r of the cluster: (r + 1) << kRankShift | offset
constexpr int kNamedBarriers = 16;

struct Block;
struct Warp;
struct Fiber;

// A copy that the copy engine may make at any time until someone waits for it.
struct AsyncOperation {
  std::function<void()> act;
  bool is_done = false;
};
using Async = std::shared_ptr<AsyncOperation>;

struct CpAsync {
  unsigned destination;
  const void* source;
  unsigned bytes, source_bytes;
  bool is_done;
};

// A wgmma of one warp between its issue and its wait.
struct PendingWgmma;

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Warp* warp = nullptr;
  unsigned thread = 0;
  EmulatedIndex index{};
  const char* waits_for = nullptr;  // null while it runs or is ready
  uint64_t wait_detail = 0, wait_value = 0;
  const void* operand = nullptr;  // of the warp collective that it has come to
  bool is_finished = false;
  bool is_in_cluster_barrier = false;
  unsigned cluster_phase = 0;
  std::vector<CpAsync> copies;     // cp.async, oldest first
  std::deque<size_t> copy_groups;  // how many copies each committed group has
  size_t open_copies = 0;
  size_t issued_products = 0;      // wgmma
  std::vector<Async> open_stores;  // bulk stores that are not committed
  std::deque<std::vector<Async>> store_groups;
};

struct Collective {
  unsigned mask;
  const void* kind;
  unsigned arrived;
  bool (*act)(Warp&, unsigned mask);
};

struct Warp {
  Warp();
  ~Warp();  // where PendingWgmma is known
  Block* block = nullptr;
  unsigned index = 0;
  unsigned ready = 0, finished = 0, exists = 0;
  int place_in_ready = -1;
  Fiber* lanes[32] = {};
  std::vector<Collective> collectives;
  std::deque<std::unique_ptr<PendingWgmma>> products;  // issued, oldest first
  std::vector<std::unique_ptr<PendingWgmma>> spare_products;
  size_t retired_products = 0;
  std::deque<size_t> product_groups;
  size_t open_products = 0;
};

struct NamedBarrier {
  unsigned arrived = 0, expected = 0;  // expected 0: every thread of the block
  unsigned count_true = 0;
  std::vector<Fiber*> waiting;
};

struct Cluster;
struct Block {
  Cluster* cluster = nullptr;
  EmulatedIndex index{}, rank{};
  char* shared = nullptr;
  unsigned threads = 0, finished = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier barriers[kNamedBarriers];
  int barrier_result = 0;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  unsigned threads = 0, finished = 0;
  unsigned arrived = 0;  // at the cluster's barrier, in this phase
  unsigned phase = 0;
  std::vector<Fiber*> waiting;
  std::vector<Async> loads;  // that write its shared memory
};

struct LaunchRequest {
  const EmulatedKernel* kernel;
  std::string name;
  unsigned grid[3], block[3], cluster[3];
  unsigned shared_bytes;
  std::vector<std::vector<char>> arguments;
};

// Runs all blocks; returns what went wrong, or nothing.
std::string run_launch(const LaunchRequest& request);

// --- for the instructions
extern Fiber* current;
inline Block& current_block() {
  return *current->warp->block;
}
uint64_t random_number();
inline bool chance(unsigned of) {
  return random_number() % of == 0;
}
// Ends the launch with a message that names kernel, block and thread.
[[noreturn]] void fail(const std::string& message);
// Its first half: keeps the message, which fail() does not replace.
void note_fault(const std::string& message);
// Parks the fiber that runs until make_ready.
void wait_here(const char* what, uint64_t detail = 0, uint64_t value = 0);
void make_ready(Fiber* fiber);
void yield_ready();
void add_async(const Async& operation);
// The fibers that wait for an mbarrier's phase look again.
void wake_mbarrier(const void* barrier);
// Exits count as arrivals.
void finish_in_warp(Fiber* fiber);
void finish_in_block(Fiber* fiber);
void finish_in_cluster(Fiber* fiber);
// The operands of a warp's lanes meet; the last of the mask acts for all.
void meet(unsigned mask, const char* kind, const void* operand, bool (*act)(Warp&, unsigned mask));
// Checked pointer into shared memory of a block of the running cluster.
char* shared_pointer(unsigned address, unsigned bytes, unsigned alignment, bool own = false);
// The block whose shared memory an address names.
Block& block_of(unsigned address);
unsigned shared_size();
void complete_bytes(unsigned barrier, Block& own, unsigned bytes);
std::string describe_barrier(const void* barrier);
std::string kernel_name();

inline constexpr int kAmd = 0;  // EMULATED_GPU_CAPABILITY=gfx90a
struct Settings {
  int capability;  // 90; kAmd
  int multiprocessors;
  uint64_t seed;
};
const Settings& settings();
int shared_limit();

}  // namespace emulated
