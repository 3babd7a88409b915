// Integer names shared by host and device code. NVRTC has no standard headers, and kernels must not need a toolkit's,
// so under NVRTC the names are defined here; every header that both sides include may include this one (and philox.h)
// and no other.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
// Before a constexpr function of such a header: NVRTC takes an unmarked one for host code and refuses it.
#define KP_SHARED_CODE __device__
#else
#include <cstddef>
#include <cstdint>
#define KP_SHARED_CODE
#endif
