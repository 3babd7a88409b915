#include "kernel_pytorch/device/cpu/cpu_info.h"

#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <string>

#include "kernel_pytorch/base/log.h"
#include "kernel_pytorch/base/options.h"
#include "kernel_pytorch/device/cpu/arm_level.h"
#include "kernel_pytorch/device/cpu/system_files.h"
#include "kernel_pytorch/device/cpu/topology.h"
#include "kernel_pytorch/device/cpu/x86_level.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace kernel_pytorch::cpu_device {
namespace {

void note_cache(CpuInfo& cpu, int level, int64_t bytes) {
  if (level == 1) cpu.l1_data_bytes = bytes;
  if (level == 2) cpu.l2_bytes = bytes;
  if (level == 3) cpu.l3_bytes = bytes;
}

int64_t parse_cache_size(const std::string& text) {  // "48K", "2M"
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return 0;
  const char unit = end == text.data() + text.size() ? '\0' : *end;
  return number << (unit == 'K' ? 10 : unit == 'M' ? 20 : unit == 'G' ? 30 : 0);
}

void read_caches_from_kernel(CpuInfo& cpu) {
  for (int i = 0; i < 8; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string level = first_line(folder + "level");
    if (level.empty()) return;
    if (first_line(folder + "type") == "Instruction") continue;
    note_cache(cpu, level[0] - '0', parse_cache_size(first_line(folder + "size")));
  }
}

std::string trimmed(std::string text) {
  text.erase(std::find(text.begin(), text.end(), '\0'), text.end());
  const size_t first = text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(' ') + 1 - first);
}

#if defined(__x86_64__)

struct CpuidAnswer {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidAnswer ask(uint32_t leaf, uint32_t subleaf = 0) {  // zeros where the CPU has no such leaf
  CpuidAnswer answer;
  __get_cpuid_count(leaf, subleaf, &answer.eax, &answer.ebx, &answer.ecx, &answer.edx);
  return answer;
}

uint64_t read_xcr0() {
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

X86Registers read_registers() {
  constexpr uint32_t kOsxsave = 1u << 27;  // without it xgetbv is an illegal instruction
  X86Registers registers;
  registers.leaf1_ecx = ask(1).ecx;
  registers.leaf7_ebx = ask(7).ebx;
  registers.leaf7_edx = ask(7).edx;
  registers.leaf7_1_eax = ask(7, 1).eax;
  registers.extended1_ecx = ask(0x80000001).ecx;
  registers.tile_palettes = ask(0x1d).eax;
  if (registers.leaf1_ecx & kOsxsave) registers.enabled_state = read_xcr0();
  return registers;
}

bool read_caches_from_leaf(CpuInfo& cpu, uint32_t leaf) {
  constexpr uint32_t kInstruction = 2;
  bool any = false;
  for (uint32_t i = 0; i < 16; ++i) {
    const CpuidAnswer answer = ask(leaf, i);
    const uint32_t type = answer.eax & 31;
    if (type == 0) break;
    if (type == kInstruction) continue;
    const int64_t ways = (answer.ebx >> 22) + 1, partitions = (answer.ebx >> 12 & 1023) + 1;
    const int64_t line_bytes = (answer.ebx & 4095) + 1, sets = int64_t{answer.ecx} + 1;
    note_cache(cpu, static_cast<int>(answer.eax >> 5 & 7), ways * partitions * line_bytes * sets);
    any = true;
  }
  return any;
}

std::string model_name() {
  std::string name;
  for (uint32_t leaf = 0x80000002; leaf <= 0x80000004; ++leaf) {
    const CpuidAnswer answer = ask(leaf);
    for (uint32_t word : {answer.eax, answer.ebx, answer.ecx, answer.edx}) {
      for (int byte = 0; byte < 4; ++byte) name.push_back(static_cast<char>(word >> (8 * byte)));
    }
  }
  name = trimmed(name);
  return name.empty() ? "x86-64 processor" : name;
}

void detect_level_and_caches(CpuInfo& cpu) {
  const X86Registers registers = read_registers();
  if (!has_x86_v2(registers)) {
    log_once(LogLevel::kError, "cpu-below-v2",
             "this CPU lacks x86-64-v2 (SSE4.2, POPCNT); only the reference kernels can run on it");
  }
  cpu.machine_isa = x86_level(registers, has_amx_bits(registers) && request_amx_permission());
  cpu.amx_palette_missing = has_amx_bits(registers) && registers.tile_palettes == 0;
  constexpr uint32_t kIntelCaches = 4, kAmdCaches = 0x8000001d;
  if (!read_caches_from_leaf(cpu, kIntelCaches) && !read_caches_from_leaf(cpu, kAmdCaches))
    read_caches_from_kernel(cpu);
}

#elif defined(__aarch64__)

// Of /proc/cpuinfo's first processor: "CPU part\t: 0xd40" has the value "0xd40". Empty without such a line.
std::string value_in_cpuinfo(std::string_view field) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(field)) return trimmed(line.substr(line.find(':') + 1));
  }
  return "";
}

