// The CPU levels that a *_isa.cpp is built for, seen from outside: an op declares what each level defines, and asks
// for the one that a machine runs. Macros, since what they name stands in a namespace per level (cpu/isa.h), and no
// includes, since code of every level reads this: who asks includes device/device_info.h.
//   KP_EACH_CPU_LEVEL(extern const RowKernels kRowKernels;)                          // in the op's header
//   const RowKernels& kernels = KP_AT_CPU_LEVEL(device.cpu.isa, kRowKernels);        // in its host code
#pragma once

#if defined(__aarch64__)
#define KP_EACH_CPU_LEVEL(...) \
  namespace isa_neon {         \
  __VA_ARGS__                  \
  }                            \
  namespace isa_sve256 {       \
  __VA_ARGS__                  \
  }
#define KP_AT_CPU_LEVEL(isa, name) ((isa) >= ::kernel_pytorch::CpuIsa::kSve256 ? isa_sve256::name : isa_neon::name)
#else
#define KP_EACH_CPU_LEVEL(...) \
  namespace isa_v2 {           \
  __VA_ARGS__                  \
  }                            \
  namespace isa_v3 {           \
  __VA_ARGS__                  \
  }                            \
  namespace isa_v4 {           \
  __VA_ARGS__                  \
  }
#define KP_AT_CPU_LEVEL(isa, name)                            \
  ((isa) >= ::kernel_pytorch::CpuIsa::kX86V4   ? isa_v4::name \
   : (isa) == ::kernel_pytorch::CpuIsa::kX86V3 ? isa_v3::name \
                                               : isa_v2::name)
#endif
