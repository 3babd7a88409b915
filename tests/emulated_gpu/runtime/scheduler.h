// The state of the launch that runs, for the scheduler and for what starts and ends clusters.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {

struct Machine {
  const LaunchRequest* request = nullptr;
  void** arguments = nullptr;
  void* scheduler_stack = nullptr;
  std::vector<Warp*> ready;
  Warp* warp = nullptr;  // whose lanes run at present
  std::vector<Fiber*> spinning;
  std::vector<Async> in_flight;
  std::vector<std::unique_ptr<Cluster>> clusters;
  bool has_finished_cluster = false;
  uint64_t progress = 0;  // counts what could let a spinning fiber go on
  std::string error;
  uint64_t random = 1;
  std::vector<std::unique_ptr<Fiber>> spare;
};
extern Machine machine;

void remove_ready(Warp* warp);
void begin_fiber();  // what a fiber runs; never returns
// Makes the fibers of a cluster, by its number in the grid, and takes them back.
void start_cluster(uint64_t number);
void end_cluster(Cluster& cluster);
// Why no thread can go on: what each warp waits for.
std::string describe_waits();

}  // namespace emulated
