#include "tests/emulated_gpu/runtime/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#if !defined(__x86_64__)
#error "the emulated GPU switches stacks by x86-64 assembly"
#endif

asm(R"(
.text
.globl emulated_switch
.hidden emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, .-emulated_switch
)");

namespace emulated {
namespace {

constexpr size_t kGuardBytes = 4096;
// Stacks of the same size at the same place in a page would share the sets of the caches.
constexpr size_t kColours = 16, kColourBytes = 64 * 5;

std::vector<char*>& free_stacks() {
  static auto* stacks = new std::vector<char*>;
  return *stacks;
}
std::vector<char*>& all_stacks() {
  static auto* stacks = new std::vector<char*>;
  return *stacks;
}

}  // namespace

char* take_stack() {
  if (!free_stacks().empty()) {
    char* stack = free_stacks().back();
    free_stacks().pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  mprotect(memory, kGuardBytes, PROT_NONE);
  all_stacks().push_back(static_cast<char*>(memory));
  return static_cast<char*>(memory);
}

void give_stack(char* stack) {
  free_stacks().push_back(stack);
}

void* prepare_stack(char* stack, void (*begin)()) {
  const size_t colour = reinterpret_cast<uintptr_t>(stack) / kStackBytes % kColours * kColourBytes;
  auto* top = reinterpret_cast<uint64_t*>(stack + kStackBytes - 64 - colour / 16 * 16);
  *--top = 0;  // where begin() would return to; also the alignment of a call
  *--top = reinterpret_cast<uint64_t>(begin);
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}

bool is_stack_guard(const void* address) {
  for (const char* stack : all_stacks()) {
    if (address >= stack && address < stack + kGuardBytes) return true;
  }
  return false;
}

}  // namespace emulated
