// Finds libcuda, or libamdhip64 where the option asks for it, once per process. After a fork the driver is dead in the
// child; error_text says so.
#include "kernel_pytorch/device/cuda/driver_table.h"

#include <dlfcn.h>
#include <unistd.h>

#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cuda/hip_driver.h"

namespace kernel_pytorch::cuda_device {
namespace {

constexpr int kOldestDriver = 12000;  // cuLibraryLoadData and cuLaunchKernelEx

struct LoadedDriver {
  DriverTable table;
  std::string absence;  // empty when the table is usable
  pid_t process = 0;    // that called cuInit
};

std::string version_text(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

// Fills the table; returns the first symbol that is missing.
const char* resolve(void* library, DriverTable& table) {
  const char* missing = nullptr;
#define KP_DRIVER_RESOLVE(member, symbol, hip_symbol, parameters)                  \
  table.member = reinterpret_cast<decltype(table.member)>(dlsym(library, symbol)); \
  if (table.member == nullptr && missing == nullptr) missing = symbol;
  KP_DRIVER_FUNCTIONS(KP_DRIVER_RESOLVE)
#undef KP_DRIVER_RESOLVE
  table.function_load = reinterpret_cast<decltype(table.function_load)>(dlsym(library, "cuFuncLoad"));
  return missing;
}

std::string describe(const DriverTable& table, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (table.error_name == nullptr || table.error_name(result, &name) != kSuccess || name == nullptr) {
    return concat("driver error ", result);
  }
  if (table.error_string(result, &text) != kSuccess || text == nullptr) return name;
  return concat(name, " (", text, ")");
}

LoadedDriver load_hip() {
  LoadedDriver loaded;
  void* library = open_hip();
  if (library == nullptr) {
    loaded.absence = "no AMD GPU: libamdhip64 not found (KERNEL_PYTORCH_AMD=1, and no ROCm on this machine)";
    return loaded;
  }
  if (const char* missing = resolve_hip(library, loaded.table)) {
    loaded.absence = concat("no AMD GPU: libamdhip64 has no ", missing, "; ROCm 5.2 or later is needed");
    return loaded;
  }
  loaded.table.driver_version(&loaded.table.version);
  loaded.process = getpid();
  if (const Result result = loaded.table.init(0); result != kSuccess) {
    loaded.absence = concat("no AMD GPU: hipInit: ", describe(loaded.table, result));
  }
  return loaded;
}

LoadedDriver load_cuda() {
  LoadedDriver loaded;
  void* library = nullptr;
  // The second is where WSL keeps it without telling the loader.
  for (const char* name : {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    loaded.absence = "no CUDA device: libcuda.so.1 not found (no NVIDIA driver on this machine)";
    return loaded;
  }
  const char* missing = resolve(library, loaded.table);
  if (loaded.table.driver_version != nullptr) loaded.table.driver_version(&loaded.table.version);
  if (missing != nullptr || loaded.table.version < kOldestDriver) {
    loaded.absence = concat("no CUDA device: the NVIDIA driver speaks CUDA ", version_text(loaded.table.version),
                            missing != nullptr ? concat(" without ", missing) : std::string(), "; ",
                            version_text(kOldestDriver), " or later is needed: update the driver");
    return loaded;
  }
  loaded.process = getpid();
  if (const Result result = loaded.table.init(0); result != kSuccess) {
    loaded.absence = concat("no CUDA device: cuInit: ", describe(loaded.table, result));
  }
  return loaded;
}

const LoadedDriver& loaded_driver() {
  static const LoadedDriver* loaded =
      new LoadedDriver(options().amd ? load_hip() : load_cuda());  // kept: kernels may run while the process ends
  return *loaded;
}

}  // namespace

const DriverTable* driver() {
  const LoadedDriver& loaded = loaded_driver();
  return loaded.absence.empty() ? &loaded.table : nullptr;
}

const std::string& driver_absence() {
  return loaded_driver().absence;
}

const DriverTable& require_driver() {
  const DriverTable* table = driver();
  if (table == nullptr) [[unlikely]]
    fail(ErrorCode::kDevice, driver_absence());
  return *table;
}

std::string error_text(Result result) {
  const LoadedDriver& loaded = loaded_driver();
  std::string text = describe(loaded.table, result);
  if (loaded.process != 0 && loaded.process != getpid()) {
    text +=
        "; the GPU's driver was started before this process was forked and cannot work in the child: start workers "
        "with spawn, or use the GPU in the child only";
  }
  return text;
}

RelaxedCapture::RelaxedCapture(const DriverTable& driver) : driver_(driver) {
  check(driver_.exchange_capture_mode(&mode_), "cuda: allowing calls beside a capture");
}

RelaxedCapture::~RelaxedCapture() {
  driver_.exchange_capture_mode(&mode_);
}

}  // namespace kernel_pytorch::cuda_device
