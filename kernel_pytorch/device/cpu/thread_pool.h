// The library's own threads, used where no framework brings its own (C++ users, the command line, tuning).
// Survives fork(): the child starts a new pool at its first use.
#pragma once

#include "kernel_pytorch/base/export.h"
#include "kernel_pytorch/device/context.h"

namespace kernel_pytorch::cpu_device {

// One pool per process, Options::threads wide (default: Topology::threads of the calling thread's affinity mask). The
// calling thread is one of the workers. On machines of several NUMA nodes the default pool's threads stay each on its
// node, so that what they wrote first stays near.
KP_EXPORT Threads& own_threads();

}  // namespace kernel_pytorch::cpu_device
