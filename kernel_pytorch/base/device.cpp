#include "kernel_pytorch/base/device.h"

#include <charconv>

namespace kernel_pytorch {

std::string to_string(Device device) {
  return device.kind == DeviceKind::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::optional<Device> parse_device(std::string_view text) {
  if (text == "cpu") return Device{};
  constexpr std::string_view kCuda = "cuda";
  if (!text.starts_with(kCuda)) return std::nullopt;
  text.remove_prefix(kCuda.size());
  if (text.empty()) return Device{DeviceKind::kCuda, 0};
  if (text.front() != ':') return std::nullopt;
  text.remove_prefix(1);
  int16_t index = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc() || end != text.data() + text.size() || index < 0) return std::nullopt;
  return Device{DeviceKind::kCuda, index};
}

}  // namespace kernel_pytorch
