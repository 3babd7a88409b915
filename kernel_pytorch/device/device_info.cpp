#include "kernel_pytorch/device/device_info.h"

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cpu/cpu_info.h"
#include "kernel_pytorch/device/cuda/driver.h"

namespace kernel_pytorch {
namespace {

std::string bytes_text(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return concat(bytes >> 30, " GiB");
  if (bytes >= int64_t{1} << 20 && bytes % (1 << 20) == 0) return concat(bytes >> 20, " MiB");
  return concat(bytes >> 10, " KiB");
}

// What a measurement depends on and nothing that changes by itself: no clocks, no free memory, no index.
void set_fingerprint(DeviceInfo& info) {
  const CpuInfo& cpu = info.cpu;
  info.fingerprint = concat(info.name, "|", name_of(cpu.isa), "|L1 ", bytes_text(cpu.l1_data_bytes), " L2 ",
                            bytes_text(cpu.l2_bytes), " L3 ", bytes_text(cpu.l3_bytes), "|", cpu.cores, " cores");
  info.fingerprint_hash = hash_text(info.fingerprint);
}

// Apart from the CUDA devices: asking for the CPU must not start the CUDA driver, which costs time and forbids fork().
const DeviceInfo& cpu_info() {
  static const DeviceInfo* info = [] {
    auto* found = new DeviceInfo(cpu_device::detect());
    set_fingerprint(*found);
    return found;
  }();
  return *info;
}

struct Found {
  std::vector<DeviceInfo> devices;
  std::string cuda_absence;
};

Found find_devices() {
  Found found;
  found.devices.push_back(cpu_info());
  if (options().disable_cuda) {
    found.cuda_absence = "no CUDA device: turned off by KERNEL_PYTORCH_DISABLE_CUDA=1";
    return found;
  }
  for (DeviceInfo& info : cuda_device::detect(found.cuda_absence)) {
    info.cpu = cpu_info().cpu;
    found.devices.push_back(std::move(info));
  }
  return found;
}

const Found& found_devices() {
  static const Found* found = new Found(find_devices());
  return *found;
}

}  // namespace

std::string_view name_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kX86V2:
      return "v2";
    case CpuIsa::kX86V3:
      return "v3";
    case CpuIsa::kX86V4:
      return "v4";
    case CpuIsa::kX86V4Bf16:
      return "v4bf16";
    case CpuIsa::kX86V4Amx:
      return "v4amx";
    case CpuIsa::kNeon:
      return "neon";
    case CpuIsa::kNeonDot:
      return "neondot";
    case CpuIsa::kNeonBf16:
      return "neonbf16";
    case CpuIsa::kSve256:
      return "sve256";
  }
  return "unknown";
}

const std::vector<DeviceInfo>& devices() {
  return found_devices().devices;
}

const std::string& cuda_absence() {
  return found_devices().cuda_absence;
}

const DeviceInfo& device_info(Device device) {
  if (device == Device{}) return cpu_info();
  const std::vector<DeviceInfo>& all = devices();
  for (const DeviceInfo& info : all) {
    if (info.device == device) return info;
  }
  if (device.kind == DeviceKind::kCuda && all.size() == 1)
    fail(ErrorCode::kDevice, "device ", device, ": ", cuda_absence());
  fail(ErrorCode::kDevice, "device ", device, " is not there: this machine has cpu and ", all.size() - 1,
       " CUDA device(s), counted from cuda:0");
}

}  // namespace kernel_pytorch
