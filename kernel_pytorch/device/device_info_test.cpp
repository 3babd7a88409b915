// Detection against what the kernel says of the same machine, and the own context built on it.
#include "kernel_pytorch/device/device_info.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "kernel_pytorch/base/error.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/context.h"
#include "kernel_pytorch/device/cpu/cpu_info.h"
#include "kernel_pytorch/device/cpu/topology.h"

namespace kernel_pytorch {
namespace {

std::set<std::string> kernel_flags() {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
    break;
  }
  return flags;
}

#if defined(__x86_64__)
TEST(DeviceInfo, CpuLevelAgreesWithTheKernelsFlags) {
  const std::set<std::string> flags = kernel_flags();
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags";
  const auto all = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (!flags.contains(name)) return false;
    }
    return true;
  };
  CpuIsa wanted = CpuIsa::kX86V2;
  if (all({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})) {
    wanted = CpuIsa::kX86V3;
    if (all({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})) {
      wanted = CpuIsa::kX86V4;
      if (all({"avx512_bf16"})) {
        wanted = CpuIsa::kX86V4Bf16;
        if (all({"amx_tile", "amx_bf16", "amx_int8"}) && cpu_device::request_amx_permission())
          wanted = CpuIsa::kX86V4Amx;
      }
    }
  }
  EXPECT_EQ(name_of(device_info(Device{}).cpu.machine_isa), name_of(wanted));
}
#endif

TEST(DeviceInfo, CpuFieldsMakeSense) {
  const DeviceInfo& info = device_info(Device{});
  EXPECT_TRUE(info.is_cpu());
  EXPECT_FALSE(info.name.empty());
  EXPECT_EQ(info.name.find('\0'), std::string::npos);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 28);
  EXPECT_GE(info.cpu.cores, 1);
  EXPECT_GE(info.cpu.l1_data_bytes, 8 << 10);
  EXPECT_LE(info.cpu.l1_data_bytes, 1 << 20);
  EXPECT_GE(info.cpu.l2_bytes, info.cpu.l1_data_bytes);
  EXPECT_LE(info.cpu.isa, info.cpu.machine_isa);
  EXPECT_EQ(info.cuda.multiprocessors, 0);
}

TEST(DeviceInfo, FingerprintNamesWhatTimesDependOn) {
  const DeviceInfo& info = device_info(Device{});
  EXPECT_TRUE(info.fingerprint.starts_with(info.name + "|" + std::string(name_of(info.cpu.isa)) + "|L1 "));
  EXPECT_TRUE(info.fingerprint.ends_with("|" + std::to_string(info.cpu.cores) + " cores")) << info.fingerprint;
  EXPECT_EQ(info.fingerprint_hash, hash_text(info.fingerprint));
}

TEST(DeviceInfo, CpuIsFirstAndEveryDeviceIsFound) {
  const std::vector<DeviceInfo>& all = devices();
  ASSERT_FALSE(all.empty());
  EXPECT_TRUE(all[0].is_cpu());
  EXPECT_EQ(all[0].fingerprint, device_info(Device{}).fingerprint);
  EXPECT_EQ(cuda_absence().empty(), all.size() > 1);
  for (const DeviceInfo& info : all) {
    EXPECT_EQ(device_info(info.device).fingerprint, info.fingerprint);
    EXPECT_EQ(info.cpu.cores, all[0].cpu.cores) << "the host's, for every device";
  }
}

TEST(DeviceInfo, AMissingDeviceIsAnErrorThatSaysWhy) {
  for (const Device missing : {Device{DeviceKind::kCuda, 999}, Device{DeviceKind::kCpu, 1}}) {
    try {
      device_info(missing);
      ADD_FAILURE() << "no error for " << missing;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_NE(error.message().find(to_string(missing)), std::string::npos) << error.message();
    }
  }
}