std::string model_name() {
  const std::string implementer = value_in_cpuinfo("CPU implementer"), part = value_in_cpuinfo("CPU part");
  if (!implementer.empty() && !part.empty()) {
    return arm_name(std::strtoull(implementer.c_str(), nullptr, 16), std::strtoull(part.c_str(), nullptr, 16));
  }
  if (const std::string name = value_in_cpuinfo("model name"); !name.empty()) return name;
  utsname names{};
  return uname(&names) == 0 ? std::string(names.machine) + " processor" : "processor";
}

CpuIsa level_of_machine() {
  constexpr unsigned long kHasSve = 1ul << 22;
  constexpr int kGetVectorLength = 51, kLengthMask = 0xffff;  // PR_SVE_GET_VL
  ArmFeatures features{.capabilities = getauxval(AT_HWCAP), .more_capabilities = getauxval(AT_HWCAP2)};
  if (features.capabilities & kHasSve) {
    const int length = prctl(kGetVectorLength);
    if (length > 0) features.sve_vector_bytes = length & kLengthMask;
  }
  return arm_level(features);
}

void detect_level_and_caches(CpuInfo& cpu) {
  cpu.machine_isa = level_of_machine();
  read_caches_from_kernel(cpu);
}

#endif

}  // namespace

bool request_amx_permission() {
#if defined(__x86_64__) && defined(SYS_arch_prctl)
  constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;
  uint64_t granted = 0;
  // ENOSPC when a thread's alternate signal stack is too small for tiles, EINVAL or EPERM where there are none.
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  return syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1) != 0;
#else
  return false;
#endif
}

CpuIsa cap_isa(CpuIsa machine, std::string_view cap) {
  // Down from the machine's own, to the first level of its architecture.
  const CpuIsa first = machine >= CpuIsa::kNeon ? CpuIsa::kNeon : CpuIsa::kX86V2;
  for (int level = static_cast<int>(machine); level >= static_cast<int>(first); --level) {
    if (name_of(static_cast<CpuIsa>(level)) == cap) return static_cast<CpuIsa>(level);
  }
  return machine;
}

DeviceInfo detect() {
  DeviceInfo info;
  info.name = model_name();
  struct sysinfo system {};
  if (sysinfo(&system) == 0) info.memory_bytes = static_cast<int64_t>(system.totalram) * system.mem_unit;
  detect_level_and_caches(info.cpu);
  const std::string& cap = options().cpu_isa;
  info.cpu.isa = cap_isa(info.cpu.machine_isa, cap);
  if (!cap.empty() && cap.starts_with('v') == (info.cpu.machine_isa >= CpuIsa::kNeon)) {
    log_once(LogLevel::kWarning, "cpu-isa-of-another-architecture",
             concat("ignoring KERNEL_PYTORCH_CPU_ISA=", cap, ": a level of another architecture; this processor has ",
                    name_of(info.cpu.machine_isa)));
  }
  const Topology& found = topology();
  info.cpu.cores = found.threads();
  if (found.memory_limit > 0) info.memory_bytes = std::min(info.memory_bytes, found.memory_limit);
  return info;
}

}  // namespace kernel_pytorch::cpu_device
