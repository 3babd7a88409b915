// Loads and stores of eight bytes, emulated.
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

struct alignas(8) Word2 {
  uint32_t x, y;
};

inline Word2& emulated_word2(const void* address) {
  if (reinterpret_cast<unsigned long>(address) % 8 != 0) emulated_fail("an access of 8 bytes is not aligned");
  return *static_cast<Word2*>(const_cast<void*>(address));
}
inline Word2 ld_global_nc_l1_no_allocate_v2_if(bool wanted, const void* address) {
  return wanted ? emulated_word2(address) : Word2{0, 0};
}
inline void st_global_v2_if(bool wanted, void* address, Word2 value) {
  if (wanted) emulated_word2(address) = value;
}
inline Word2 ld_shared_v2(uint32_t address) {
  return *static_cast<Word2*>(emulated_shared_pointer(address, sizeof(Word2)));
}

}  // namespace kernel_pytorch::ptx
