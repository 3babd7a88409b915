// Loaded kernels, launches, streams, captures and events of the emulated driver.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "tests/emulated_gpu/runtime/driver.h"

using namespace emulated;
namespace cuda = kernel_pytorch::cuda_device;

#define EMULATED_API extern "C" __attribute__((visibility("default"))) int

namespace emulated {
namespace {

constexpr unsigned kDefaultShared = 48 << 10;
int captures = 0;

// A cubin's bytes end where its ELF section headers end.
size_t elf_bytes(const void* code) {
  uint64_t section_table;
  uint16_t entry_bytes, entries;
  const auto* bytes = static_cast<const char*>(code);
  std::memcpy(&section_table, bytes + 0x28, 8);
  std::memcpy(&entry_bytes, bytes + 0x3a, 2);
  std::memcpy(&entries, bytes + 0x3c, 2);
  return section_table + size_t{entry_bytes} * entries;
}

}  // namespace

unsigned dynamic_limit(const CUkern_st& kernel) {
  return kernel.dynamic_bytes != 0 ? kernel.dynamic_bytes : kDefaultShared - kernel.table->static_shared_bytes;
}

bool is_any_capturing() {
  return captures > 0;
}
void count_capture(int change) {
  captures += change;
}

int submit(CUstream_st* stream, Work work) {
  if (stream != nullptr && stream->capture != nullptr) {
    stream->capture->work.push_back(std::move(work));
    return kOk;
  }
  if (stream == nullptr && is_any_capturing())
    return report(kCaptureImplicit, "work on the legacy stream during a capture");
  return work();
}

int launch(const cuda::LaunchConfiguration& configuration, CUkern_st& kernel, void** arguments) {
  auto request = std::make_shared<LaunchRequest>();
  request->kernel = kernel.table;
  request->name = kernel.name;
  request->shared_bytes = configuration.shared_bytes;
  unsigned threads = 1, cluster_blocks = 1;
  for (int i = 0; i < 3; ++i) {
    request->grid[i] = configuration.grid[i];
    request->block[i] = configuration.block[i];
    request->cluster[i] = 1;
    threads *= configuration.block[i];
  }
  for (unsigned i = 0; i < configuration.attribute_count; ++i) {
    if (configuration.attributes[i].id != cuda::LaunchAttribute::kClusterDimension) continue;
    for (int d = 0; d < 3; ++d) {
      request->cluster[d] = configuration.attributes[i].value.cluster[d];
      cluster_blocks *= request->cluster[d];
    }
  }
  const auto refuse = [&](int result, const std::string& why) { return report(result, kernel.name + ": " + why); };
  if (threads == 0 || threads > 1024) return refuse(kInvalidValue, std::to_string(threads) + " threads a block");
  for (int i = 0; i < 3; ++i) {
    const unsigned most = i == 0 ? 0x7fffffffu : 65535u;
    if (request->grid[i] == 0 || request->grid[i] > most)
      return refuse(kInvalidValue, "a grid of " + std::to_string(request->grid[i]) + " blocks");
    if (request->cluster[i] == 0 || request->grid[i] % request->cluster[i] != 0) {
      return refuse(kInvalidClusterSize, "a grid that is no multiple of its cluster");
    }
  }
  if (cluster_blocks > 1 && settings().capability < 90) return refuse(kInvalidClusterSize, "clusters need sm_90");
  if (cluster_blocks > (kernel.large_clusters ? 16 : 8)) {
    return refuse(kInvalidClusterSize, "a cluster of " + std::to_string(cluster_blocks) + " blocks");
  }
  if (request->shared_bytes > dynamic_limit(kernel) ||
      request->shared_bytes + kernel.table->static_shared_bytes > static_cast<unsigned>(shared_limit())) {
    return refuse(kInvalidValue, std::to_string(request->shared_bytes) + " bytes of dynamic shared memory and " +
                                     std::to_string(kernel.table->static_shared_bytes) + " static; granted are " +
                                     std::to_string(dynamic_limit(kernel)) + ", the device has " +
                                     std::to_string(shared_limit()));
  }
  for (unsigned i = 0; i < kernel.table->argument_count; ++i) {
    const auto* bytes = static_cast<const char*>(arguments[i]);
    // Fresh memory is aligned to 16 bytes; a tensor map's wish of 64 is not needed here.
    request->arguments.emplace_back(bytes, bytes + kernel.table->argument_bytes[i]);
  }
  return submit(configuration.stream, [request] {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const std::string problem = run_launch(*request);
    if (problem.empty()) return static_cast<int>(kOk);
    const bool is_address = problem.find("an allocation") != std::string::npos;
    return report(is_address ? kIllegalAddress : kLaunchFailed, request->name + ": " + problem);
  });
}

}  // namespace emulated

