// Copies between global and shared memory. Each lands as early or as late as its rules allow, by the seed: cp.async at
// once or when its group is awaited, the copy engine's at a random moment.
#include <cstring>

#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {
namespace {

void make(CpAsync& copy) {
  if (copy.is_done) return;
  copy.is_done = true;
  char* target = shared_pointer(copy.destination, copy.bytes, copy.bytes);
  if (copy.source_bytes > 0) std::memcpy(target, copy.source, copy.source_bytes);
  std::memset(target + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void finish_copies(Fiber& fiber, size_t count) {
  for (size_t i = 0; i < count; ++i) make(fiber.copies[i]);
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<long>(count));
}

// A fault has to name the thread that asks, not whoever runs when the copy is made.
void touch(const void* source, size_t bytes) {
  if (bytes == 0) return;
  const volatile char* at = static_cast<const char*>(source);
  (void)at[0];
  (void)at[bytes - 1];
}

void require_aligned(const void* pointer, unsigned bytes, unsigned alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0 || bytes % alignment != 0) {
    fail(std::string(what) + ": address or size is no multiple of " + std::to_string(alignment));
  }
}

}  // namespace

unsigned own_rank() {
  const auto& rank = current_block().rank;
  return rank.x + emulated_cluster_size.x * (rank.y + emulated_cluster_size.y * rank.z);
}

Block& block_of(unsigned address) {
  const unsigned rank = address >> kRankShift;
  Block& own = current_block();
  if (rank == 0) return own;
  Cluster& cluster = *own.cluster;
  if (rank > cluster.blocks.size()) fail("a shared address of block " + std::to_string(rank - 1) + " of the cluster");
  Block& block = *cluster.blocks[rank - 1];
  if (block.finished == block.threads) fail("shared memory of a block of the cluster that has ended");
  return block;
}

char* shared_pointer(unsigned address, unsigned bytes, unsigned alignment, bool own) {
  const unsigned offset = address & ((1u << kRankShift) - 1);
  if (address % alignment != 0) {
    fail("shared address " + std::to_string(offset) + " is no multiple of " + std::to_string(alignment));
  }
  if (offset < kSharedStart || offset + bytes > shared_size()) {
    fail("shared address " + std::to_string(offset) + ", " + std::to_string(bytes) + " bytes: the block has " +
         std::to_string(shared_size()) + " (from " + std::to_string(kSharedStart) + " on)");
  }
  Block& block = block_of(address);
  if (own && &block != &current_block()) fail("an instruction of the own block with another block's shared address");
  return block.shared + offset;
}

void load_later(unsigned barrier, Block& block, unsigned bytes, std::function<void()> copy) {
  shared_pointer(barrier, 8, 8);
  Block* target = &block;
  auto operation = std::make_shared<AsyncOperation>();
  operation->act = [=] {
    copy();
    complete_bytes(barrier, *target, bytes);
  };
  auto& loads = block.cluster->loads;
  std::erase_if(loads, [](const Async& load) { return load->is_done; });
  loads.push_back(operation);
  add_async(operation);
}

void store_later(std::function<void()> copy) {
  auto operation = std::make_shared<AsyncOperation>();
  operation->act = std::move(copy);
  current->open_stores.push_back(operation);
  add_async(operation);
}

}  // namespace emulated

using namespace emulated;

extern "C" {

unsigned emulated_shared_address(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - emulated_shared_memory;
  if (offset < 0 || offset > static_cast<long>(shared_size()))
    fail("a shared address of a pointer that is not to shared memory");
  return static_cast<unsigned>(offset);
}

void* emulated_shared_pointer(unsigned address, unsigned bytes) {
  return shared_pointer(address, bytes, bytes);
}

unsigned emulated_map_shared(unsigned address, unsigned rank) {
  if (rank >= current_block().cluster->blocks.size()) fail("mapa of block " + std::to_string(rank) + " of the cluster");
  return (address & ((1u << kRankShift) - 1)) | (rank + 1) << kRankShift;
}

void emulated_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned source_bytes) {
  if (source_bytes > bytes) fail("cp.async of more source bytes than it writes");
  shared_pointer(destination, bytes, bytes, true);
  if (source_bytes > 0) require_aligned(source, bytes, bytes, "cp.async");
  touch(source, source_bytes);
  Fiber& fiber = *current;
  fiber.copies.push_back({destination, source, bytes, source_bytes, false});
  ++fiber.open_copies;
  if (chance(2)) make(fiber.copies.back());
}

void emulated_cp_async_commit(void) {
  current->copy_groups.push_back(current->open_copies);
  current->open_copies = 0;
}

void emulated_cp_async_wait(int pending) {
  Fiber& fiber = *current;
  while (static_cast<int>(fiber.copy_groups.size()) > pending) {
    finish_copies(fiber, fiber.copy_groups.front());
    fiber.copy_groups.pop_front();
  }
}

void emulated_cp_async_mbarrier_arrive(unsigned barrier) {
  Fiber& fiber = *current;
  finish_copies(fiber, fiber.copies.size());
  for (size_t& group : fiber.copy_groups) group = 0;
  fiber.open_copies = 0;
  emulated_mbarrier_arrive(barrier, 0);
}

void emulated_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  require_aligned(source, bytes, 16, "cp.async.bulk");
  shared_pointer(destination, bytes, 16);
  touch(source, bytes);
  Block& block = block_of(destination);
  char* target = block.shared + (destination & ((1u << kRankShift) - 1));
  load_later(barrier, block, bytes, [=] { std::memcpy(target, source, bytes); });
}

void emulated_bulk_store(void* destination, unsigned source, unsigned bytes) {
  require_aligned(destination, bytes, 16, "cp.async.bulk");
  const char* from = shared_pointer(source, bytes, 16, true);
  touch(destination, bytes);
  store_later([=] { std::memcpy(destination, from, bytes); });
}

void emulated_bulk_commit(void) {
  Fiber& fiber = *current;
  fiber.store_groups.push_back(std::move(fiber.open_stores));
  fiber.open_stores.clear();
}

void emulated_bulk_wait(int pending) {
  Fiber& fiber = *current;
  while (static_cast<int>(fiber.store_groups.size()) > pending) {
    for (const Async& store : fiber.store_groups.front()) {
      if (store->is_done) continue;
      store->is_done = true;
      store->act();
    }
    fiber.store_groups.pop_front();
  }
}

void emulated_store_async(unsigned address, const void* value, unsigned bytes, unsigned barrier) {
  char* target = shared_pointer(address, bytes, bytes);
  Block& block = block_of(address);
  if (&block_of(barrier) != &block) fail("st.async: value and mbarrier are in different blocks");
  uint64_t words[2] = {};
  std::memcpy(words, value, bytes);
  load_later(barrier, block, bytes, [=] { std::memcpy(target, words, bytes); });
}
}
