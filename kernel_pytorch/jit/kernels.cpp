// Functions ready to launch, remembered for the process: a warm get_kernel is a lookup under a shared lock. Modules are
// loaded once for all devices of an architecture; functions are made ready on each device at its first request, so that
// a first launch inside a capture loads nothing.
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/device/cuda/capability.h"
#include "kernel_pytorch/device/cuda/driver.h"
#include "kernel_pytorch/device/cuda/paper.h"
#include "kernel_pytorch/device/rehearsal.h"
#include "kernel_pytorch/jit/cubin_cache.h"
#include "kernel_pytorch/jit/jit.h"

namespace kernel_pytorch::jit {
namespace {

// A table whose slots are found under a shared lock and filled under a lock of their own.
template <class Key, class Slot, class Hash, class Equal>
class SlotTable {
 public:
  template <class Lookup>
  Slot& find_or_add(const Lookup& lookup) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = slots_.find(lookup); found != slots_.end()) return *found->second;
    }
    const std::unique_lock lock(mutex_);
    std::unique_ptr<Slot>& slot = slots_[Key(lookup)];
    if (slot == nullptr) slot = std::make_unique<Slot>();
    return *slot;
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<Slot>, Hash, Equal> slots_;
};

struct KernelLookup {
  std::string_view source;
  std::string_view entry;
  std::string_view generated;
  int device_index;
};

struct KernelKey {
  explicit KernelKey(const KernelLookup& lookup)
      : source(lookup.source), entry(lookup.entry), generated(lookup.generated), device_index(lookup.device_index) {}
  operator KernelLookup() const { return {source, entry, generated, device_index}; }
  std::string source;
  std::string entry;
  std::string generated;
  int device_index;
};

struct KernelHash {
  using is_transparent = void;
  size_t operator()(const KernelLookup& key) const {
    const std::hash<std::string_view> text;
    HashMixer mixer;
    mixer.add(text(key.entry));
    mixer.add(text(key.source));
    if (!key.generated.empty()) mixer.add(text(key.generated));
    mixer.add(static_cast<uint64_t>(key.device_index));
    return mixer.value();
  }
};

struct KernelEqual {
  using is_transparent = void;
  bool operator()(const KernelLookup& a, const KernelLookup& b) const {
    return a.device_index == b.device_index && a.entry == b.entry && a.source == b.source && a.generated == b.generated;
  }
};

struct KernelSlot {
  std::mutex mutex;
  std::atomic<CUkern_st*> kernel{nullptr};
};

struct ModuleSlot {
  std::mutex mutex;
  std::unique_ptr<const cuda_device::Module> module;
  CUkern_st* kernel = nullptr;
};

using KernelTable = SlotTable<KernelKey, KernelSlot, KernelHash, KernelEqual>;
using ModuleTable = SlotTable<std::string, ModuleSlot, std::hash<std::string>, std::equal_to<std::string>>;

CUkern_st* load_kernel(const DeviceCode& code, const std::string& architecture) {
  static ModuleTable* modules = new ModuleTable;
  ModuleSlot& slot = modules->find_or_add(content_key(code, architecture));
  const std::lock_guard lock(slot.mutex);
  if (slot.kernel != nullptr) return slot.kernel;
  const CubinFile file = obtain_cubin(code, architecture);
  auto module = std::make_unique<const cuda_device::Module>(file.cubin, code.entry);
  slot.kernel = module->kernel(file.lowered_name);
  slot.module = std::move(module);
  return slot.kernel;
}

std::string architecture_on(const DeviceCode& code, const DeviceInfo& device) {
  if (device.is_amd()) return device.cuda.gfx;
  if (pretended_capability() == 0) return architecture_for(code, device.cuda.capability());
  const CompileTarget target = compile_target(pretended_capability(), actual_capability(device));
  return target.as_ptx ? concat("compute_", target.capability) : architecture_for(code, target.capability);
}

}  // namespace

CUkern_st* get_kernel(const DeviceCode& code, const DeviceInfo& device, void* stream) {
  if (auto* paper = cuda_device::PaperLaunches::current()) return paper->load(code);
  static KernelTable* kernels = new KernelTable;
  KernelSlot& slot = kernels->find_or_add(KernelLookup{code.source, code.entry, code.generated, device.device.index});
  if (CUkern_st* kernel = slot.kernel.load(std::memory_order_acquire)) return kernel;
  const std::lock_guard lock(slot.mutex);
  if (CUkern_st* kernel = slot.kernel.load(std::memory_order_acquire)) return kernel;
  if (cuda_device::is_capturing(stream) && !Rehearsal::is_running()) {
    KP_LOG(kInfo, "jit: loading ", code.entry, " while a stream captures; call the op once before for a quick capture");
  }
  CUkern_st* kernel = load_kernel(code, architecture_on(code, device));
  cuda_device::load_now(kernel, device.device.index, code.entry);
  slot.kernel.store(kernel, std::memory_order_release);
  return kernel;
}

}  // namespace kernel_pytorch::jit
