// Stacks and the switch between them. x86-64: the registers that a call must keep, 5 ns; ucontext would make a system
// call a switch.
#pragma once

#include <cstddef>

namespace emulated {

inline constexpr size_t kStackBytes = 256 << 10;  // reserved; pages are taken when touched

// A stack with a guard page below it; given back stacks are used again.
char* take_stack();
void give_stack(char* stack);
// The stack pointer of a fiber that begins in `begin`, which must never return.
void* prepare_stack(char* stack, void (*begin)());
bool is_stack_guard(const void* address);

extern "C" void emulated_switch(void** save_stack_pointer, void* next_stack_pointer);

}  // namespace emulated
