// Dependent launches (kernels follow one another here), registers of warpgroups (as many as one likes).
#pragma once

#include "kernel_pytorch/base/fixed_width.h"

namespace kernel_pytorch::ptx {

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
template <int kRegisters>
inline void setmaxnreg_dec() {}
template <int kRegisters>
inline void setmaxnreg_inc() {}
inline void forget_origin(unsigned int&) {}

}  // namespace kernel_pytorch::ptx
