#include "tests/emulated_gpu/runtime/memory.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/emulated_gpu/runtime/fiber.h"
#include "tests/emulated_gpu/runtime/machine.h"

namespace emulated {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr unsigned char kCanary = 0xa5;
constexpr size_t kPoisonedAtMost = 64 << 20;  // of a larger one both ends, so that its pages are not taken
constexpr size_t kSharedRegion = 256 << 10;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Allocation {
  size_t bytes, tail;  // tail: canary up to the guard page
  char* mapping;
  size_t mapping_bytes;
};
std::mutex mutex;
std::map<char*, Allocation>& allocations() {
  static auto* all = new std::map<char*, Allocation>;
  return *all;
}
size_t total_bytes = 0;

std::vector<char*>& shared_regions() {
  static auto* regions = new std::vector<char*>;
  return *regions;
}

std::string text_of(const void* address) {
  char text[32];
  std::snprintf(text, sizeof(text), "%p", address);
  return text;
}

std::string describe_place(const char* at, const char* memory, const Allocation& allocation) {
  const long past = at - (memory + allocation.bytes);
  const std::string where = past >= 0 ? std::to_string(past) + " bytes past the end of an allocation of "
                                      : std::to_string(memory - at) + " bytes before an allocation of ";
  return where + std::to_string(allocation.bytes) + " bytes at " + text_of(memory);
}

[[noreturn]] void abandon() {
  fail("");  // the message is there already
}

}  // namespace

void* allocate(size_t bytes) {
  const size_t body = round_up(bytes, kAlignment);
  const size_t mapping_bytes = round_up(body, kPage) + 2 * kPage;
  void* mapping =
      mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  auto* start = static_cast<char*>(mapping);
  char* end = start + mapping_bytes - kPage;
  mprotect(start, kPage, PROT_NONE);
  mprotect(end, kPage, PROT_NONE);
  char* memory = end - body;
  if (bytes <= kPoisonedAtMost) {
    std::memset(memory, kPoison, bytes);
  } else {
    std::memset(memory, kPoison, 1 << 20);
    std::memset(memory + bytes - (1 << 20), kPoison, 1 << 20);
  }
  std::memset(memory + bytes, kCanary, body - bytes);
  std::memset(start + kPage, kCanary, static_cast<size_t>(memory - start) - kPage);
  const std::lock_guard lock(mutex);
  allocations()[memory] = {bytes, body - bytes, start, mapping_bytes};
  total_bytes += bytes;
  return memory;
}

namespace {

// What was written between an allocation and its guard pages; the canary is put back.
std::string check_canary(char* memory, const Allocation& allocation) {
  std::string problem;
  char* front = allocation.mapping + kPage;
  const auto check = [&](char* begin, char* end) {
    for (char* at = begin; at < end; ++at) {
      if (static_cast<unsigned char>(*at) == kCanary) continue;
      if (problem.empty()) problem = describe_place(at, memory, allocation) + " was written";
      *at = static_cast<char>(kCanary);
    }
  };
  check(front, memory);
  check(memory + allocation.bytes, memory + allocation.bytes + allocation.tail);
  return problem;
}

}  // namespace

std::string check_canaries() {
  const std::lock_guard lock(mutex);
  std::string problem;
  for (const auto& [memory, allocation] : allocations()) {
    const std::string found = check_canary(memory, allocation);
    if (problem.empty()) problem = found;
  }
  return problem;
}

std::string release(void* memory) {
  const std::lock_guard lock(mutex);
  const auto found = allocations().find(static_cast<char*>(memory));
  if (found == allocations().end()) return "freeing " + text_of(memory) + ", which is no allocation";
  const Allocation allocation = found->second;
  const std::string problem = check_canary(found->first, allocation);
  total_bytes -= allocation.bytes;
  munmap(allocation.mapping, allocation.mapping_bytes);
  allocations().erase(found);
  return problem;
}

std::string describe_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  std::string text = "address " + text_of(address);
  if (is_stack_guard(address)) return text + ": a thread's stack (local memory) is full";
  for (const char* region : shared_regions()) {
    if (at >= region && at < region + kSharedRegion + kPage) return text + ": past the end of shared memory";
  }
  const std::lock_guard lock(mutex);
  for (const auto& [memory, allocation] : allocations()) {
    if (at < allocation.mapping || at >= allocation.mapping + allocation.mapping_bytes) continue;
    return text + ": " + describe_place(at, memory, allocation);
  }
  return text + ": in no allocation";
}

size_t allocated_bytes() {
  const std::lock_guard lock(mutex);
  return total_bytes;
}

namespace {
std::vector<char*>& free_regions() {
  static auto* regions = new std::vector<char*>;
  return *regions;
}
}  // namespace

char* take_shared(size_t bytes) {
  char* region = nullptr;
  if (free_regions().empty()) {
    void* mapping = mmap(nullptr, kSharedRegion + kPage, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) abort();
    region = static_cast<char*>(mapping);
    mprotect(region + kSharedRegion, kPage, PROT_NONE);
    shared_regions().push_back(region);
  } else {
    region = free_regions().back();
    free_regions().pop_back();
  }
  const size_t body = round_up(bytes, 1024);
  char* shared = region + kSharedRegion - body;
  std::memset(shared, kCanary, kSharedStart);
  std::memset(shared + kSharedStart, kPoison, bytes - kSharedStart);
  std::memset(shared + bytes, kCanary, body - bytes);
  return shared;
}

std::string give_shared(char* shared, size_t bytes) {
  const size_t body = round_up(bytes, 1024);
  free_regions().push_back(shared + body - kSharedRegion);
  for (size_t i = 0; i < body; ++i) {
    if (i == kSharedStart) i = bytes;
    if (i < body && static_cast<unsigned char>(shared[i]) != kCanary) {
      return i < kSharedStart ? std::to_string(kSharedStart - i) + " bytes before shared memory were written"
                              : "byte " + std::to_string(i - bytes) + " past the end of shared memory was written";
    }
  }
  return "";
}

namespace {

thread_local char fault_stack[64 << 10];

void on_fault(int signal, siginfo_t* info, void* context) {
  if (current == nullptr) {  // not ours: again, with the default action
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    sigaction(signal, &action, nullptr);
    return;
  }
  note_fault(signal == SIGFPE ? "integer division by zero (or overflow)"
                              : "illegal memory access: " + describe_address(info->si_addr));
  auto* machine = static_cast<ucontext_t*>(context);
  auto stack = reinterpret_cast<uintptr_t>(current->stack) + kStackBytes - 4096;
  machine->uc_mcontext.gregs[REG_RSP] = static_cast<greg_t>(stack / 16 * 16 - 8);
  machine->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(abandon);
}

}  // namespace

FaultHandler::FaultHandler() {
  stack_t stack{};
  stack.ss_sp = fault_stack;
  stack.ss_size = sizeof(fault_stack);
  sigaltstack(&stack, &stack_);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &segmentation_);
  sigaction(SIGBUS, &action, &bus_);
  sigaction(SIGFPE, &action, &arithmetic_);
}

FaultHandler::~FaultHandler() {
  sigaction(SIGSEGV, &segmentation_, nullptr);
  sigaction(SIGBUS, &bus_, nullptr);
  sigaction(SIGFPE, &arithmetic_, nullptr);
  sigaltstack(&stack_, nullptr);
}

}  // namespace emulated
