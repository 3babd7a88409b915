// The numbers of tasks, handed out one by one so that fast threads take more: nobody waits for a slow core longer than
// one task takes. On machines of several NUMA nodes each node's threads begin with a range of their own, the same for
// every call with as many tasks, so that a thread finds near it what its node wrote in the call before; then they help
// out where numbers are left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernel_pytorch/device/cpu/topology.h"

namespace kernel_pytorch {

class TaskQueue {
 public:
  explicit TaskQueue(int64_t tasks, int nodes = cpu_device::node_count())
      : nodes_(static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(nodes, tasks), 1, kMostNodes))) {
    for (int node = 0; node < nodes_; ++node) {
      ranges_[node].next.store(tasks * node / nodes_, std::memory_order_relaxed);
      ranges_[node].end = tasks * (node + 1) / nodes_;
    }
  }

  // The next number, or -1 when all are taken.
  int64_t take() { return nodes_ == 1 ? take_of(ranges_[0]) : take(cpu_device::current_node()); }
  int64_t take(int node) {
    for (int i = 0; i < nodes_; ++i) {
      const int64_t task = take_of(ranges_[(node + i) % nodes_]);
      if (task >= 0) return task;
    }
    return -1;
  }

  // Nobody gets one of the remaining numbers.
  void drop() {
    for (int node = 0; node < nodes_; ++node) ranges_[node].next.store(ranges_[node].end, std::memory_order_relaxed);
  }

 private:
  static constexpr int kMostNodes = 8;

  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  static int64_t take_of(Range& range) {
    if (range.next.load(std::memory_order_relaxed) >= range.end) return -1;  // spares others the line when it is empty
    const int64_t task = range.next.fetch_add(1, std::memory_order_relaxed);
    return task < range.end ? task : -1;
  }

  int nodes_;
  Range ranges_[kMostNodes];
};

}  // namespace kernel_pytorch