TEST(DeviceInfo, TheLevelCanBeCappedNeverRaised) {
  using cpu_device::cap_isa;
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4, ""), CpuIsa::kX86V4);
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4, "v2"), CpuIsa::kX86V2);
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4, "v3"), CpuIsa::kX86V3);
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4, "v4amx"), CpuIsa::kX86V4);
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4Amx, "v4bf16"), CpuIsa::kX86V4Bf16);
  EXPECT_EQ(cap_isa(CpuIsa::kX86V4Amx, "neon"), CpuIsa::kX86V4Amx) << "another architecture's";
  EXPECT_EQ(cap_isa(CpuIsa::kNeon, "v2"), CpuIsa::kNeon);
  EXPECT_EQ(cap_isa(CpuIsa::kNeon, "sve256"), CpuIsa::kNeon);
  EXPECT_EQ(cap_isa(CpuIsa::kSve256, "neonbf16"), CpuIsa::kNeonBf16);
  EXPECT_EQ(cap_isa(CpuIsa::kNeonBf16, "neondot"), CpuIsa::kNeonDot);
  EXPECT_EQ(cap_isa(CpuIsa::kSve256, "neon"), CpuIsa::kNeon);
  const Options before = options();
  Options capped = before;
  capped.cpu_isa = device_info(Device{}).cpu.machine_isa >= CpuIsa::kNeon ? "neon" : "v2";
  set_options_for_process(capped);
  const DeviceInfo info = cpu_device::detect();
  set_options_for_process(before);
  EXPECT_EQ(name_of(info.cpu.isa), capped.cpu_isa);
  EXPECT_EQ(info.cpu.machine_isa, device_info(Device{}).cpu.machine_isa);
}

TEST(DeviceInfo, ALevelOfAnotherArchitectureIsNamed) {
  static std::string said;
  const Options before = options();
  Options capped = before;
  capped.cpu_isa = device_info(Device{}).cpu.machine_isa >= CpuIsa::kNeon ? "v3" : "neon";
  set_log_sink([](LogLevel, std::string_view message) { said += message; });
  set_options_for_process(capped);
  const DeviceInfo info = cpu_device::detect();
  set_options_for_process(before);
  set_log_sink(nullptr);
  EXPECT_EQ(info.cpu.isa, info.cpu.machine_isa);
  EXPECT_NE(said.find("ignoring KERNEL_PYTORCH_CPU_ISA=" + capped.cpu_isa), std::string::npos) << said;
}

TEST(DeviceInfo, CoresAndMemoryAreWhatThisProcessMayUse) {
  const DeviceInfo& info = device_info(Device{});
  const cpu_device::Topology& machine = cpu_device::topology();
  EXPECT_EQ(info.cpu.cores, machine.threads());
  if (machine.memory_limit > 0) EXPECT_LE(info.memory_bytes, machine.memory_limit);
}

TEST(OwnContext, ScratchIsAlignedDistinctAndReusedAfterTheCall) {
  OwnContext context;
  EXPECT_TRUE(context->device() == Device{});
  ASSERT_NE(context->threads, nullptr);
  Scratch& scratch = *context->scratch;
  std::set<void*> first, second;
  for (std::set<void*>* addresses : {&first, &second}) {
    const ScratchScope scope(&scratch);
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{100000}}) {
      void* memory = scratch.allocate(bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
      std::fill_n(static_cast<char*>(memory), bytes, 'x');  // ASan looks at the size
      EXPECT_TRUE(addresses->insert(memory).second);
    }
  }
  EXPECT_EQ(first, second) << "a call in a loop must not grow";
}

TEST(OwnContext, AnInnerCallKeepsTheOutersScratch) {
  OwnContext context;
  const ScratchScope outer(context->scratch);
  void* mine = context->scratch->allocate(1000);
  void* theirs;
  {
    const ScratchScope inner(context->scratch);
    theirs = context->scratch->allocate(1000);
  }
  EXPECT_NE(mine, theirs);
  EXPECT_NE(context->scratch->allocate(1000), mine);
}

TEST(OwnContext, RefusesWhatCannotBe) {
  OwnContext context;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their allocators stop the program instead
  EXPECT_THROW(context->scratch->allocate(SIZE_MAX / 4), Error);
#endif
  EXPECT_THROW(context->scratch->allocate(SIZE_MAX - 8), Error);
  int not_a_stream = 0;
  EXPECT_THROW(OwnContext(Device{}, &not_a_stream), Error);
  EXPECT_THROW(OwnContext(Device{DeviceKind::kCuda, 999}), Error);
}

}  // namespace
}  // namespace kernel_pytorch
