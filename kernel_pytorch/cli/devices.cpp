// kpt devices: what there is to compute on.

#include "kernel_pytorch/cli/command.h"
#include "kernel_pytorch/cli/format.h"
#include "kernel_pytorch/cli/json_output.h"
#include "kernel_pytorch/cli/terminal.h"
#include "kernel_pytorch/device/device_info.h"

namespace kernel_pytorch::cli {
namespace {

std::string details_of(const DeviceInfo& device) {
  if (device.is_cpu()) {
    return format("{} of {}, {} core{}, L2 {}, L3 {}", name_of(device.cpu.isa), name_of(device.cpu.machine_isa),
                  device.cpu.cores, device.cpu.cores == 1 ? "" : "s", bytes_text(device.cpu.l2_bytes),
                  bytes_text(device.cpu.l3_bytes));
  }
  return format("{}, {} multiprocessors, L2 {}, driver {}.{}", device.cuda.architecture(), device.cuda.multiprocessors,
                bytes_text(device.cuda.l2_bytes), device.cuda.driver_version / 1000,
                device.cuda.driver_version % 1000 / 10);
}

int print_devices(bool json) {
  if (json) {
    print_text(devices_json());
    return kSuccess;
  }
  Table table({"DEVICE", "NAME", ">MEMORY", "DETAILS"});
  for (const DeviceInfo& device : devices()) {
    table.add(
        {{to_string(device.device), Color::kBold}, device.name, bytes_text(device.memory_bytes), details_of(device)});
  }
  print("{}", table.text());
  if (!cuda_absence().empty()) print("  {}\n", paint(Color::kDim, cuda_absence()));
  return kSuccess;
}

}  // namespace

void add_devices(Command root) {
  auto json = std::make_shared<bool>(false);
  root.subcommand("devices", "What there is to compute on").flag("--json", *json, "as JSON").runs([json] {
    return print_devices(*json);
  });
}

}  // namespace kernel_pytorch::cli