EMULATED_API cuLibraryLoadData(CUlib_st** library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  if (std::memcmp(code, "\177ELF", 4) != 0)
    return report(kInvalidImage, "the code is no shared object of the emulated compiler");
  char path[] = "/tmp/emulated-kernel-XXXXXX";
  const int file = mkstemp(path);
  if (file < 0) return report(kInvalidImage, "no temporary file for a kernel");
  const size_t bytes = elf_bytes(code);
  const bool is_written = write(file, code, bytes) == static_cast<ssize_t>(bytes);
  close(file);
  auto loaded = std::make_unique<CUlib_st>();
  if (is_written) loaded->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const std::string problem = loaded->handle == nullptr ? dlerror() : "";
  unlink(path);
  if (loaded->handle == nullptr) return report(kInvalidImage, "loading a kernel: " + problem);
  *library = loaded.release();
  return kOk;
}
EMULATED_API cuLibraryUnload(CUlib_st* library) {
  dlclose(library->handle);
  delete library;
  return kOk;
}
EMULATED_API cuLibraryGetKernel(CUkern_st** kernel, CUlib_st* library, const char* name) {
  const auto* table = static_cast<const EmulatedKernel*>(dlsym(library->handle, "emulated_kernel"));
  const auto* known = static_cast<const char* const*>(dlsym(library->handle, "emulated_kernel_name"));
  if (table == nullptr || known == nullptr || std::strcmp(*known, name) != 0) {
    return report(kNotFound, std::string("no kernel ") + name);
  }
  std::unique_ptr<CUkern_st>& slot = library->kernels[name];
  if (slot == nullptr) {
    const auto* text = static_cast<const char* const*>(dlsym(library->handle, "emulated_kernel_entry"));
    slot = std::make_unique<CUkern_st>(CUkern_st{table, *text});
  }
  *kernel = slot.get();
  return kOk;
}
EMULATED_API cuKernelGetFunction(CUfunc_st** function, CUkern_st* kernel) {
  *function = reinterpret_cast<CUfunc_st*>(kernel);
  return kOk;
}
EMULATED_API cuFuncLoad(CUfunc_st*) {
  return kOk;
}
EMULATED_API cuKernelGetAttribute(int* value, int attribute, CUkern_st* kernel, int) {
  switch (attribute) {
    case cuda::kStaticSharedBytes:
      *value = static_cast<int>(kernel->table->static_shared_bytes);
      return kOk;
    case cuda::kLocalBytes:
      *value = 0;  // not known: the host compiler's frames say nothing about ptxas' registers
      return kOk;
    case cuda::kRegisters:
      *value = 32;
      return kOk;
    case cuda::kMaximumDynamicSharedBytes:
      *value = static_cast<int>(dynamic_limit(*kernel));
      return kOk;
    default:
      return report(kInvalidValue, "cuKernelGetAttribute: attribute " + std::to_string(attribute) + " is not emulated");
  }
}
EMULATED_API cuKernelSetAttribute(int attribute, int value, CUkern_st* kernel, int) {
  if (attribute == cuda::kMaximumDynamicSharedBytes) {
    if (value < 0 || value + static_cast<int>(kernel->table->static_shared_bytes) > shared_limit()) {
      return report(kInvalidValue, kernel->name + ": granting " + std::to_string(value) +
                                       " bytes of shared memory; the device has " + std::to_string(shared_limit()));
    }
    kernel->dynamic_bytes = static_cast<unsigned>(value);
    return kOk;
  }
  if (attribute == cuda::kNonPortableClusterSizeAllowed) {
    kernel->large_clusters = value != 0;
    return kOk;
  }
  return report(kInvalidValue, "cuKernelSetAttribute: attribute " + std::to_string(attribute) + " is not emulated");
}
EMULATED_API cuLaunchKernelEx(const cuda::LaunchConfiguration* configuration, CUfunc_st* function, void** arguments,
                              void**) {
  return launch(*configuration, *reinterpret_cast<CUkern_st*>(function), arguments);
}
EMULATED_API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunc_st* function, int threads,
                                                         size_t shared_bytes) {
  const auto& kernel = *reinterpret_cast<CUkern_st*>(function);
  const size_t bytes = shared_bytes + kernel.table->static_shared_bytes + 1024;
  const auto by_shared = static_cast<int>((static_cast<size_t>(shared_limit()) + 1024) / bytes);
  *blocks = std::min({32, 2048 / std::max(threads, 1), by_shared});
  return kOk;
}

