// What the host sides of CPU kernels share: the reasons for which a kernel passes, outputs stored past the caches or
// into them as the two configs of a kernel, the size of a task, and where a row begins.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernel_pytorch/base/config_fields.h"
#include "kernel_pytorch/base/rows.h"
#include "kernel_pytorch/base/tensor_view.h"
#include "kernel_pytorch/registry/kernel.h"

namespace kernel_pytorch {

inline constexpr const char* kNeedsCpu = "runs on the CPU only";
inline constexpr const char* kNeedsSingle = "takes fp32, bf16 and fp16; fp64 runs by the reference";
inline constexpr const char* kNeedsDenseColumns = "columns are not contiguous; call contiguous() first for speed";

// fp32, bf16 and fp16, in the order of the tables that a level defines; -1 for others.
constexpr int cpu_type_index(DType dtype) {
  return dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 1 : dtype == DType::kFloat16 ? 2 : -1;
}

// Null, or why no CPU kernel takes this device, or tensors of this type.
inline const char* cpu_obstacle(const DeviceInfo& device) {
  return device.is_cpu() ? nullptr : kNeedsCpu;
}
inline const char* cpu_obstacle(DType dtype, const DeviceInfo& device) {
  if (!device.is_cpu()) return kNeedsCpu;
  return cpu_type_index(dtype) < 0 ? kNeedsSingle : nullptr;
}
inline const char* strided_obstacle(std::initializer_list<const TensorView*> views) {  // absent ones are none
  for (const TensorView* view : views) {
    if (view->is_present() && columns_of(*view) > 1 && view->stride(-1) != 1) return kNeedsDenseColumns;
  }
  return nullptr;
}
inline const char* cpu_obstacle(DType dtype, const DeviceInfo& device, std::initializer_list<const TensorView*> views) {
  const char* obstacle = cpu_obstacle(dtype, device);
  return obstacle != nullptr ? obstacle : strided_obstacle(views);
}
// `supports` of a reference, and of kernels that take every problem as it does.
template <class Problem>
registry::Support supports_on_cpu(const Problem&, const DeviceInfo& device) {
  return registry::Support::unless(cpu_obstacle(device));
}

enum class Stores : uint8_t { kStream, kCached };
struct StoreConfig {
  Stores stores = Stores::kStream;
};
inline constexpr auto kStoreConfigFields =
    config_fields<StoreConfig>(config_field<&StoreConfig::stores>("stream cached"));
constexpr ConfigFields fields_of(const StoreConfig&) {
  return kStoreConfigFields;
}
inline constexpr int kStreamStores = 0, kCachedStores = 1;
inline constexpr StoreConfig kStoreConfigs[] = {
    {.stores =
         Stores::kStream},  // 1.7 to 2x where the output does not fit the caches (1024x4096 fp32, two AVX-512 cores)
    {.stores = Stores::kCached},
};
inline std::vector<std::string> store_configs() {
  return config_texts(kStoreConfigs);
}
// Measured equal at 2 MB when the next op reads the output, ahead at 16 MB.
inline constexpr int64_t kStreamFromBytes = 4 << 20;
// Bytes of the main input per task: enough to hide the atomic, few enough to balance. Kernels that prefetch their next
// row use device/task_size.h.
inline constexpr int64_t kTaskBytes = 128 << 10;

// Whether every row of a contiguous output begins and ends with a cache line, as stores past the caches ask.
inline bool rows_are_aligned(const TensorView& contiguous) {
  return is_aligned(contiguous, kLineBytes) && columns_of(contiguous) * size_of(contiguous.dtype) % kLineBytes == 0;
}

inline void* row_start(const TensorView& view, int64_t row) {  // null for an absent view
  return view.is_present() ? static_cast<char*>(view.data) + row_offset(view, row) * size_of(view.dtype) : nullptr;
}

}  // namespace kernel_pytorch
