// What of the machine's CPUs this process may use: the affinity mask (cpusets are part of it), the physical cores and
// sockets behind it, slower cores of hybrid machines, NUMA nodes, and the CPU and memory limits of control groups. Read
// from /proc and /sys; a root in front of these paths lets tests describe machines that they do not have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::cpu_device {

struct Topology {
  int cpus = 1;              // logical CPUs in the affinity mask
  int cores = 1;             // physical cores that these belong to
  int threads_per_core = 1;  // of the machine: 2 with SMT on, whatever the mask holds
  int slow_cores = 0;        // of `cores`: efficiency cores (Intel hybrid), cores of less capacity (arm64)
  int sockets = 1;
  std::vector<std::vector<int>> nodes;  // CPUs of the mask by NUMA node; none without such information
  double quota = 0;                     // CPUs' worth of time that control groups allow; 0: no limit
  std::string quota_file;               // which said so, without the root
  int64_t memory_limit = 0;             // bytes that control groups allow; 0: no limit
  std::string memory_file;

  // One per physical core, as torch starts, and no more than the quota, rounded up: a last thread uses the fraction.
  KP_EXPORT int threads() const;
};

// Logical CPUs in the affinity mask of the calling thread.
KP_EXPORT std::vector<int> allowed_cpus();

KP_EXPORT Topology read_topology(const std::vector<int>& allowed, const std::string& root = "");

// Of this process, read once.
KP_EXPORT const Topology& topology();

// How many NUMA nodes the process may run on, and the index in Topology::nodes of the one that the calling thread runs
// on now; 0 where it cannot be known. Cheap: asked for every task.
KP_EXPORT int node_count();
KP_EXPORT int current_node();

// "0-3,8" as numbers; what is no such list ends it.
KP_EXPORT std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace kernel_pytorch::cpu_device