EMULATED_API cuStreamCreate(CUstream_st** stream, unsigned) {
  *stream = new CUstream_st;
  return kOk;
}
EMULATED_API cuStreamDestroy_v2(CUstream_st* stream) {
  delete stream;
  return kOk;
}
EMULATED_API cuStreamSynchronize(CUstream_st* stream) {
  const bool breaks = stream == nullptr ? is_any_capturing() : stream->capture != nullptr;
  return breaks ? report(kCaptureUnsupported, "waiting for a stream that captures") : static_cast<int>(kOk);
}
EMULATED_API cuStreamIsCapturing(CUstream_st* stream, int* status) {
  *status = 0;
  if (stream == nullptr && is_any_capturing()) return kCaptureImplicit;
  if (stream != nullptr && stream->capture != nullptr) *status = 1;
  return kOk;
}
EMULATED_API cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current_mode = 0;
  std::swap(*mode, current_mode);
  return kOk;
}
EMULATED_API cuStreamBeginCapture_v2(CUstream_st* stream, int) {
  if (stream == nullptr || stream->capture != nullptr) return report(kCaptureUnsupported, "beginning a capture");
  stream->capture = new CUgraph_st;
  count_capture(1);
  return kOk;
}
EMULATED_API cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
  if (stream == nullptr || stream->capture == nullptr)
    return report(kCaptureUnsupported, "ending a capture that did not begin");
  *graph = stream->capture;
  stream->capture = nullptr;
  count_capture(-1);
  return kOk;
}
EMULATED_API cuGraphInstantiateWithFlags(CUgraphExec_st** executable, CUgraph_st* graph, unsigned long long) {
  *executable = new CUgraphExec_st{graph->work};
  return kOk;
}
EMULATED_API cuGraphLaunch(CUgraphExec_st* executable, CUstream_st* stream) {
  for (const Work& work : executable->work) {
    if (const int result = submit(stream, work); result != kOk) return result;
  }
  return kOk;
}
EMULATED_API cuGraphDestroy(CUgraph_st* graph) {
  delete graph;
  return kOk;
}
EMULATED_API cuGraphExecDestroy(CUgraphExec_st* executable) {
  delete executable;
  return kOk;
}

EMULATED_API cuEventCreate(CUevent_st** event, unsigned) {
  *event = new CUevent_st;
  return kOk;
}
EMULATED_API cuEventDestroy_v2(CUevent_st* event) {
  delete event;
  return kOk;
}
EMULATED_API cuEventRecord(CUevent_st* event, CUstream_st*) {
  event->time = std::chrono::steady_clock::now();
  event->is_recorded = true;
  return kOk;
}
EMULATED_API cuEventSynchronize(CUevent_st*) {
  return kOk;
}
EMULATED_API cuEventElapsedTime(float* milliseconds, CUevent_st* start, CUevent_st* end) {
  if (!start->is_recorded || !end->is_recorded)
    return report(kInvalidHandle, "the time of an event that was not recorded");
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return kOk;
}
