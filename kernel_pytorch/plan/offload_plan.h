// How an optimizer whose states are in the host's memory shares a step between the CPU and a device. Subgroups of
// parameters are updated either where their states are, by the CPU, which is sent gradients and sends weights back, or
// by the device, which is sent the states and sends them back. Both ways run at once and meet in the link and in the
// host's memory:
//
//   seconds(f) >= elements * max(f / device, (1 - f) / cpu, [f * device bytes + (1 - f) * cpu bytes] / rate)
//
// for a share f of the elements on the device, the last term for each direction of the link and for the host's memory.
// The largest of lines is least at an end or where two of them cross.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch::plan {

// What a step has by the second: bytes of the link both ways at once and of the host's memory while the link works,
// elements of each processor by itself.
struct OffloadRates {
  double up = 0, down = 0, host_memory = 0;
  double cpu = 0, device = 0;
};
// Bytes per element of one way; the host's memory counts what the link and the CPU read and write there.
struct OffloadBytes {
  double up = 0, down = 0, host_memory = 0;
};
struct OffloadRequest {
  double elements = 0;
  double subgroup_elements = 0;
  OffloadRates rates{};
  OffloadBytes on_device{}, on_cpu{};
  double device_share = -1;  // 0 to 1: given; below 0: chosen
};

inline constexpr std::array<std::string_view, 5> kOffloadLimits = {"up", "down", "host_memory", "cpu", "device"};

struct OffloadPlan {
  int64_t subgroups = 0;
  int64_t on_device = 0;         // of the subgroups
  double bound_seconds = 0;      // of the best share, or of the given one
  double bound_share = 0;        // on the device, of that bound
  double predicted_seconds = 0;  // with the first and the last subgroup's way, which nothing hides
  std::string_view limit{};      // what decides at the planned share, of kOffloadLimits
  std::string reason{};
};

KP_EXPORT OffloadPlan plan_offload(const OffloadRequest& request);

}  // namespace kernel_pytorch::plan
