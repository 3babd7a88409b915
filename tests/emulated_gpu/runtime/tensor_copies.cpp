// cp.async.bulk.tensor: boxes of a tensor, swizzled in shared memory; the map's 128 bytes are ours to lay out.
#include "tests/emulated_gpu/runtime/tensor_map.h"

#include <cstring>

#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {

void load_later(unsigned barrier, Block& block, unsigned bytes, std::function<void()> copy);
void store_later(std::function<void()> copy);

namespace {

TensorMap read_map(const void* address, int rank) {
  TensorMap map;
  std::memcpy(&map, address, sizeof(map));
  if (map.mark != kTensorMapMark) fail("a tensor copy by what is no tensor map");
  if (static_cast<int>(map.rank) != rank)
    fail("a tensor copy of rank " + std::to_string(rank) + " by a map of rank " + std::to_string(map.rank));
  return map;
}

unsigned box_bytes(const TensorMap& map) {
  unsigned bytes = map.element_bytes;
  for (unsigned i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}

// The bits of the 16-byte unit are crossed with those of the row, by address: 128-byte rows with three, 64-byte with
// two.
unsigned swizzled(unsigned offset, unsigned swizzle_bytes) {
  const unsigned mask = swizzle_bytes / 16 - 1;
  return offset ^ (offset >> 7 & mask) << 4;
}

struct Corner {
  int at[5];
};

// Calls act(global, shared offset, bytes) for each run of the box along the first dimension; global is null outside.
template <class Act>
void walk(const TensorMap& map, const Corner& corner, unsigned shared_offset, Act act) {
  unsigned index[5] = {};
  const unsigned run_bytes = map.box[0] * map.element_bytes;
  for (unsigned offset = 0;; offset += run_bytes) {
    bool inside = true;
    uint64_t address = map.address;
    for (unsigned i = 1; i < map.rank; ++i) {
      const int64_t at = int64_t{corner.at[i]} + index[i];
      inside = inside && at >= 0 && at < static_cast<int64_t>(map.sizes[i]);
      address += static_cast<uint64_t>(at) * map.strides[i - 1];
    }
    for (unsigned element = 0; element < map.box[0]; ++element) {
      const int64_t at = int64_t{corner.at[0]} + element;
      const bool is_there = inside && at >= 0 && at < static_cast<int64_t>(map.sizes[0]);
      char* global =
          is_there ? reinterpret_cast<char*>(address + static_cast<uint64_t>(at) * map.element_bytes) : nullptr;
      act(global, swizzled(shared_offset + offset + element * map.element_bytes, map.swizzle_bytes), map.element_bytes);
    }
    unsigned i = 1;
    while (i < map.rank && ++index[i] == map.box[i]) index[i++] = 0;
    if (i >= map.rank) return;
  }
}

void check_place(const TensorMap& map, unsigned address) {
  shared_pointer(address, box_bytes(map), 128);
}

}  // namespace
}  // namespace emulated

using namespace emulated;

extern "C" {

void emulated_tensor_load(unsigned destination, const void* map_address, int rank, const int* coordinates,
                          unsigned barrier, unsigned blocks) {
  const TensorMap map = read_map(map_address, rank);
  check_place(map, destination);
  Corner corner{};
  std::memcpy(corner.at, coordinates, sizeof(int) * static_cast<size_t>(rank));
  const unsigned offset = destination & ((1u << kRankShift) - 1);
  const auto copy_to = [&](Block& block) {
    char* shared = block.shared;
    load_later(barrier, block, box_bytes(map), [=] {
      walk(map, corner, offset, [&](const char* global, unsigned place, unsigned bytes) {
        if (global != nullptr) {
          std::memcpy(shared + place, global, bytes);
        } else {
          std::memset(shared + place, 0, bytes);
        }
      });
    });
  };
  if (blocks == 0) {
    copy_to(block_of(destination));
    return;
  }
  auto& all = current_block().cluster->blocks;
  for (unsigned rank_of = 0; rank_of < 16; ++rank_of) {
    if ((blocks >> rank_of & 1) == 0) continue;
    if (rank_of >= all.size())
      fail("a multicast to block " + std::to_string(rank_of) + " of a cluster of " + std::to_string(all.size()));
    copy_to(block_of((rank_of + 1) << kRankShift | offset));
  }
}

void emulated_tensor_store(const void* map_address, int rank, const int* coordinates, unsigned source) {
  const TensorMap map = read_map(map_address, rank);
  check_place(map, source);
  Corner corner{};
  std::memcpy(corner.at, coordinates, sizeof(int) * static_cast<size_t>(rank));
  const char* shared = current_block().shared;
  store_later([=] {
    walk(map, corner, source & ((1u << kRankShift) - 1), [&](char* global, unsigned place, unsigned bytes) {
      if (global != nullptr) std::memcpy(global, shared + place, bytes);
    });
  });
}
}
