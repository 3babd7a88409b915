// Which device a tensor lives on. What a device is capable of is device/device_info.h's business.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "kernel_pytorch/base/export.h"

namespace kernel_pytorch {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int16_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

KP_EXPORT std::string to_string(Device device);                       // "cpu", "cuda:0"
KP_EXPORT std::optional<Device> parse_device(std::string_view text);  // "cpu", "cuda", "cuda:3"

inline std::ostream& operator<<(std::ostream& out, Device device) {
  return out << to_string(device);
}

}  // namespace kernel_pytorch
